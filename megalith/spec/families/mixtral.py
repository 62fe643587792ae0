"""The Mixtral family as a user writes it (`[model] family = "mixtral"`)."""

from typing import Literal, Self

from pydantic import PositiveFloat, PositiveInt, model_validator

from megalith.spec.families.common import (
    Active,
    Balanced,
    BalanceSet,
    BalanceWeight,
    ExpertWidth,
    ZWeight,
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


class Mixtral(ParametrizedSpec):
    """Sizes of a Mixtral: a Llama in which experts replace every MLP; a token's experts are weighted by the softmax over their
    logits (Jiang et al. 2024, arXiv:2401.04088, section 2.1)."""

    family: Literal["mixtral"] = "mixtral"
    name: str = "mixtral"
    layers: PositiveInt
    dim: PositiveInt
    heads: PositiveInt
    kv_heads: PositiveInt = 8
    head_dim: PositiveInt | None = None
    ffn: ExpertWidth
    experts: PositiveInt = 8
    active: Active = 2
    balance_weight: BalanceWeight = 0.0
    balance_set: BalanceSet = "batch"
    z_weight: ZWeight = 0.0
    balanced: Balanced = False
    vocab: PositiveInt
    context: PositiveInt = 32768
    window: PositiveInt | None = None
    rope_theta: PositiveFloat = 1_000_000.0
    norm_eps: PositiveFloat = 1e-5
    tied: bool = False
    init_std: PositiveFloat = 0.02

    _enough = model_validator(mode="after")(enough_experts)

    def build(self) -> ModelSpec:
        """The model as a tuple of parts."""
        norm = NormSpec(eps=self.norm_eps)
        router = router_of(self, normalise=True)
        block = BlockSpec(
            attention=attention_of(self, window=self.window),
            mlp=MoeSpec(experts=self.experts, hidden=self.ffn, router=router),
            norm=norm,
        )
        return model_of(self, (block,) * self.layers, norm)

    def small(self, layers: int, unit: int, heads_unit: int) -> Self:
        """Return a small model of this family (`common.shrunk`), with a multiple of `heads_unit` heads."""
        own = {
            "window": self.window and 9,
            "ffn": multiple(24, unit),
            "experts": multiple(4, unit),
            "active": min(self.active, 2),
        }
        return shrunk(self, layers=layers, unit=unit, **own, **few_heads(self.heads, self.kv_heads, unit=heads_unit))
