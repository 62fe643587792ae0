"""The mixture-of-experts models of the Qwen3 family, as a user writes them (`[model] family = "qwen3_moe"`)."""

from typing import Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

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
from megalith.spec.model import BlockSpec, MlpSpec, ModelSpec, MoeSpec, NormSpec


class Qwen3Moe(ParametrizedSpec):
    """Sizes of a Qwen3 with many small experts and no shared expert (Qwen Team 2025, arXiv:2505.09388, section 2). If
    `balance_weight` is above 0, experts' loads are by default balanced over a whole global batch (Qiu et al. 2025,
    arXiv:2501.11873): the batch of the previous step."""

    family: Literal["qwen3_moe"] = "qwen3_moe"
    name: str = "qwen3_moe"
    layers: PositiveInt
    dim: PositiveInt
    heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt = 128
    ffn: PositiveInt | None = Field(default=None, description="width of the MLP in a layer without experts")
    dense_layers: tuple[NonNegativeInt, ...] = Field(
        default=(), description="indices, from 0, of the layers that have one MLP of width `ffn` and no experts"
    )
    expert_ffn: ExpertWidth
    experts: PositiveInt = 128
    active: Active = 8
    normalise: bool = Field(default=True, description="divide the weights of a token's experts by their sum")
    balance_weight: BalanceWeight = 0.0
    balance_set: BalanceSet = "global"
    z_weight: ZWeight = 0.0
    balanced: Balanced = False
    vocab: PositiveInt
    context: PositiveInt = 32768
    rope_theta: PositiveFloat = 1_000_000.0
    norm_eps: PositiveFloat = 1e-6
    tied: bool = False
    init_std: PositiveFloat = 0.02

    _enough = model_validator(mode="after")(enough_experts)

    @model_validator(mode="after")
    def _dense_layers_are_there(self) -> Self:
        problems = []
        if self.dense_layers and self.ffn is None:
            problems.append(f"dense_layers = {list(self.dense_layers)}, but the width of their MLPs is not set: give ffn")
        if beyond := [number for number in self.dense_layers if number >= self.layers]:
            problems.append(
                f"dense_layers contains {beyond}, but there are {self.layers} layers: give numbers below {self.layers}"
            )
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def build(self) -> ModelSpec:
        """The model as a tuple of parts."""
        norm = NormSpec(eps=self.norm_eps)
        router = router_of(self)
        block = BlockSpec(
            attention=attention_of(self, qk_norm=self.norm_eps),
            mlp=MoeSpec(experts=self.experts, hidden=self.expert_ffn, router=router),
            norm=norm,
        )
        dense = block.model_copy(update={"mlp": MlpSpec(hidden=self.ffn)}) if self.ffn and self.dense_layers else block
        return model_of(self, (dense if number in self.dense_layers else block for number in range(self.layers)), norm)

    def small(self, layers: int, unit: int, heads_unit: int) -> Self:
        """Return a small model of this family (`common.shrunk`), with a multiple of `heads_unit` heads."""
        dense = (0,) if self.dense_layers and layers > 1 else ()
        own = {"ffn": multiple(48, unit) if self.ffn else None, "dense_layers": dense}
        own |= {"expert_ffn": multiple(16, unit), "experts": multiple(8, unit), "active": min(self.active, 3)}
        return shrunk(self, layers=layers, unit=unit, **own, **few_heads(self.heads, self.kv_heads, unit=heads_unit))
