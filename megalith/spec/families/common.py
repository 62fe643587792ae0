"""Common code of model families: fields with the same meaning in each, helpers of `build`, and helpers of `small`."""

from collections.abc import Iterable
from typing import Annotated, Any, Literal, Protocol, TypeVar

from pydantic import Field, NonNegativeFloat, PositiveInt

from megalith.spec.base import Spec
from megalith.spec.families.own import OwnPartsSpec, own_norm, replaced
from megalith.spec.families.parametrization import ParametrizedSpec, applied
from megalith.spec.model import (
    AttentionSpec,
    BlockSpec,
    EmbeddingSpec,
    HeadSpec,
    ModelSpec,
    MtpSpec,
    NormSpec,
    RopeSpec,
    RouterSpec,
)

Active = Annotated[PositiveInt, Field(description="number of experts that each token goes to")]
ExpertWidth = Annotated[PositiveInt, Field(description="width of one expert")]
BalanceWeight = Annotated[NonNegativeFloat, Field(description="weight of the load-balancing loss")]
BalanceSet = Annotated[
    Literal["sequence", "batch", "global"], Field(description="set of tokens over which the experts' load is measured")
]
ZWeight = Annotated[NonNegativeFloat, Field(description="weight of the router z-loss")]
Balanced = Annotated[
    bool,
    Field(
        description="distribute tokens evenly over experts and ignore the scores; only for benchmarks, because no routing is learned"
    ),
]


class Sizes(Protocol):
    """Keys of every family."""

    @property
    def name(self) -> str: ...
    @property
    def dim(self) -> int: ...
    @property
    def vocab(self) -> int: ...
    @property
    def context(self) -> int: ...
    @property
    def tied(self) -> bool: ...
    @property
    def init_std(self) -> float: ...


class Attends(Protocol):
    """Keys of a family with grouped-query attention and rotary positions."""

    @property
    def dim(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int | None: ...
    @property
    def head_dim(self) -> int | None: ...
    @property
    def rope_theta(self) -> float: ...


class Chooses(Protocol):
    """Keys of a family with experts, whose router may choose any combination of them."""

    @property
    def active(self) -> int: ...
    @property
    def experts(self) -> int: ...


Family = TypeVar("Family", bound=Spec)
Choosing = TypeVar("Choosing", bound=Chooses)


def model_of(
    sizes: Sizes,
    blocks: Iterable[BlockSpec],
    norm: NormSpec,
    *,
    positions: int | None = None,
    embedding_norm: NormSpec | None = None,
    embedding_scale: float = 1.0,
    embedding_std: float | None = None,
    output_scale: float = 1.0,
    softcap: float | None = None,
    ahead: MtpSpec | None = None,
) -> ModelSpec:
    """Build a model from `blocks`, an embedding, and a head with `norm`; the other arguments are fields of EmbeddingSpec and
    HeadSpec. Also apply the multipliers of the model's parametrization, and insert the user's own parts."""
    if isinstance(sizes, OwnPartsSpec) and (sizes.attention or sizes.mlp or sizes.norm):
        blocks, norm = replaced(blocks, sizes), own_norm(norm, sizes)
    model = ModelSpec(
        name=sizes.name,
        dim=sizes.dim,
        context=sizes.context,
        embedding=EmbeddingSpec(
            vocab=sizes.vocab, positions=positions, scale=embedding_scale, norm=embedding_norm, init_std=embedding_std
        ),
        blocks=tuple(blocks),
        head=HeadSpec(vocab=sizes.vocab, tied=sizes.tied, norm=norm, scale=output_scale, softcap=softcap, ahead=ahead),
        init_std=sizes.init_std,
    )
    return applied(model, sizes) if isinstance(sizes, ParametrizedSpec) else model


def attention_of(sizes: Attends, **own: Any) -> AttentionSpec:
    """The attention with a family's sizes; `own` has the values of further AttentionSpec fields."""
    return AttentionSpec.model_validate(
        {
            "heads": sizes.heads,
            "kv_heads": sizes.kv_heads or sizes.heads,
            "head_dim": sizes.head_dim or sizes.dim // sizes.heads,
            "rope": RopeSpec(theta=sizes.rope_theta),
        }
        | own
    )


def router_of(sizes: Spec, **own: Any) -> RouterSpec:
    """The router with the values of a family's fields that have the same names; `own` has the values of other RouterSpec
    fields."""
    same = {name: getattr(sizes, name) for name in RouterSpec.model_fields if name in type(sizes).model_fields}
    return RouterSpec.model_validate(same | own)


def shrunk(family: Family, *, layers: int, unit: int, **own: Any) -> Family:
    """Return a model of the same family, with every size just large enough to be split; widths are multiples of `unit`. `own` has
    the values of the family's other sizes."""
    common = {"layers": layers, "dim": multiple(32, unit), "vocab": multiple(96, unit), "context": 64}
    return family.model_copy(update=common | own)


def few_heads(heads: int, kv_heads: int | None, *, unit: int) -> dict[str, int]:
    """Return small numbers of heads that `unit` ranks can split. Attention stays multi-head, grouped-query or multi-query. If
    `unit` is a multiple of `kv_heads`, grouped-query and multi-query attention keep `kv_heads`, and ranks share key heads."""
    grouped = kv_heads is not None and kv_heads < heads
    few = kv_heads is not None and (grouped or kv_heads == 1) and unit % kv_heads == 0
    return {"heads": unit * (2 if grouped else 1), "kv_heads": kv_heads if kv_heads and few else unit, "head_dim": 8}


def multiple(least: int, of: int) -> int:
    """The smallest multiple of `of` that is at least `least`."""
    return -(-least // of) * of


def enough_experts(sizes: Choosing) -> Choosing:
    """A family's validator: raises ValueError if a token would go to more experts than the layer has."""
    if sizes.active > sizes.experts:
        raise ValueError(f"active = {sizes.active}, but a layer has only {sizes.experts} experts: give at most {sizes.experts}")
    return sizes
