"""The plan: how the work is split. A person or the planner chooses it, and `parallel/` applies it."""

import math
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import accumulate
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt, StringConstraints

from megalith.schedule.table import kind
from megalith.spec.base import Spec
from megalith.spec.optimizers import OPTIMIZERS
from megalith.spec.state import MASTER, Place, bytes_each

UNDO_BYTES = bytes_each([MASTER, *OPTIMIZERS["adamw"].slots])

Zero = Literal[0, 1, 2, 3]
Recompute = Annotated[
    str, StringConstraints(pattern=r"^(none|selective|full|sqrt|every:[1-9][0-9]*|segments:(auto|[1-9][0-9]*))$")
]


class StateSpec(Spec):
    """Location of the training state of a rank: on its device, in its host's memory, or on its host's disk."""

    optimizer: Place = Field(
        default="device",
        description="device | host | disk: place where the optimizer's state and the master weights are kept and updated",
    )
    weights: Place = Field(
        default="device",
        description="device | host | disk: source of the compute weights at each gather under ZeRO 3; on the host or disk they are cast "
        "from the master weights there",
    )
    share: PositiveFloat = Field(
        default=1.0,
        le=1.0,
        description="share of the optimizer's state and master weights that is kept there; the rest stays on the device",
    )
    folder: str = Field(default="", description="disk: folder of each rank's files; empty: the run folder")
    chunk: PositiveInt = Field(
        default=16, description="disk: MiB of one tensor that are read and written at once; three chunks are in memory"
    )
    release: bool = Field(
        default=False,
        description="disk, one microbatch a step: update each part inside the backward and free its gradient; a step that turns out to "
        "be clipped is computed again",
    )

    @property
    def away(self) -> float:
        """The share that is not on the device."""
        return 0.0 if self.optimizer == "device" else self.share

    @property
    def weights_away(self) -> float:
        """The share of the compute weights that is not kept on the device between gathers."""
        return 0.0 if self.weights == "device" else self.away


Action = Literal["keep", "recompute", "compress", "host", "disk"]
"""The treatment of the tensors that a part of a block keeps from its forward for its backward."""


def place_of(action: Action) -> Place:
    """Return where tensors with an action wait, as far as they are kept at all."""
    return action if action == "host" or action == "disk" else "device"


BLOCK = ""
"""The name that stands for a whole block among the names of parts."""

EXPERTS_ACTIVATION, UP_PROJECTION = "mlp.experts.activation", "attention.up"
"""Parts of a block that are not modules: the activation between the experts' products, and the projection of latent
attention's latents to queries, keys and values (`moe_act` and `mla_up_proj` of Megatron-Core)."""

PARTS: dict[str, tuple[str, ...]] = {
    "attend": (),
    "attention": ("attend",),
    "attention.core": ("attention", "attend"),
    UP_PROJECTION: ("attention", "attend"),
    "attention_norm": ("attend",),
    "mamba": ("attend",),
    "mamba.core": ("mamba", "attend"),
    "mamba_norm": ("attend",),
    "mlp": (),
    "mlp.activation": ("mlp", "mlp.experts", "mlp.shared"),
    "mlp.experts": ("mlp",),
    EXPERTS_ACTIVATION: ("mlp", "mlp.experts"),
    "mlp.shared": ("mlp",),
    "mlp_norm": ("attend",),
}
"""Each part of a block that an action can name -> the parts that contain it."""


class PartActions(dict[str, Action]):
    """Part of a block -> action. The mapping is hashable, like every value of a plan."""

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return hash(frozenset(self.items()))


COMPRESSED = tuple(part for part in PARTS if part != "mamba.core")
"""The parts whose tensors can be kept in 8 bits. A Mamba-2 core keeps sums over the whole sequence in fp32."""

NORMS = ("attention_norm", "mamba_norm", "mlp_norm")
"""The parts that are norms."""


def parts_around(layer: str) -> tuple[str, ...]:
    """Return the parts of a block that contain what a layer keeps, the innermost first. `layer`: the name, within the block, of a norm,
    of a module that multiplies, or `EXPERTS_ACTIVATION`. A block without experts has all of its MLP in `mlp.shared`."""
    half, _, rest = layer.partition(".")
    if half in NORMS:
        return half, "attend"
    if half != "mlp":
        inner = {"core": (f"{half}.core",), "q_up": (UP_PROJECTION,), "kv_up": (UP_PROJECTION,)}
        return *inner.get(rest, ()), half, "attend"
    if rest.startswith("experts"):
        inner = (EXPERTS_ACTIVATION, "mlp.activation") if layer == EXPERTS_ACTIVATION else ()
        return *inner, "mlp.experts", "mlp"
    return *(("mlp.activation",) if rest.endswith("down") else ()), "mlp.shared", "mlp"


def compresses(actions: Mapping[str, Action], layer: str) -> bool:
    """Return True if what a layer keeps is kept in 8 bits: the innermost part that is named decides."""
    return next((actions[part] for part in parts_around(layer) if part in actions), "keep") == "compress"


OUTSIDE: tuple[Place, ...] = ("host", "disk")
"""The places outside the device, the nearest first."""


