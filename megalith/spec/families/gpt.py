"""The GPT-2 and GPT-3 family as a user writes it (`[model] family = "gpt"`)."""

from typing import Literal, Self

from pydantic import PositiveFloat, PositiveInt

from megalith.spec.families.common import model_of, multiple, shrunk
from megalith.spec.families.own import OwnPartsSpec
from megalith.spec.model import AttentionSpec, BlockSpec, MlpSpec, ModelSpec, NormSpec


class Gpt(OwnPartsSpec):
    """Sizes of a GPT: pre-norm blocks with biases everywhere, learned positions, GELU in its tanh form, LayerNorm (Radford et al. 2019).

    GPT-3 (Brown et al. 2020, arXiv:2005.14165, section 2.1) is the same except that every second layer attends to a sparse band
    whose form was not published; here all layers attend to all earlier tokens.
    """

    family: Literal["gpt"] = "gpt"
    name: str = "gpt"
    layers: PositiveInt
    dim: PositiveInt
    heads: PositiveInt
    head_dim: PositiveInt | None = None
    ffn: PositiveInt | None = None
    vocab: PositiveInt
    context: PositiveInt = 2048
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
                bias=True,
            ),
            mlp=MlpSpec(hidden=self.ffn or 4 * self.dim, activation="gelu_tanh", gated=False, bias=True),
            norm=norm,
        )
        return model_of(self, (block,) * self.layers, norm, positions=self.context)

    def small(self, layers: int, unit: int, heads_unit: int) -> Self:
        """Return a small model of this family (`common.shrunk`), with a multiple of `heads_unit` heads."""
        return shrunk(self, layers=layers, unit=unit, heads=heads_unit, head_dim=8, ffn=multiple(48, unit))
