"""The first part: tokens to vectors."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from megalith.models.batch import Batch


class Lookup(nn.Module):
    """Rows of the table. A seam: vocabulary parallelism swaps it."""

    def forward(self, tokens: Tensor, weight: Float[Tensor, "vocab dim"]) -> Float[Tensor, "batch seq dim"]:
        return F.embedding(tokens, weight)


class Embedding(nn.Module):
    """Token embedding; takes the tokens as its input."""

    def __init__(self, dim: int, vocab: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, dim))
        self.lookup = Lookup()

    def forward(self, tokens: Tensor, batch: Batch) -> Float[Tensor, "batch seq dim"]:
        return self.lookup(tokens, self.weight)
