"""Profile of one part of a model, for one microbatch on a rank: a value without torch, cached on disk."""

from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from megalith.spec.plan import Action
from megalith.spec.state import Place

Phase = Literal["F", "I", "W"]
"""F: forward. I: gradient of the part's input, including recomputation. W: gradients of the part's weights."""

PHASES: tuple[Phase, ...] = ("F", "I", "W")

Exchanged = Literal["gather", "scatter", "sum", "all_to_all", "ring"]

DENSE_MLP = "mlp.dense"
"""The feed-forward half of blocks without experts, as a part to recompute. Megatron-Core's `mlp` is only this half; in Megalith's trainer,
`mlp` is this half of every block."""


@dataclass(frozen=True)
class Product:
    """`count` matrix products [rows, inner] x [inner, columns], run as one kernel. `weight`: True if a factor is a weight
    (or, in W, the result is a weight's gradient), so that 8 bits are possible."""

    phase: Phase
    rows: int
    inner: int
    columns: int
    count: int = 1
    weight: bool = True
    expert: bool = False
    times: int = 1
    """Number of times that this kernel runs."""

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.inner * self.columns * self.count * self.times


@dataclass(frozen=True)
class Core:
    """One fused attention over `batch` sequences, whose scores are never in memory."""

    phase: Phase
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    qk_dim: int
    v_dim: int
    window: int | None = None
    again: bool = False
    """True for a forward that backward recomputes."""

    @property
    def forward(self) -> bool:
        return self.phase == "F" or self.again

    @property
    def flops(self) -> float:
        """FLOPs without the causal mask. Backward recomputes the scores and computes four gradients: 2.5 times forward (Dao
        2023)."""
        scores = 2.0 * self.batch * self.heads * self.queries * min(self.keys, 2 * (self.window or self.keys))
        forward = scores * (self.qk_dim + self.v_dim)
        return forward if self.forward else scores * (3 * self.qk_dim + 2 * self.v_dim)


@dataclass(frozen=True)
class Collective:
    """One collective: `size` is the bytes of the whole tensor (the result of a gather, the input of a scatter), or the bytes that one rank
    sends in an all-to-all or in one step of a ring."""

    phase: Phase
    axis: Literal["tensor", "context", "expert", "expert_tensor"]
    kind: Exchanged
    size: float
    times: int = 1


@dataclass(frozen=True)
class MultipliedWeight:
    """A weight that is a factor of products."""

    layer: str
    """The name of the weight's module within the part"""
    shape: tuple[int, ...]
    """[outputs, inputs], or [experts, outputs, inputs], on a rank without ZeRO's sharding"""
    cut: int
    """The dim that ZeRO shards"""

    @property
    def expert(self) -> bool:
        """True if the weight belongs to experts."""
        return len(self.shape) > 2


AMONG_EXPERTS = frozenset({"expert", "expert_tensor"})
"""Axes along which tokens are dispatched to experts, or exchanged among ranks that split an expert."""


@dataclass(frozen=True)
class Profile:
    """Figures of one part for one microbatch on one rank, in bytes unless stated otherwise."""

    products: tuple[Product, ...]
    cores: tuple[Core, ...]
    exchanges: tuple[Collective, ...]
    moved: dict[Phase, float]
    """Bytes read and written by operations that are neither products nor fused attention."""
    kernels: dict[Phase, int]
    """Number of kernels launched."""
    apart: dict[Phase, int]
    """Number of kernels launched between expert dispatch and combine, for whose sizes the host must wait."""
    apart_moved: dict[Phase, float]
    """Bytes moved by the kernels in `apart`."""
    routed: dict[Phase, int]
    """Number of kernels launched by the router and the permutation of rows."""
    saved: float
    """Bytes that forward leaves in memory for backward."""
    working: float
    """Peak of temporary tensors during backward, without `saved` and weight gradients."""
    weights: int
    """Number of dense weights on the rank."""
    expert_weights: int
    """Number of experts' weights on the rank."""
    output: float
    """Bytes of the part's output."""
    deferred: float = 0.0
    """Bytes that the first half of a backward leaves for the second: inputs of products, computed again if a policy dropped them, and
    gradients of their outputs."""
    tensors: int = 0
    """Number of weight tensors of the part."""
    multiplied: tuple[MultipliedWeight, ...] = ()
    """The weights on the rank that are factors of products"""
    formed: float = 0.0
    """Bytes of weight gradients in a backward that defers none, when these and temporary tensors together are most."""
    beside: float = 0.0
    """Bytes of temporary tensors at that moment, without `saved`."""
    leaves: float = 0.0
    """Bytes of `saved` that autograd holds, and that can be offloaded (`plan.retain`)."""
    leaves_for_disk: float = 0.0
    """Bytes of `leaves` that are offloaded to disk if other activations go to host memory."""

    def flops(self, phase: Phase | None = None) -> float:
        """FLOPs, with attention in full."""
        return sum(item.flops for item in (*self.products, *self.cores) if phase in (None, item.phase))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Profile":
        lists = {
            "products": tuple(Product(**item) for item in value["products"]),
            "cores": tuple(Core(**item) for item in value["cores"]),
            "exchanges": tuple(Collective(**item) for item in value["exchanges"]),
            "multiplied": tuple(
                MultipliedWeight(item["layer"], tuple(item["shape"]), item["cut"]) for item in value["multiplied"]
            ),
        }
        return cls(**{**value, **lists})

    def extrapolate(self, other: "Profile", times: int) -> "Profile | None":
        """Return this profile plus `times` the difference between `other` and this profile. All sequences of a microbatch cost the same,
        so figures are linear in the microbatch. None if the two profiles do not have the same operations."""
        try:
            return _extrapolate(self, other, times)
        except _UnlikeError:
            return None


