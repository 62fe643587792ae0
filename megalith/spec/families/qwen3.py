"""The dense models of the Qwen3 family, as a user writes them (`[model] family = "qwen3"`)."""

from typing import Literal, Self

from pydantic import PositiveFloat, PositiveInt

from megalith.spec.families.common import attention_of, few_heads, model_of, multiple, shrunk
from megalith.spec.families.own import OwnPartsSpec
from megalith.spec.model import BlockSpec, MlpSpec, ModelSpec, NormSpec


class Qwen3(OwnPartsSpec):
    """Sizes of a dense Qwen3: a Llama whose queries and keys are normalised head by head (Qwen Team 2025, arXiv:2505.09388, section 2)."""

    family: Literal["qwen3"] = "qwen3"
    name: str = "qwen3"
    layers: PositiveInt
    dim: PositiveInt
    heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt = 128
    ffn: PositiveInt
    vocab: PositiveInt
    context: PositiveInt = 32768
    rope_theta: PositiveFloat = 1_000_000.0
    norm_eps: PositiveFloat = 1e-6
    tied: bool = False
    init_std: PositiveFloat = 0.02

    def build(self) -> ModelSpec:
        """The model as a tuple of parts."""
        norm = NormSpec(eps=self.norm_eps)
        block = BlockSpec(
            attention=attention_of(self, qk_norm=self.norm_eps),
            mlp=MlpSpec(hidden=self.ffn),
            norm=norm,
        )
        return model_of(self, (block,) * self.layers, norm)

    def small(self, layers: int, unit: int, heads_unit: int) -> Self:
        """Return a small model of this family (`common.shrunk`), with a multiple of `heads_unit` heads."""
        return shrunk(
            self, layers=layers, unit=unit, ffn=multiple(48, unit), **few_heads(self.heads, self.kv_heads, unit=heads_unit)
        )