class RetainSpec(Spec):
    """Treatment of the tensors that blocks keep from their forward for their backward, apart from those that `plan.recompute`
    drops."""

    blocks: Place = Field(
        default="device",
        description="device | host | disk: place of the tensors that a block keeps for backward. They are fetched "
        "during the backward of the next block",
    )
    share: PositiveFloat = Field(
        default=1.0, le=1.0, description="share of the blocks whose tensors leave the device, spread evenly over the model"
    )
    folder: str = Field(default="", description="disk: folder of each rank's file; empty: the run folder")
    parts: Annotated[dict[str, Action], AfterValidator(PartActions)] = Field(
        default=PartActions(),
        description="part of a block -> keep (on the device) | recompute | compress (in 8 bits) | host | disk; the "
        "innermost part that is named decides",
    )

    @property
    def places(self) -> tuple[Place, ...]:
        """The places outside the device where tensors wait, of all blocks or of parts of them."""
        if self.blocks == "device" and not self.parts:  # the usual case, which a search asks for at every plan
            return ()
        named = {self.blocks, *self.parts.values()}
        return tuple(place for place in OUTSIDE if place in named)

    @property
    def away(self) -> float:
        """The share of the blocks with tensors that leave the device."""
        return self.share if self.places else 0.0

    def leaves(self, number: int) -> bool:
        """Return True if the tensors of block `number` of the model leave the device."""
        return int((number + 1) * self.away) > int(number * self.away)


class Plan(Spec):
    """A parallel layout. It has `data * context * tensor * pipeline` ranks. The result of training does not depend on the
    plan, except for the action `compress`."""

    data: PositiveInt = Field(default=1, description="data-parallel ranks; each reads its own part of the global batch")
    replicate: PositiveInt = Field(
        default=1,
        description="number of groups of data ranks, each with a full copy of the state, sharded inside the group (HSDP); must divide data",
    )
    zero: Zero = Field(default=1, description="state that data ranks shard: 0 nothing, 1 optimizer, 2 + gradients, 3 + weights")
    tensor: PositiveInt = Field(default=1, description="ranks that split each matrix product")
    sequence: bool = Field(default=True, description="with tensor > 1: split norms and residuals along the sequence too")
    overlap_tensor: PositiveInt = Field(
        default=1,
        description="with tensor > 1: number of pieces of an activation; one is sent while another is multiplied; 1: no overlap",
    )
    context: PositiveInt = Field(
        default=1, description="ranks that split each sequence; each rank has one early and one late part of the sequence"
    )
    context_method: Literal["ring", "gather"] = Field(
        default="ring",
        description="how queries reach all keys and values: these pass around a ring of ranks, or every rank gathers them (Llama 3)",
    )
    ulysses: PositiveInt = Field(
        default=1,
        description="size of the groups of context ranks that exchange heads for parts of the sequence instead; equal "
        "to context: one group of all",
    )
    expert: PositiveInt = Field(default=1, description="ranks that divide the experts; taken from data, context and tensor ranks")
    expert_tensor: PositiveInt = Field(default=1, description="ranks that split each expert's matrix products")
    pipeline: PositiveInt = Field(default=1, description="ranks that each hold consecutive layers")
    schedule: str = Field(default="1f1b", description="pipeline schedule: a name from the schedule table")
    chunks: PositiveInt = Field(
        default=1, description="number of stages of a pipeline rank (interleaved schedules need more than one)"
    )
    layers: tuple[NonNegativeInt, ...] | None = Field(
        default=None,
        description="number of blocks of each stage, in order; the first and the last may have none; default: as even as possible",
    )
    microbatch: PositiveInt = Field(default=1, description="sequences a data rank computes at once")
    recompute: Recompute = Field(
        default="none",
        description="none | selective (the parts in recompute_parts) | full | every:N | segments:K (only the inputs of segments of "
        "K blocks are kept) | segments:auto (the K with the lowest peak) | sqrt (segments of sqrt(L) blocks, each recomputed)",
    )
    recompute_parts: tuple[str, ...] = Field(
        default=("attention.core",), description="selective: the parts of a block that the backward recomputes"
    )
    post_validation: bool = Field(
        default=False,
        description="update before the global gradient norm is known, and check the norm after the next step's first "
        f"forwards. A wrong update is undone; until the check, gradients and copies are kept, {UNDO_BYTES:g} bytes a "
        "parameter of a rank's share with AdamW",
    )
    state: StateSpec = StateSpec()
    retain: RetainSpec = RetainSpec()
    compile: bool = Field(default=False, description="compile each block with torch.compile")

    @property
    def actions(self) -> Mapping[str, Action]:
        """The policy for tensors that a block keeps for its backward, unless the whole block is recomputed: part -> action.
        `BLOCK` has the action for tensors outside of named parts. `recompute_parts` and `retain.blocks` are short forms of
        this mapping."""
        named = self.recompute_parts if self.recompute == "selective" else ()
        rest: Action = "keep" if self.retain.blocks == "device" else self.retain.blocks
        return {BLOCK: rest, **dict.fromkeys(named, "recompute"), **self.retain.parts}

    @property
    def rounding(self) -> Mapping[str, Action]:
        """The actions that change numbers, and `keep` for the parts in between: one process has them, too."""
        named = self.actions
        short = [part for part, action in named.items() if action == "compress"]
        around = {part: (*PARTS.get(part, ()), *(("mlp.activation",) if part == EXPERTS_ACTIVATION else ())) for part in named}
        wide = [part for part in named if part not in short and any(outer in short for outer in around[part])]
        return {**dict.fromkeys(sorted(short), "compress"), **dict.fromkeys(sorted(wide), "keep")}

    @property
    def recomputed_parts(self) -> tuple[str, ...]:
        """The parts of blocks that run again in backward."""
        return tuple(part for part, action in self.actions.items() if action == "recompute")

    @property
    def ranks(self) -> int:
        """Ranks of the whole run."""
        return self.data * self.context * self.tensor * self.pipeline

    @property
    def set_sequences(self) -> int:
        """Number of sequences in microbatch i of all data ranks: the set over which `balance_set = "batch"` measures loads."""
        return self.data * self.microbatch

    @property
    def sides(self) -> int:
        """The number of copies of each stage in the pipeline: 2 if its schedule is bidirectional."""
        return 2 if kind(self.schedule).bidirectional else 1

    @property
    def dp_size(self) -> int:
        """Ranks whose gradients of a dense weight are added up, because they compute different tokens."""
        return self.data * self.context * self.sides

    @property
    def dp_shard(self) -> int:
        """Ranks that share one copy of the dense state: 1 when nothing is sharded."""
        return 1 if self.zero == 0 else self.dp_size // self.replicate

    @property
    def dp_replicate(self) -> int:
        """Copies of the dense state; `dp_replicate * dp_shard == dp_size`."""
        return self.dp_size // self.dp_shard

    @property
    def stages(self) -> int:
        """Pipeline stages of the whole model."""
        return self.pipeline * self.chunks

    def bounds(self, blocks: int) -> tuple[tuple[int, int], ...]:
        """Return the first part of each stage and the part after its last one; part 0 is the embedding, part `blocks + 1` the
        head. Blocks are divided as evenly as possible; the first stages get the remaining blocks, because the last stage also
        has the output projection. `layers`, if set, overrides this division.
        """
        return _bounds(self.layers, self.stages, blocks)

    def retained(self, blocks: int) -> frozenset[int]:
        """Return the stages with a block whose tensors leave the device between forward and backward."""
        stages = enumerate(self.bounds(blocks))  # part 0 is the embedding, so block n is part n + 1
        return frozenset(
            stage
            for stage, (first, last) in stages
            if any(map(self.retain.leaves, range(max(0, first - 1), min(last - 1, blocks))))
        )


