"""The first part: tokens to vectors."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from megalith.kernels.tiled import Table, look_up
from megalith.models.batch import Batch
from megalith.models.norm import norm
from megalith.spec.model import EmbeddingSpec


class Lookup(nn.Module):
    """Looks up rows of a table. Vocabulary parallelism replaces this module. `table`: reads the rows of `weight` in tiles; None: `weight`
    is in memory."""

    def forward(
        self, tokens: Tensor, weight: Float[Tensor, "vocab dim"], table: Table | None = None
    ) -> Float[Tensor, "batch seq dim"]:
        return F.embedding(tokens, weight) if table is None else look_up(tokens, weight, table)


class Embedding(nn.Module):
    """Token embedding with optional scale, learned position vectors and norm; the input is token ids.

    Before the norm the output is linear in the tables, so the outputs of ranks that hold different rows add up to the whole.
    """

    positions: nn.Parameter | None

    def __init__(self, dim: int, spec: EmbeddingSpec) -> None:
        super().__init__()
        self.scale = spec.scale
        self.weight = nn.Parameter(torch.empty(spec.vocab, dim))
        self.table: Table | None = None  # reads the rows in tiles, if the table is not in memory
        self.lookup: nn.Module = Lookup()
        self.register_parameter("positions", nn.Parameter(torch.empty(spec.positions, dim)) if spec.positions else None)
        self.position_lookup: nn.Module = Lookup()
        self.join: Callable[[Tensor], Tensor] = lambda x: x  # a seam: vocabulary parallelism adds up the ranks' sums
        self.norm = norm(dim, spec.norm) if spec.norm else None

    def forward(self, tokens: Tensor, batch: Batch) -> Float[Tensor, "batch seq dim"]:
        x = self.lookup(tokens, self.weight) if self.table is None else self.lookup(tokens, self.weight, self.table)
        if self.scale != 1.0:
            x = x * self.scale
        if self.positions is not None:
            positions = batch.positions
            if positions is None:
                positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
            x = x + self.position_lookup(positions, self.positions)
        x = self.join(x)
        return x if self.norm is None else self.norm(x)
