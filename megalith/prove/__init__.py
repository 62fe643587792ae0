"""Proofs and measurements of the trainer: parity with one process, randomly drawn combinations of parallelisms, dry runs, memory
fits, the doctor."""
