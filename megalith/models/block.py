"""One transformer block."""

from jaxtyping import Float
from torch import Tensor, nn

from megalith.models.attention import Attention
from megalith.models.batch import Batch
from megalith.models.mlp import SwiGLU
from megalith.models.norm import RMSNorm
from megalith.spec.model import BlockSpec


class Block(nn.Module):
    """Pre-norm: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, dim: int, spec: BlockSpec, rope_slot: int = 0) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(dim, spec.norm_eps)
        self.attention = Attention(dim, spec.attention, rope_slot)
        self.mlp_norm = RMSNorm(dim, spec.norm_eps)
        self.mlp = SwiGLU(dim, spec.mlp.hidden)

    def forward(self, x: Float[Tensor, "batch seq dim"], batch: Batch) -> Float[Tensor, "batch seq dim"]:
        x = x + self.attention(self.attention_norm(x), batch)
        return x + self.mlp(self.mlp_norm(x))
