"""Proofs and measurements of the trainer: parity, drawn combinations, dry runs, fits, the doctor."""
