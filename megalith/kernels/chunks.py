"""The number of rows of logits that the loss has in memory at once. This module does not import torch, because predictions use it
too."""

CHUNK_BYTES = 128 * 2**20  # of fp32 logits: large enough for full-speed products, small beside the activations
TILE = 128  # rows a matrix product computes at once: it is fastest on whole ones


def chunk_rows(vocab: int, *, capped: bool) -> int:
    """Return the number of rows in a chunk of logits [rows, vocab]. With a soft cap, the derivative at each logit is in memory
    too."""
    held = 4 * vocab * (2 if capped else 1)
    return max(1, CHUNK_BYTES // held // TILE * TILE or CHUNK_BYTES // held)
