"""Grouped-query causal attention. The core is a seam: context parallelism and key-value caches swap it."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from megalith.kernels.rope import rotate
from megalith.models.batch import Batch, Pieces
from megalith.spec.model import AttentionSpec


class CausalCore(nn.Module):
    """softmax(q kᵀ / sqrt(head_dim)) v through torch's fused kernels: no seq x seq matrix, no dense mask.

    With `batch.pieces` each document attends to itself alone, piece by piece.
    """

    def forward(
        self,
        q: Float[Tensor, "batch seq heads head_dim"],
        k: Float[Tensor, "batch seq kv_heads head_dim"],
        v: Float[Tensor, "batch seq kv_heads head_dim"],
        batch: Batch,
    ) -> Float[Tensor, "batch seq heads head_dim"]:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = attend(q, k, v) if batch.pieces is None else attend_pieces(q, k, v, batch.pieces)  # pyright: ignore[reportCallIssue]
        return out.transpose(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of [batch, heads, seq, head_dim]; k and v may have fewer heads, each serving a group of q's."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


@torch.compiler.disable  # the lengths differ in every batch: compiled code would be compiled again for each
def attend_pieces(q: Tensor, k: Tensor, v: Tensor, pieces: Pieces) -> Tensor:
    """Causal attention inside each piece of each row; rows cut alike share their calls."""
    assert len(pieces) == q.shape[0] and all(sum(row) == q.shape[2] for row in pieces), (pieces, q.shape)
    if len(set(pieces)) == 1:
        return _attend_alike(q, k, v, pieces[0])
    alike: dict[tuple[int, ...], list[int]] = {}
    for row, lengths in enumerate(pieces):
        alike.setdefault(lengths, []).append(row)
    order = [row for rows in alike.values() for row in rows]
    parts = [_attend_alike(q[rows], k[rows], v[rows], lengths) for lengths, rows in alike.items()]
    back = torch.tensor(order, device=q.device).argsort()
    return torch.cat(parts)[back]


def _attend_alike(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...]) -> Tensor:
    if len(lengths) == 1:
        return attend(q, k, v)
    split = [x.split(lengths, dim=2) for x in (q, k, v)]
    return torch.cat([attend(*piece) for piece in zip(*split, strict=True)], dim=2)


class Attention(nn.Module):
    """Grouped-query attention. Heads are inferred (-1), so a copy that holds a share of the heads runs the same lines."""

    def __init__(self, dim: int, spec: AttentionSpec, rope_slot: int = 0) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        self.rope_slot = rope_slot  # which of `batch.rotary` is this layer's
        self.q = nn.Linear(dim, spec.heads * spec.head_dim, bias=False)
        self.k = nn.Linear(dim, spec.kv_heads * spec.head_dim, bias=False)
        self.v = nn.Linear(dim, spec.kv_heads * spec.head_dim, bias=False)
        self.out = nn.Linear(spec.heads * spec.head_dim, dim, bias=False)
        self.core: nn.Module = CausalCore()

    def forward(self, x: Float[Tensor, "batch seq dim"], batch: Batch) -> Float[Tensor, "batch seq dim"]:
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.q, self.k, self.v))
        cos, sin = batch.rotary[self.rope_slot]
        return self.out(self.core(rotate(q, cos, sin), rotate(k, cos, sin), v, batch).flatten(-2))
