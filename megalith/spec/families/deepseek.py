"""The DeepSeek family as a user writes it (`[model] family = "deepseek"`): V2, V3 and models of the same design."""

from typing import Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from megalith.spec.families.common import Balanced, ExpertWidth, model_of, multiple, router_of, shrunk
from megalith.spec.families.parametrization import ParametrizedSpec
from megalith.spec.model import (
    BlockSpec,
    LatentAttentionSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    MtpSpec,
    NormSpec,
    RopeSpec,
    YarnScaling,
)


class DeepSeek(ParametrizedSpec):
    """Sizes of a DeepSeek: latent attention and, in all but the first layers, many small routed experts beside shared experts.

    V2 (DeepSeek-AI 2024, arXiv:2405.04434) scores experts by softmax, and a group of experts by the best expert in it. V3
    (arXiv:2412.19437) scores experts by sigmoid, and a group by the sum of its best two experts; a bias of the scores replaces
    most of the balance loss. V3 also has multi-token prediction. Kimi K2 (arXiv:2507.20534) is a wider V3 without groups.
    """

    family: Literal["deepseek"] = "deepseek"
    name: str = "deepseek"
    layers: PositiveInt
    dense_layers: NonNegativeInt = Field(
        default=1, description="number of first layers that have one MLP of width `ffn` and no experts"
    )
    dim: PositiveInt
    heads: PositiveInt
    q_rank: PositiveInt | None = Field(
        default=None,
        description="width of the latent vector from which queries are computed; none: queries are computed from x directly",
    )
    kv_rank: PositiveInt = 512
    nope_dim: PositiveInt = Field(default=128, description="channels of a head's queries and keys that are not rotated")
    rope_dim: PositiveInt = Field(default=64, description="channels of a head's queries and keys that are rotated")
    v_dim: PositiveInt = Field(default=128, description="channels of a head's values")
    ffn: PositiveInt
    experts: PositiveInt
    expert_ffn: ExpertWidth
    shared_experts: NonNegativeInt = Field(default=1, description="number of experts that every token goes through")
    active: PositiveInt = Field(description="number of routed experts that each token goes to")
    scores: Literal["softmax", "sigmoid"] = "sigmoid"
    normalise: bool = Field(default=True, description="divide the weights of a token's experts by their sum")
    routed_scale: PositiveFloat = Field(
        default=1.0, description="factor by which the weights of a token's experts are multiplied"
    )
    groups: PositiveInt = 1
    active_groups: PositiveInt = 1
    group_score: Literal["max", "top2"] = "top2"
    bias_rate: NonNegativeFloat = Field(default=0.0, description="change of the auxiliary-loss-free bias in each step")
    balance_weight: NonNegativeFloat = Field(default=0.0, description="weight of the sequence-wise balance loss")
    balanced: Balanced = False
    ahead: NonNegativeInt = Field(
        default=0, description="depth of multi-token prediction (MTP): number of tokens predicted after the next one"
    )
    ahead_weight: PositiveFloat = Field(default=0.3, description="weight of the mean of the losses of multi-token prediction")
    vocab: PositiveInt
    context: PositiveInt = 4096
    rope_theta: PositiveFloat = 10_000.0
    rope_scaling: YarnScaling | None = None
    norm_eps: PositiveFloat = 1e-6
    tied: bool = False
    init_std: PositiveFloat = 0.02

    @model_validator(mode="after")
    def _fits(self) -> Self:
        problems: list[str] = []
        if self.dense_layers > self.layers:
            problems.append(
                f"dense_layers = {self.dense_layers}, but the model has only {self.layers} layers: give at most {self.layers}"
            )
        if self.rope_dim % 2:
            problems.append(f"rope_dim = {self.rope_dim} is odd, but channels are rotated in pairs: give an even number")
        if self.experts % self.groups:
            problems.append(f"groups = {self.groups} does not divide experts = {self.experts}")
        if self.active_groups > self.groups:
            problems.append(
                f"active_groups = {self.active_groups}, but there are only {self.groups} groups: give at most {self.groups}"
            )
        reach = self.experts // self.groups * min(self.active_groups, self.groups)
        if self.active > reach:
            problems.append(
                f"active = {self.active}, but the groups that a token may use have only {reach} experts: give at most {reach}"
            )
        if self.groups > 1 and self.group_score == "top2" and self.experts // self.groups < 2:
            problems.append(
                "group_score = 'top2' needs two experts in a group, and experts / groups = 1: use group_score = 'max'"
            )
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def build(self) -> ModelSpec:
        """The model as a tuple of parts. MTP modules have experts, as in the release of V3."""
        norm = NormSpec(eps=self.norm_eps)
        attention = LatentAttentionSpec(
            heads=self.heads,
            q_rank=self.q_rank,
            kv_rank=self.kv_rank,
            nope_dim=self.nope_dim,
            rope_dim=self.rope_dim,
            v_dim=self.v_dim,
            rope=RopeSpec(theta=self.rope_theta, scaling=self.rope_scaling),
        )
        dense = BlockSpec(attention=attention, mlp=MlpSpec(hidden=self.ffn), norm=norm)
        routed = BlockSpec(attention=attention, mlp=self._experts(), norm=norm)
        ahead = MtpSpec(depth=self.ahead, block=routed, weight=self.ahead_weight) if self.ahead else None
        blocks = (dense,) * self.dense_layers + (routed,) * (self.layers - self.dense_layers)
        return model_of(self, blocks, norm, ahead=ahead)

    def _experts(self) -> MoeSpec:
        """Return the spec of the experts. One expert with the summed width of the shared experts replaces them, because it
        computes the same function."""
        return MoeSpec(
            experts=self.experts,
            hidden=self.expert_ffn,
            shared=self.shared_experts * self.expert_ffn,
            router=router_of(self, scale=self.routed_scale),
        )

    def small(self, layers: int, unit: int, heads_unit: int) -> Self:
        """Return a small model of this family (`common.shrunk`), with a multiple of `heads_unit` heads."""
        grouped, scaling = self.groups > 1, self.rope_scaling
        return shrunk(
            self,
            layers=layers,
            unit=unit,
            dense_layers=min(self.dense_layers, 1, layers - 1),
            heads=heads_unit,
            q_rank=None if self.q_rank is None else 24,
            kv_rank=16,
            nope_dim=8,
            rope_dim=4,
            v_dim=8,
            ffn=multiple(48, unit),
            experts=multiple(8, 4 * unit if grouped else unit),
            expert_ffn=multiple(16, unit),
            shared_experts=min(self.shared_experts, 1),
            active=2,
            groups=4 if grouped else 1,
            active_groups=2 if grouped else 1,
            rope_scaling=scaling and scaling.model_copy(update={"original_context": 16}),
        )
