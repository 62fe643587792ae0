"""The Nemotron-4 family as a user writes it (`[model] family = "nemotron"`)."""

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt

from megalith.spec.families.common import attention_of, few_heads, model_of, multiple, shrunk
from megalith.spec.families.own import OwnPartsSpec
from megalith.spec.model import BlockSpec, MlpSpec, ModelSpec, NormSpec


class Nemotron(OwnPartsSpec):
    """Sizes of a Nemotron-4: grouped-query attention with rotary positions on a share of each head's channels, MLPs with squared
    ReLU and no gate, and LayerNorms whose stored weights are the weights minus one (Parmar et al. 2024, arXiv:2402.16819, section
    2; NVIDIA 2024, arXiv:2406.11704)."""

    family: Literal["nemotron"] = "nemotron"
    name: str = "nemotron"
    layers: PositiveInt
    dim: PositiveInt
    heads: PositiveInt
    kv_heads: PositiveInt = 8
    head_dim: PositiveInt | None = None
    ffn: PositiveInt
    vocab: PositiveInt
    context: PositiveInt = 4096
    rope_theta: PositiveFloat = 10_000.0
    rotated: Annotated[float, Field(gt=0, le=1, description="share of a head's channels that are rotated by position")] = 0.5
    norm_eps: PositiveFloat = 1e-5
    tied: bool = False
    init_std: PositiveFloat = 0.02

    def build(self) -> ModelSpec:
        """The model as a tuple of parts."""
        channels = self.head_dim or self.dim // self.heads
        norm = NormSpec(kind="layer", eps=self.norm_eps, offset=True, bias=True)
        block = BlockSpec(
            attention=attention_of(self, rope_dim=max(1, int(channels * self.rotated))),  # `check` refuses 1
            mlp=MlpSpec(hidden=self.ffn, activation="relu2", gated=False),
            norm=norm,
        )
        return model_of(self, (block,) * self.layers, norm)

    def small(self, layers: int, unit: int, heads_unit: int) -> Self:
        """Return a small model of this family (`common.shrunk`), with a multiple of `heads_unit` heads."""
        return shrunk(
            self, layers=layers, unit=unit, ffn=multiple(48, unit), **few_heads(self.heads, self.kv_heads, unit=heads_unit)
        )
