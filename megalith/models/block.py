"""One transformer block."""

from jaxtyping import Float
from torch import Tensor, nn

from megalith.models.attention import Attention
from megalith.models.batch import Batch
from megalith.models.latent import LatentAttention
from megalith.models.mlp import Mlp
from megalith.models.moe import Moe
from megalith.models.norm import norm
from megalith.spec.model import AttentionSpec, BlockSpec, LatentAttentionSpec, MlpSpec, MoeSpec

ATTENTIONS = {AttentionSpec: Attention, LatentAttentionSpec: LatentAttention}
MLPS = {MlpSpec: Mlp, MoeSpec: Moe}


class Block(nn.Module):
    """Pre-norm: x + attention(norm(x)), then x + mlp(norm(x)).

    Parallel (Wang & Komatsuzaki 2021): x + attention(norm(x)) + mlp(norm(x)), of one norm. With post-norms, what attention and the
    MLP add is normalised too.
    """

    def __init__(self, dim: int, spec: BlockSpec, rope_slot: int = 0) -> None:
        super().__init__()
        self.attention_norm = norm(dim, spec.norm)
        self.attention = ATTENTIONS[type(spec.attention)](dim, spec.attention, rope_slot)
        self.attention_post_norm = norm(dim, spec.norm) if spec.post_norms else None
        self.mlp_norm = None if spec.parallel else norm(dim, spec.norm)
        self.mlp = MLPS[type(spec.mlp)](dim, spec.mlp)
        self.mlp_post_norm = norm(dim, spec.norm) if spec.post_norms else None

    def forward(self, x: Float[Tensor, "batch seq dim"], batch: Batch) -> Float[Tensor, "batch seq dim"]:
        x, normal = self.attend(x, batch)
        return self.join(x, self.mlp(normal, batch))

    def attend(self, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """x with attention added, and what the MLP takes."""
        normal = self.attention_norm(x)
        x = x + _through(self.attention_post_norm, self.attention(normal, batch))
        return x, normal if self.mlp_norm is None else self.mlp_norm(x)

    def join(self, x: Tensor, out: Tensor) -> Tensor:
        """x with the MLP's output added."""
        return x + _through(self.mlp_post_norm, out)


def _through(module: nn.Module | None, x: Tensor) -> Tensor:
    return x if module is None else module(x)
