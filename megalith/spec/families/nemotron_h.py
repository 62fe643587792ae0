"""The Nemotron-H family as a user writes it (`[model] family = "nemotron_h"`): hybrids of Mamba-2, attention, MLPs and experts."""

from itertools import cycle, islice
from typing import Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from megalith.spec.families.common import (
    Active,
    Balanced,
    BalanceSet,
    BalanceWeight,
    ExpertWidth,
    ZWeight,
    enough_experts,
    few_heads,
    model_of,
    multiple,
    router_of,
    shrunk,
)
from megalith.spec.families.parametrization import ParametrizedSpec
from megalith.spec.model import AttentionSpec, BlockSpec, MambaSpec, MlpSpec, ModelSpec, MoeSpec, NormSpec


class NemotronH(ParametrizedSpec):
    """Sizes of a Nemotron-H (NVIDIA 2025, arXiv:2504.03624), or of a Nemotron 3 Nano, which also has experts (arXiv:2512.20848).
    Each layer is one half of a transformer block: a mixer, an MLP or experts. Attention has no position encoding. Experts use
    squared ReLU, and tokens are routed as in DeepSeek-V3."""

    family: Literal["nemotron_h"] = "nemotron_h"
    name: str = "nemotron_h"
    layers: PositiveInt
    pattern: str = Field(
        pattern=r"^[M*E-]+$",
        description="one letter for each layer (M for Mamba-2, * for attention, E for experts, - for an MLP); the pattern is repeated to "
        "fill all layers",
    )
    dim: PositiveInt
    mamba_heads: PositiveInt
    mamba_head_dim: PositiveInt = 64
    state: PositiveInt = Field(default=128, description="channels of Mamba-2's state")
    mamba_groups: PositiveInt = Field(default=8, description="groups of Mamba-2's heads")
    conv: PositiveInt = Field(default=4, description="number of tokens in the window of Mamba-2's convolution")
    chunk: PositiveInt = Field(
        default=128, description="number of tokens that Mamba-2 computes at once; it does not change the result"
    )
    heads: PositiveInt
    kv_heads: PositiveInt = 2
    head_dim: PositiveInt = 128
    ffn: PositiveInt = Field(default=1856, description="width of an MLP")
    expert_ffn: ExpertWidth = 1856
    shared_ffn: NonNegativeInt = Field(
        default=3712, description="width of the shared expert, which every token goes through; 0: no shared expert"
    )
    experts: PositiveInt = 128
    active: Active = 6
    scores: Literal["softmax", "sigmoid"] = "sigmoid"
    normalise: bool = Field(default=True, description="divide the weights of a token's experts by their sum")
    routed_scale: PositiveFloat = 2.5
    bias_rate: NonNegativeFloat = Field(
        default=0.001, description="change of the auxiliary-loss-free bias in each step; 0: no bias"
    )
    balance_weight: BalanceWeight = 0.0001
    balance_set: BalanceSet = "sequence"
    z_weight: ZWeight = 0.0
    balanced: Balanced = False
    vocab: PositiveInt
    context: PositiveInt = 8192
    norm_eps: PositiveFloat = 1e-5
    tied: bool = False
    init_std: PositiveFloat = 0.02

    _enough = model_validator(mode="after")(enough_experts)

    def build(self) -> ModelSpec:
        """The model as a tuple of parts."""
        norm = NormSpec(eps=self.norm_eps)
        mamba = MambaSpec(
            heads=self.mamba_heads, head_dim=self.mamba_head_dim, state=self.state, groups=self.mamba_groups, conv=self.conv,
            chunk=self.chunk, norm_eps=self.norm_eps,
        )  # fmt: skip
        attention = AttentionSpec(heads=self.heads, kv_heads=self.kv_heads, head_dim=self.head_dim, rope=None)
        experts = MoeSpec(
            experts=self.experts, hidden=self.expert_ffn, shared=self.shared_ffn, activation="relu2", gated=False,
            router=router_of(self, scale=self.routed_scale),
        )  # fmt: skip
        kinds = {
            "M": BlockSpec(mamba=mamba, norm=norm),
            "*": BlockSpec(attention=attention, norm=norm),
            "E": BlockSpec(mlp=experts, norm=norm),
            "-": BlockSpec(mlp=MlpSpec(hidden=self.ffn, activation="relu2", gated=False), norm=norm),
        }
        return model_of(self, (kinds[kind] for kind in islice(cycle(self.pattern), self.layers)), norm)

    def small(self, layers: int, unit: int, heads_unit: int) -> Self:
        """Return a small model of this family (`common.shrunk`), with a multiple of `heads_unit` heads. The pattern has each kind
        of layer once."""
        own = {
            "pattern": "".join(dict.fromkeys(self.pattern)), "mamba_heads": 2 * heads_unit, "mamba_head_dim": 8,
            "mamba_groups": heads_unit, "state": multiple(8, unit), "chunk": 8, "ffn": multiple(48, unit),
            "expert_ffn": multiple(16, unit), "shared_ffn": multiple(16, unit) if self.shared_ffn else 0,
            "experts": multiple(8, unit), "active": min(self.active, 3),
        }  # fmt: skip
        return shrunk(self, layers=layers, unit=unit, **own, **few_heads(self.heads, self.kv_heads, unit=heads_unit))
