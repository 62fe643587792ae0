"""One block of a model: a mixer of tokens (in most models attention), an MLP that works on each token alone, or both."""

from jaxtyping import Float
from torch import Tensor, nn

from megalith.kernels.rope import rotate
from megalith.models.alibi import Alibi
from megalith.models.batch import Batch
from megalith.models.core import CausalCore
from megalith.models.latent import LatentAttention
from megalith.models.linear import Linear
from megalith.models.mamba import Mamba
from megalith.models.mlp import Mlp
from megalith.models.moe import Moe
from megalith.models.norm import RMSNorm, norm
from megalith.models.own import own_part
from megalith.spec.model import AttentionSpec, BlockSpec, LatentAttentionSpec, MlpSpec, MoeSpec


class Attention(nn.Module):
    """Grouped-query causal attention. `forward` infers the number of heads (-1), so a rank with a share of the heads runs the same code."""

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
        scale = spec.scale or spec.head_dim**-0.5
        self.alibi = Alibi(spec.heads, scale) if spec.alibi else None
        self.core: nn.Module = CausalCore(scale=scale if spec.alibi else spec.scale, window=spec.window, softcap=spec.softcap)
        self.out = Linear(spec.heads * spec.head_dim, dim, spec.bias is True)

    def forward(self, x: Float[Tensor, "batch seq dim"], batch: Batch) -> Float[Tensor, "batch seq dim"]:
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.q, self.k, self.v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotates:
            cos, sin = batch.rotary[self.rope_slot]
            q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        if self.alibi is not None:
            q, k = self.alibi(q, k, batch)
        return self.out(self.core(q, k, v, batch).flatten(-2))


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

    Parallel (Wang & Komatsuzaki 2021): x + attention(norm(x)) + mlp(norm(x)), with one norm for both. With post-norms, the outputs of
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
        """Return two tensors: x plus the mixer's output, and the input of the MLP."""
        normal = x
        if self.attention is not None:
            normal = _through(self.attention_norm, x)
            x = x + self._factor(_through(self.attention_post_norm, self.attention(normal, batch)))
        elif self.mamba is not None:
            x = x + self._factor(self.mamba(_through(self.mamba_norm, x), batch))
        return x, normal if self.mlp_norm is None else self.mlp_norm(x)

    def join(self, x: Tensor, out: Tensor) -> Tensor:
        """Add the MLP's output `out` to the residual stream x."""
        return x + self._factor(_through(self.mlp_post_norm, out))

    def _factor(self, out: Tensor) -> Tensor:
        return out if self.residual == 1.0 else out * self.residual


def _through(module: nn.Module | None, x: Tensor) -> Tensor:
    return x if module is None else module(x)
