"""The dense models of the Qwen2 and Qwen2.5 families, as a user writes them (`[model] family = "qwen2"`)."""

from typing import Literal, Self

from pydantic import PositiveFloat, PositiveInt

from megalith.spec.families.common import attention_of, few_heads, model_of, multiple, shrunk
from megalith.spec.families.own import OwnPartsSpec
from megalith.spec.model import BlockSpec, MlpSpec, ModelSpec, NormSpec, RopeSpec, Scaling


class Qwen2(OwnPartsSpec):
    """Sizes of a dense Qwen2 or Qwen2.5: a Llama with biases on queries, keys and values (Yang et al. 2024, arXiv:2407.10671,
    section 2.2)."""

    family: Literal["qwen2"] = "qwen2"
    name: str = "qwen2"
    layers: PositiveInt
    dim: PositiveInt
    heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt | None = None
    ffn: PositiveInt
    vocab: PositiveInt
    context: PositiveInt = 32768
    rope_theta: PositiveFloat = 1_000_000.0
    rope_scaling: Scaling | None = None
    norm_eps: PositiveFloat = 1e-6
    tied: bool = False
    init_std: PositiveFloat = 0.02

    def build(self) -> ModelSpec:
        """The model as a tuple of parts."""
        block = BlockSpec(
            attention=attention_of(self, rope=RopeSpec(theta=self.rope_theta, scaling=self.rope_scaling), bias="qkv"),
            mlp=MlpSpec(hidden=self.ffn),
            norm=NormSpec(eps=self.norm_eps),
        )
        return model_of(self, (block,) * self.layers, block.norm)

    def small(self, layers: int, unit: int, heads_unit: int) -> Self:
        """Return a small model of this family (`common.shrunk`), with a multiple of `heads_unit` heads."""
        return shrunk(
            self, layers=layers, unit=unit, ffn=multiple(48, unit), **few_heads(self.heads, self.kv_heads, unit=heads_unit)
        )
