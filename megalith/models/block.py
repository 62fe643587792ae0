"""One block of a model: a part that mixes tokens, a part that works on each token alone, or both."""

from jaxtyping import Float
from torch import Tensor, nn

from megalith.models.attention import Attention
from megalith.models.batch import Batch
from megalith.models.latent import LatentAttention
from megalith.models.mamba import Mamba
from megalith.models.mlp import Mlp
from megalith.models.moe import Moe
from megalith.models.norm import norm
from megalith.models.own import own_part
from megalith.spec.model import AttentionSpec, BlockSpec, LatentAttentionSpec, MlpSpec, MoeSpec

ATTENTIONS = {AttentionSpec: Attention, LatentAttentionSpec: LatentAttention}
MLPS = {MlpSpec: Mlp, MoeSpec: Moe}


def _attention(dim: int, spec: AttentionSpec | LatentAttentionSpec, rope_slot: int) -> nn.Module:
    own = spec.own if isinstance(spec, AttentionSpec) else None
    return own_part(own, dim, spec, rope_slot) if own else ATTENTIONS[type(spec)](dim, spec, rope_slot)


def _mlp(dim: int, spec: MlpSpec | MoeSpec) -> nn.Module:
    own = spec.own if isinstance(spec, MlpSpec) else None
    return own_part(own, dim, spec) if own else MLPS[type(spec)](dim, spec)


class Block(nn.Module):
    """Pre-norm: x + mixer(norm(x)), then x + mlp(norm(x)); the mixer is attention or Mamba-2, and either half may be missing.

    Parallel (Wang & Komatsuzaki 2021): x + attention(norm(x)) + mlp(norm(x)), of one norm. With post-norms, the outputs of
    attention and the MLP are normalised too.
    """

    def __init__(self, dim: int, spec: BlockSpec, rope_slot: int = 0) -> None:
        super().__init__()
        self.attention_norm = norm(dim, spec.norm) if spec.attention else None
        self.attention = _attention(dim, spec.attention, rope_slot) if spec.attention else None
        self.attention_post_norm = norm(dim, spec.norm) if spec.post_norms else None
        self.mamba_norm = norm(dim, spec.norm) if spec.mamba else None
        self.mamba = Mamba(dim, spec.mamba) if spec.mamba else None
        self.mlp_norm = norm(dim, spec.norm) if spec.mlp and not spec.parallel else None
        self.mlp = _mlp(dim, spec.mlp) if spec.mlp else None
        self.mlp_post_norm = norm(dim, spec.norm) if spec.post_norms else None
        self.residual = spec.residual

    def forward(self, x: Float[Tensor, "batch seq dim"], batch: Batch) -> Float[Tensor, "batch seq dim"]:
        x, normal = self.attend(x, batch)
        return x if self.mlp is None else self.join(x, self.mlp(normal, batch))

    def attend(self, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """x plus the mixer's output, and the input of the MLP."""
        normal = x
        if self.attention is not None:
            normal = _through(self.attention_norm, x)
            x = x + self._factor(_through(self.attention_post_norm, self.attention(normal, batch)))
        elif self.mamba is not None:
            x = x + self._factor(self.mamba(_through(self.mamba_norm, x), batch))
        return x, normal if self.mlp_norm is None else self.mlp_norm(x)

    def join(self, x: Tensor, out: Tensor) -> Tensor:
        """x with the MLP's output added."""
        return x + self._factor(_through(self.mlp_post_norm, out))

    def _factor(self, out: Tensor) -> Tensor:
        return out if self.residual == 1.0 else out * self.residual


def _through(module: nn.Module | None, x: Tensor) -> Tensor:
    return x if module is None else module(x)
