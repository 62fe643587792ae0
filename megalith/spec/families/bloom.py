"""The BLOOM family as a user writes it (`[model] family = "bloom"`)."""

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt

from megalith.spec.families.common import model_of, multiple, shrunk
from megalith.spec.families.own import OwnPartsSpec
from megalith.spec.model import AttentionSpec, BlockSpec, MlpSpec, ModelSpec, NormSpec


class Bloom(OwnPartsSpec):
    """Sizes of a BLOOM: a GPT with ALiBi position biases on the attention scores and a norm after the embedding (BigScience 2022,
    arXiv:2211.05100, section 3.2)."""

    family: Literal["bloom"] = "bloom"
    name: str = "bloom"
    layers: PositiveInt
    dim: PositiveInt
    heads: PositiveInt
    head_dim: PositiveInt | None = None
    ffn: PositiveInt | None = None
    vocab: PositiveInt
    context: Annotated[
        int,
        Field(
            gt=0, le=65_536, description="longest sequence, in tokens; limited because ALiBi's distances lose precision in bf16"
        ),
    ] = 2048
    norm_eps: PositiveFloat = 1e-5
    tied: bool = True
    init_std: PositiveFloat = 0.02

    def build(self) -> ModelSpec:
        """The model as a tuple of parts; `ffn` is 4 * `dim` unless given."""
        norm = NormSpec(kind="layer", eps=self.norm_eps, bias=True)
        block = BlockSpec(
            attention=AttentionSpec(
                heads=self.heads,
                kv_heads=self.heads,
                head_dim=self.head_dim or self.dim // self.heads,
                rope=None,
                alibi=True,
                bias=True,
            ),
            mlp=MlpSpec(hidden=self.ffn or 4 * self.dim, activation="gelu_tanh", gated=False, bias=True),
            norm=norm,
        )
        return model_of(self, (block,) * self.layers, norm, embedding_norm=norm)

    def small(self, layers: int, unit: int, heads_unit: int) -> Self:
        """Return a small model of this family (`common.shrunk`), with a multiple of `heads_unit` heads."""
        return shrunk(self, layers=layers, unit=unit, heads=heads_unit, head_dim=8, ffn=multiple(48, unit))