def twice(profile: Profile) -> Profile:
    """Return the profile of a part whose backward runs the part's forward once more than in `profile`."""

    def more(counts: dict[Phase, Any]) -> dict[Phase, Any]:
        return {phase: count + (counts["F"] if phase == "I" else 0) for phase, count in counts.items()}

    def once_more(items: tuple[Any, ...], **values: Any) -> tuple[Any, ...]:
        return (*items, *(replace(item, phase="I", **values) for item in items if item.phase == "F"))

    return replace(
        profile,
        products=once_more(profile.products),
        cores=once_more(profile.cores, again=True),
        exchanges=once_more(profile.exchanges),
        moved=more(profile.moved),
        kernels=more(profile.kernels),
        apart=more(profile.apart),
        apart_moved=more(profile.apart_moved),
        routed=more(profile.routed),
    )


class _UnlikeError(Exception):
    """Two profiles have different operations."""


def _extrapolate(one: Any, other: Any, times: int) -> Any:
    match one:
        case bool() | str() | None:
            if one != other:
                raise _UnlikeError
            return one
        case int() | float():
            return one + (other - one) * times
        case dict():
            return {key: _extrapolate(value, other[key], times) for key, value in one.items()}
        case tuple():
            if len(one) != len(other):
                raise _UnlikeError
            return tuple(_extrapolate(a, b, times) for a, b in zip(one, other, strict=True))
        case _:
            both = ((field.name, getattr(one, field.name), getattr(other, field.name)) for field in fields(one))
            return replace(one, **{name: _extrapolate(a, b, times) for name, a, b in both})


@dataclass(frozen=True)
class Layout:
    """The properties of plan and software that affect a part's figures on a rank. A layout and a part together are the key of a trace."""

    microbatch: int
    seq_len: int
    tensor: int = 1
    sequence: bool = True
    context: int = 1
    ulysses: int = 1
    context_method: Literal["ring", "gather"] = "ring"
    summed: bool = False
    """True if gradients of keys and values are added up over context ranks in separate tensors, as in Megalith's trainer."""
    expert: int = 1
    expert_tensor: int = 1
    weighs_away: bool = False
    """True if the gradients of routing weights are computed where the experts are, so that results that came back are not kept
    (`parallel.moe_overlap`)."""
    recompute: str = "none"
    """`none`, `full`, or the names of the recomputed parts, separated by commas."""
    defers: Literal["none", "others", "all"] = "all"
    """Weight gradients that backward defers (`kernels.deferred`): none, those of parts that are not recomputed, or all. Backwards of other
    software are traced as if all were deferred."""
    actions: tuple[tuple[str, Action], ...] = ()
    """Actions of named parts for the tensors that they keep, except recomputation (`Plan.actions`)."""
    rounded_tile: int = 128
    """How many numbers share a scale if an action keeps tensors in 8 bits."""
    rest: Place = "host"
    """The place to which the tensors of unnamed parts are offloaded, if some tensors are offloaded."""
    attention: Literal["fused", "plain"] = "fused"
    regather: bool = False
    """Split products like Megatron-LM: save a share of the input and gather it again for the weight gradients (Korthikanti et al.
    2022). After a sum over ranks, the kernel that adds the residual also adds the bias."""
    fused: bool = True
    """True if activation and gate are one kernel, and an expert's products of the same input are one product."""
    rotary: bool = True
    """True if, in `fused` software, a rotation is one kernel."""
    permute: bool = True
    """True if, in `fused` software, one kernel sorts rows by expert."""
    loss: Literal["copied", "whole", "fused", "chunked"] = "fused"
    """The computation of the loss from logits: `workload.SoftwareProfile.loss`."""
    width: int = 2
    """Bytes of one number of an activation."""
    kept: float = 2
    """Bytes of one number of an input that a product keeps for its weight's gradient; fewer in a narrow format."""
    dispatched: int = 0
    """How many numbers share a scale if tokens are sent to experts in 8 bits; 0: not in 8 bits."""
    returned: int = 0
    """How many numbers share a scale if gradients of experts' results are sent in 8 bits; 0: not in 8 bits."""
    packed: tuple[str, ...] = ()
    """Layers whose inputs are kept for backward in 8 bits, by name within the block"""
    packed_tile: int = 0
    """How many numbers of a row of packed inputs share a scale; 0: the whole row."""
    packed_activations: bool = False
    """True if the activations of `packed` layers also keep their factors in 8 bits."""
    low_precision_kept: bool = False
    """True if experts' activations and attention's output are also kept in fewer bits: `workload.SoftwareProfile.low_precision_kept`."""
    tile: int = 0
    """Number of rows of the vocabulary for which the head computes the loss at once; 0: all rows."""
    cut: bool = False
    """True if the embedding's table is read in tiles of as many rows."""
