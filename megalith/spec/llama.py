"""The Llama family as a user writes it (`[model]` in a run file): a few sizes, from which every part follows."""

from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from megalith.spec.base import Spec
from megalith.spec.model import (
    AttentionSpec,
    BlockSpec,
    EmbeddingSpec,
    HeadSpec,
    MlpSpec,
    ModelSpec,
    RopeScaling,
    RopeSpec,
)


class Llama(Spec):
    """Sizes of a Llama: pre-norm blocks of grouped-query attention with rotary positions and SwiGLU (Touvron et al. 2023)."""

    family: Literal["llama"] = "llama"
    name: str = "llama"
    layers: PositiveInt
    dim: PositiveInt
    heads: PositiveInt
    kv_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    ffn: PositiveInt
    vocab: PositiveInt
    context: PositiveInt = 4096
    rope_theta: PositiveFloat = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: PositiveFloat = 1e-5
    tied: bool = False
    init_std: PositiveFloat = 0.02

    def build(self) -> ModelSpec:
        """The model as a tuple of parts."""
        block = BlockSpec(
            attention=AttentionSpec(
                heads=self.heads,
                kv_heads=self.kv_heads or self.heads,
                head_dim=self.head_dim or self.dim // self.heads,
                rope=RopeSpec(theta=self.rope_theta, scaling=self.rope_scaling),
            ),
            mlp=MlpSpec(hidden=self.ffn),
            norm_eps=self.norm_eps,
        )
        return ModelSpec(
            name=self.name,
            dim=self.dim,
            context=self.context,
            embedding=EmbeddingSpec(vocab=self.vocab),
            blocks=(block,) * self.layers,
            head=HeadSpec(vocab=self.vocab, tied=self.tied, norm_eps=self.norm_eps),
            init_std=self.init_std,
        )
