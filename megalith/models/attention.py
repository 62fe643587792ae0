"""Grouped-query causal attention."""

from jaxtyping import Float
from torch import Tensor, nn

from megalith.kernels.rope import rotate
from megalith.models.batch import Batch
from megalith.models.core import CausalCore
from megalith.models.linear import Linear
from megalith.models.norm import RMSNorm
from megalith.spec.model import AttentionSpec


class Attention(nn.Module):
    """Grouped-query attention. Heads are inferred (-1), so a copy that holds a share of the heads runs the same code."""

    def __init__(self, dim: int, spec: AttentionSpec, rope_slot: int = 0) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        self.rotates = spec.rope is not None
        self.rotate = rotate  # a seam: a trace swaps it for a fused kernel
        self.rope_slot = rope_slot  # which of `batch.rotary` is this layer's
        self.q = Linear(dim, spec.heads * spec.head_dim, bool(spec.bias))
        self.k = Linear(dim, spec.kv_heads * spec.head_dim, bool(spec.bias))
        self.v = Linear(dim, spec.kv_heads * spec.head_dim, bool(spec.bias))
        self.q_norm = RMSNorm(spec.head_dim, spec.qk_norm) if spec.qk_norm else None
        self.k_norm = RMSNorm(spec.head_dim, spec.qk_norm) if spec.qk_norm else None
        self.core: nn.Module = CausalCore(scale=spec.scale, window=spec.window, softcap=spec.softcap)
        self.out = Linear(spec.heads * spec.head_dim, dim, spec.bias is True)

    def forward(self, x: Float[Tensor, "batch seq dim"], batch: Batch) -> Float[Tensor, "batch seq dim"]:
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.q, self.k, self.v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotates:
            cos, sin = batch.rotary[self.rope_slot]
            q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        return self.out(self.core(q, k, v, batch).flatten(-2))
