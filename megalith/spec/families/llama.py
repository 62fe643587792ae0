"""The Llama family as a user writes it (`[model]` in a run file): a few sizes, which determine every part of the model."""

from typing import Literal, Self

from pydantic import PositiveFloat, PositiveInt

from megalith.spec.families.common import attention_of, few_heads, model_of, multiple, shrunk
from megalith.spec.families.own import OwnPartsSpec
from megalith.spec.model import BlockSpec, MlpSpec, ModelSpec, NormSpec, RopeSpec, Scaling


class Llama(OwnPartsSpec):
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
    rope_scaling: Scaling | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    norm_eps: PositiveFloat = 1e-5
    tied: bool = False
    init_std: PositiveFloat = 0.02

    def build(self) -> ModelSpec:
        """The model as a tuple of parts."""
        block = BlockSpec(
            attention=attention_of(
                self, rope=RopeSpec(theta=self.rope_theta, scaling=self.rope_scaling), bias=self.attention_bias
            ),
            mlp=MlpSpec(hidden=self.ffn, bias=self.mlp_bias),
            norm=NormSpec(eps=self.norm_eps),
        )
        return model_of(self, (block,) * self.layers, block.norm)

    def small(self, layers: int, unit: int, heads_unit: int) -> Self:
        """Return a small model of this family (`common.shrunk`), with a multiple of `heads_unit` heads."""
        return shrunk(
            self, layers=layers, unit=unit, ffn=multiple(48, unit), **few_heads(self.heads, self.kv_heads, unit=heads_unit)
        )
