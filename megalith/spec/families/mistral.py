"""The dense models of the Mistral family, as a user writes them (`[model] family = "mistral"`)."""

from typing import Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt

from megalith.spec.families.common import attention_of, few_heads, model_of, multiple, shrunk
from megalith.spec.families.own import OwnPartsSpec
from megalith.spec.model import BlockSpec, MlpSpec, ModelSpec, NormSpec, RopeSpec, Scaling


class Mistral(OwnPartsSpec):
    """Sizes of a Mistral: a Llama in which a token may see only the last `window` tokens, itself included (Jiang et al. 2023,
    arXiv:2310.06825, section 2)."""

    family: Literal["mistral"] = "mistral"
    name: str = "mistral"
    layers: PositiveInt
    dim: PositiveInt
    heads: PositiveInt
    kv_heads: PositiveInt = 8
    head_dim: PositiveInt | None = None
    ffn: PositiveInt
    vocab: PositiveInt
    context: PositiveInt = 32768
    window: PositiveInt | None = Field(
        default=None,
        description="number of tokens that a token attends to: itself and those directly before it; default: all tokens before it",
    )
    rope_theta: PositiveFloat = 10_000.0
    rope_scaling: Scaling | None = None
    norm_eps: PositiveFloat = 1e-5
    tied: bool = False
    init_std: PositiveFloat = 0.02

    def build(self) -> ModelSpec:
        """The model as a tuple of parts."""
        block = BlockSpec(
            attention=attention_of(self, rope=RopeSpec(theta=self.rope_theta, scaling=self.rope_scaling), window=self.window),
            mlp=MlpSpec(hidden=self.ffn),
            norm=NormSpec(eps=self.norm_eps),
        )
        return model_of(self, (block,) * self.layers, block.norm)

    def small(self, layers: int, unit: int, heads_unit: int) -> Self:
        """Return a small model of this family (`common.shrunk`), with a multiple of `heads_unit` heads. The attention window is
        shorter than the shortest sequence, so that it has an effect."""
        own = {"window": self.window and 9, "ffn": multiple(48, unit)}
        return shrunk(self, layers=layers, unit=unit, **own, **few_heads(self.heads, self.kv_heads, unit=heads_unit))
