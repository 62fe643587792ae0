"""The number of rows of logits that the loss has in memory at once, and the tiles into which a table's rows are cut. This module does not
import torch, because predictions use it too."""

from math import gcd

CHUNK_BYTES = 128 * 2**20  # of fp32 logits: large enough for full-speed products, small beside the activations
TILE = 128  # rows a matrix product computes at once: it is fastest on whole ones


def chunk_rows(vocab: int, *, capped: bool) -> int:
    """Return the number of rows in a chunk of logits [rows, vocab]. With a soft cap, the derivative at each logit is in memory
    too."""
    held = 4 * vocab * (2 if capped else 1)
    return max(1, CHUNK_BYTES // held // TILE * TILE or CHUNK_BYTES // held)


GRAIN = 1 << 16
"""The number of elements of a tile is a multiple of this number. So the norm of a large gradient, which is summed in rows, and chunks of
state on disk have the same borders whether the table is cut or not."""


def tile_rows(asked: int, dim: int) -> int:
    """Return the number of rows in a tile of a table [vocab, dim], from the number that `train.vocab_tile` asks for; 0: no tiles."""
    unit = GRAIN // gcd(GRAIN, dim)
    return -(-asked // unit) * unit


def tiles_of(vocab: int, rows: int) -> tuple[range, ...]:
    """Return the rows of each tile of a table with `vocab` rows."""
    return tuple(range(first, min(first + rows, vocab)) for first in range(0, vocab, rows))
