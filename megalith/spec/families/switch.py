"""The Switch Transformer family as a user writes it (`[model] family = "switch"`)."""

from typing import Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from megalith.spec.families.common import Balanced, ZWeight, model_of, multiple, router_of, shrunk
from megalith.spec.families.parametrization import ParametrizedSpec
from megalith.spec.model import AttentionSpec, BlockSpec, MlpSpec, ModelSpec, MoeSpec, NormSpec, RopeSpec


class Switch(ParametrizedSpec):
    """Sizes of a Switch Transformer as a decoder (Fedus et al. 2022, arXiv:2101.03961): every `every`-th block has experts, and a
    token goes to the expert with the highest score. An expert accepts a limited number of a sequence's tokens; later tokens that
    chose a full expert pass only through the residual.

    The published model has an encoder and a decoder; here their layers form one causal stack of `layers` blocks without
    cross-attention. Rotary positions replace T5's relative biases. Scores are scaled by 1 / sqrt(head_dim), which T5 folds into
    its initial weights. Capacity is per sequence. The router adds no noise to its input, so that a step is deterministic.
    """

    family: Literal["switch"] = "switch"
    name: str = "switch"
    layers: PositiveInt
    dim: PositiveInt
    heads: PositiveInt
    head_dim: PositiveInt = 64
    ffn: PositiveInt = Field(description="width of an expert, and of the MLP in blocks without experts")
    gated: bool = False
    activation: Literal["relu", "gelu_tanh"] = "relu"
    experts: PositiveInt
    every: PositiveInt = Field(
        default=2, description="number of blocks in a group; only the last block of each group has experts"
    )
    capacity: PositiveFloat = Field(
        default=1.25, description="an expert takes at most capacity * seq_len / experts tokens of a sequence"
    )
    balance_weight: NonNegativeFloat = Field(default=0.01, description="weight of the load-balancing loss (the paper's alpha)")
    z_weight: ZWeight = 0.0
    balanced: Balanced = False
    vocab: PositiveInt = 32128
    context: PositiveInt = 512
    rope_theta: PositiveFloat = 10_000.0
    norm_eps: PositiveFloat = 1e-6
    tied: bool = True
    init_std: PositiveFloat = 0.02

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.every > self.layers:
            raise ValueError(
                f"every = {self.every}, but the model has only {self.layers} layers, so no block has experts: give at most {self.layers}"
            )
        return self

    def build(self) -> ModelSpec:
        """The model as a tuple of parts."""
        norm = NormSpec(eps=self.norm_eps)
        attention = AttentionSpec(
            heads=self.heads, kv_heads=self.heads, head_dim=self.head_dim, rope=RopeSpec(theta=self.rope_theta)
        )
        router = router_of(self, active=1)
        dense = MlpSpec(hidden=self.ffn, activation=self.activation, gated=self.gated)
        routed = MoeSpec(experts=self.experts, hidden=self.ffn, activation=self.activation, gated=self.gated, router=router)
        kinds = (dense,) * (self.every - 1) + (routed,)
        blocks = (BlockSpec(attention=attention, mlp=kinds[i % self.every], norm=norm) for i in range(self.layers))
        return model_of(self, blocks, norm)

    def small(self, layers: int, unit: int, heads_unit: int) -> Self:
        """Return a small model of this family (`common.shrunk`), with a multiple of `heads_unit` heads."""
        own = {"every": min(self.every, layers), "ffn": multiple(48, unit), "experts": multiple(4, unit)}
        return shrunk(self, layers=layers, unit=unit, heads=heads_unit, head_dim=8, **own)
