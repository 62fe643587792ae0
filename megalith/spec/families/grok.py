"""The Grok-1 family as a user writes it (`[model] family = "grok"`)."""

from math import sqrt
from typing import Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from megalith.spec.families.common import (
    Active,
    Balanced,
    BalanceWeight,
    ExpertWidth,
    attention_of,
    enough_experts,
    few_heads,
    model_of,
    multiple,
    router_of,
    shrunk,
)
from megalith.spec.families.parametrization import ParametrizedSpec
from megalith.spec.model import BlockSpec, ModelSpec, MoeSpec, NormSpec


class Grok(ParametrizedSpec):
    """Sizes of a Grok-1 (xAI 2024, released model.py and run.py): norms before and after attention and experts, capped attention
    scores, GeGLU experts weighted by the softmax over all experts, and constant factors of the embeddings and the logits. The
    published files do not show how loads were balanced; the user chooses `balance_weight`."""

    family: Literal["grok"] = "grok"
    name: str = "grok"
    layers: PositiveInt
    dim: PositiveInt
    heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt = 128
    ffn: ExpertWidth
    experts: PositiveInt = 8
    active: Active = 2
    balance_weight: BalanceWeight = 0.0
    balanced: Balanced = False
    attention_softcap: PositiveFloat | None = 30.0
    embedding_scale: PositiveFloat | None = Field(
        default=None, description="factor by which embeddings are multiplied; none: sqrt(dim)"
    )
    output_scale: PositiveFloat = Field(default=1 / sqrt(3), description="factor by which logits are multiplied")
    vocab: PositiveInt
    context: PositiveInt = 8192
    rope_theta: PositiveFloat = 10_000.0
    norm_eps: PositiveFloat = 1e-5
    tied: bool = True
    init_std: PositiveFloat = 0.02

    _enough = model_validator(mode="after")(enough_experts)

    def build(self) -> ModelSpec:
        """The model as a tuple of parts."""
        norm = NormSpec(eps=self.norm_eps)
        block = BlockSpec(
            attention=attention_of(self, softcap=self.attention_softcap),
            mlp=MoeSpec(
                experts=self.experts,
                hidden=self.ffn,
                activation="gelu_tanh",
                router=router_of(self),
            ),
            norm=norm,
            post_norms=True,
        )
        scale = self.embedding_scale or sqrt(self.dim)
        return model_of(self, (block,) * self.layers, norm, embedding_scale=scale, output_scale=self.output_scale)

    def small(self, layers: int, unit: int, heads_unit: int) -> Self:
        """Return a small model of this family (`common.shrunk`), with a multiple of `heads_unit` heads."""
        own = {"ffn": multiple(24, unit), "experts": multiple(4, unit), "active": min(self.active, 2)}
        return shrunk(self, layers=layers, unit=unit, **own, **few_heads(self.heads, self.kv_heads, unit=heads_unit))