AUTO = "segments:auto"
"""The recomputation policy whose segment size `cost.segments` decides before ranks start."""


def recomputed(number: int, *, blocks: int, policy: str) -> bool:
    """Return whether block `number` (of the whole model's `blocks`) keeps only its input in forward and runs again in its own backward.

    `every:n` recomputes every n-th block. Under `sqrt`, a segment runs again, and meanwhile each of its blocks keeps only its
    input. Blocks of multi-token prediction belong to no segment: each runs again on its own.
    """
    if policy in ("full", "sqrt"):
        return True
    if policy.startswith("every:"):
        return number % int(policy.removeprefix("every:")) == 0
    return policy.startswith("segments:") and number >= blocks


def segment_size(policy: str, *, blocks: int) -> int:
    """Return how many consecutive blocks of a stage make a segment; 0 if the policy has no segments. A segment keeps only its
    first block's input (Chen et al. 2016, section 4.3). Raises ValueError for `segments:auto`, whose size follows from traced
    blocks."""
    if policy == AUTO:
        raise ValueError(f"plan.recompute = {AUTO!r} has no size yet: `cost.segments.decided` replaces it")
    if policy == "sqrt":
        return math.ceil(math.sqrt(blocks))
    return int(policy.removeprefix("segments:")) if policy.startswith("segments:") else 0


def segments(parts: Sequence[bool], size: int) -> tuple[range, ...]:
    """Cut a stage's blocks into segments of `size`; the last may be shorter. `parts`: for each part of the stage, True if it
    is a block. Each segment is a range of part numbers."""
    blocks = [number for number, is_block in enumerate(parts) if is_block]
    return (
        tuple(range(blocks[at], blocks[min(at + size, len(blocks)) - 1] + 1) for at in range(0, len(blocks), size))
        if size
        else ()
    )


@cache
def _bounds(layers: tuple[int, ...] | None, stages: int, blocks: int) -> tuple[tuple[int, int], ...]:
    each, left = divmod(blocks, stages)
    counts = layers or tuple(each + (stage < left) for stage in range(stages))
    assert len(counts) == stages and sum(counts) == blocks, (counts, stages, blocks)
    ends = list(accumulate(counts, initial=1))[1:]
    starts = [0, *ends[:-1]]
    ends[-1] += 1
    return tuple(zip(starts, ends, strict=True))
