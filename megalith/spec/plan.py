"""The plan: how a run's work is split over ranks. A person or the planner chooses the plan, and `parallel/` applies it."""

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
    """The place where a rank's training state is kept: the rank's device, the host's memory, or the host's disk."""

    optimizer: Place = Field(
        default="device",
        description="device | host | disk: place where the optimizer's state and the master weights are kept and updated",
    )
    weights: Place = Field(
        default="device",
        description="device | host | disk: place from which ZeRO 3 gathers compute weights; on the host or disk, they are "
        "cast from the master weights",
    )
    share: PositiveFloat = Field(
        default=1.0,
        le=1.0,
        description="share of the optimizer's state and master weights that leaves the device; the rest stays on the device",
    )
    folder: str = Field(default="", description="disk: folder of each rank's files; empty: the run folder")
    chunk: PositiveInt = Field(
        default=16, description="disk: MiB of a tensor that are read or written at once; memory holds three chunks"
    )
    release: bool = Field(
        default=False,
        description="with one microbatch per step: update each part of the model during backward and free its gradient. "
        "With all state on disk, a step that must be clipped is computed again; otherwise each step is computed twice",
    )

    @property
    def away(self) -> float:
        """Share of the optimizer's state and master weights that is not on the device."""
        return 0.0 if self.optimizer == "device" else self.share

    @property
    def weights_away(self) -> float:
        """The share of the compute weights that is not kept on the device between gathers."""
        return 0.0 if self.weights == "device" else self.away


Action = Literal["keep", "recompute", "compress", "host", "disk"]
"""Treatment of the tensors that a part of a block keeps from its forward for its backward."""


def place_of(action: Action) -> Place:
    """Return the place of tensors between forward and backward under an action, if the action keeps them."""
    return action if action == "host" or action == "disk" else "device"


BLOCK = ""
"""Key of a whole block in a mapping of parts."""

EXPERTS_ACTIVATION, UP_PROJECTION = "mlp.experts.activation", "attention.up"
"""Parts of a block that are not modules: the activation function inside experts, and latent attention's projections from latent
vectors to queries, keys and values (`moe_act` and `mla_up_proj` of Megatron-Core)."""

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
"""Each part of a block that can have an action -> the larger parts that contain it."""


class PartActions(dict[str, Action]):
    """Mapping from a part of a block to its action; hashable, like every value of a plan."""

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return hash(frozenset(self.items()))


COMPRESSED = tuple(part for part in PARTS if part != "mamba.core")
"""The parts whose tensors can be kept in 8 bits. The part `mamba.core` is left out, because it keeps fp32 sums over the whole
sequence."""

NORMS = ("attention_norm", "mamba_norm", "mlp_norm")
"""The parts that are norms."""


def parts_around(layer: str) -> tuple[str, ...]:
    """Return the parts of a block that contain the tensors which a layer keeps, the innermost part first. `layer`: the name in
    the block of a norm or a matrix product, or `EXPERTS_ACTIVATION`. In a block without experts, the whole MLP is
    `mlp.shared`."""
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
    """Return True if the tensors that a layer keeps are in 8 bits: the innermost part with an action decides."""
    return next((actions[part] for part in parts_around(layer) if part in actions), "keep") == "compress"


OUTSIDE: tuple[Place, ...] = ("host", "disk")
"""Places for tensors outside the device, the nearest first."""


class RetainSpec(Spec):
    """Treatment of the tensors that blocks keep from their forward for their backward, except those dropped by
    `plan.recompute`."""

    blocks: Place = Field(
        default="device",
        description="device | host | disk: place of the tensors that a block keeps for backward. The tensors of a block are "
        "fetched during the backward of the block that follows it in the model",
    )
    share: PositiveFloat = Field(
        default=1.0,
        le=1.0,
        description="share of blocks whose tensors leave the device; these blocks are spread evenly over the model",
    )
    folder: str = Field(default="", description="disk: folder of each rank's file; empty: the run folder")
    parts: Annotated[dict[str, Action], AfterValidator(PartActions)] = Field(
        default=PartActions(),
        description="action for each part of a block: keep (on the device) | recompute | compress (keep in 8 bits) | host | "
        "disk; the innermost part with an action decides",
    )

    @property
    def places(self) -> tuple[Place, ...]:
        """Places outside the device that the plan uses for the tensors of blocks, or of parts of blocks."""
        if self.blocks == "device" and not self.parts:  # the usual case, which a search asks for at every plan
            return ()
        named = {self.blocks, *self.parts.values()}
        return tuple(place for place in OUTSIDE if place in named)

    @property
    def away(self) -> float:
        """Share of the blocks from which some tensors leave the device."""
        return self.share if self.places else 0.0

    def leaves(self, number: int) -> bool:
        """Return True if the tensors of block `number` of the model leave the device."""
        return int((number + 1) * self.away) > int(number * self.away)


class Plan(Spec):
    """A parallel layout of `data * context * tensor * pipeline` ranks. The result of training does not depend on the plan, except
    for the action `compress` and, with `balance_set = "batch"`, the number of sequences in microbatch i of all data ranks."""

    data: PositiveInt = Field(
        default=1, description="number of data-parallel ranks, which read different parts of the global batch"
    )
    replicate: PositiveInt = Field(
        default=1,
        description="number of groups of data ranks (HSDP): each group shards a full copy of the state among its ranks; must divide data",
    )
    zero: Zero = Field(
        default=1, description="state that data ranks shard. 0: nothing, 1: optimizer state, 2: also gradients, 3: also weights"
    )
    tensor: PositiveInt = Field(default=1, description="number of ranks that split each matrix product")
    sequence: bool = Field(
        default=True, description="with tensor > 1: tensor ranks also split norms and residuals, along the sequence"
    )
    overlap_tensor: PositiveInt = Field(
        default=1,
        description="with tensor > 1: number of pieces into which activations are cut, to send one piece while another one is "
        "multiplied; 1: no overlap",
    )
    context: PositiveInt = Field(
        default=1,
        description="number of ranks that split each sequence; each rank has one early and one late part of the sequence",
    )
    context_method: Literal["ring", "gather"] = Field(
        default="ring",
        description="ring: keys and values pass around a ring of context ranks; gather: every context rank gathers all keys "
        "and values (Llama 3)",
    )
    ulysses: PositiveInt = Field(
        default=1,
        description="size of the groups of context ranks that exchange tokens for heads in attention (Ulysses): each rank "
        "then has some heads of all tokens of its group; 1: no exchange",
    )
    expert: PositiveInt = Field(
        default=1, description="number of ranks that divide the experts; these are also data, context and tensor ranks"
    )
    expert_tensor: PositiveInt = Field(default=1, description="number of ranks that split each expert's matrix products")
    pipeline: PositiveInt = Field(default=1, description="number of pipeline ranks, each of which holds consecutive layers")
    schedule: str = Field(default="1f1b", description="pipeline schedule: a name from the schedule table")
    chunks: PositiveInt = Field(
        default=1, description="number of stages of a pipeline rank (interleaved schedules need more than one)"
    )
    layers: tuple[NonNegativeInt, ...] | None = Field(
        default=None,
        description="number of blocks in each stage, in order; the first and the last stage may have none; default: as even as possible",
    )
    microbatch: PositiveInt = Field(default=1, description="number of sequences that a data rank computes at once")
    recompute: Recompute = Field(
        default="none",
        description="none | selective (the parts in recompute_parts) | full (every block) | every:N (every N-th block) | "
        "segments:K (only the inputs of segments of K blocks are kept) | segments:auto (the K with the lowest "
        "memory peak) | sqrt (segments of sqrt(L) blocks, in which each block is also recomputed)",
    )
    recompute_parts: tuple[str, ...] = Field(
        default=("attention.core",), description="parts of a block that backward recomputes if recompute is `selective`"
    )
    post_validation: bool = Field(
        default=False,
        description=f"update before the global gradient norm is known, and check the norm after the next step's first "
        f"forwards. An update that should have been clipped or skipped is undone. Until the norm is checked, a rank keeps "
        f"gradients and, with AdamW, copies of {UNDO_BYTES:g} bytes per parameter of its share",
    )
    state: StateSpec = StateSpec()
    retain: RetainSpec = RetainSpec()
    compile: bool = Field(default=False, description="compile each block with torch.compile")

    @property
    def actions(self) -> Mapping[str, Action]:
        """Mapping from a part of a block to the action on the tensors that it keeps for backward, unless the whole block is
        recomputed. `BLOCK` has the action for all other tensors of a block. `recompute_parts` and `retain.blocks` set some of
        these actions."""
        named = self.recompute_parts if self.recompute == "selective" else ()
        rest: Action = "keep" if self.retain.blocks == "device" else self.retain.blocks
        return {BLOCK: rest, **dict.fromkeys(named, "recompute"), **self.retain.parts}

    @property
    def rounding(self) -> Mapping[str, Action]:
        """The `compress` actions, which change numbers, and `keep` for the parts inside compressed ones that are not compressed.
        The run in one process with which a plan is compared uses these actions too."""
        named = self.actions
        short = [part for part, action in named.items() if action == "compress"]
        around = {part: (*PARTS.get(part, ()), *(("mlp.activation",) if part == EXPERTS_ACTIVATION else ())) for part in named}
        wide = [part for part in named if part not in short and any(outer in short for outer in around[part])]
        return {**dict.fromkeys(sorted(short), "compress"), **dict.fromkeys(sorted(wide), "keep")}

    @property
    def recomputed_parts(self) -> tuple[str, ...]:
        """The parts of blocks that backward recomputes."""
        return tuple(part for part, action in self.actions.items() if action == "recompute")

    @property
    def ranks(self) -> int:
        """Ranks of the whole run."""
        return self.data * self.context * self.tensor * self.pipeline

    @property
    def set_sequences(self) -> int:
        """Number of sequences in microbatch i of all data ranks, over which `balance_set = "batch"` measures loads."""
        return self.data * self.microbatch

    @property
    def sides(self) -> int:
        """The number of copies of each stage in the pipeline: 2 if its schedule is bidirectional."""
        return 2 if kind(self.schedule).bidirectional else 1

    @property
    def dp_size(self) -> int:
        """Number of ranks that compute different tokens with the same dense weight, so that their gradients are added up."""
        return self.data * self.context * self.sides

    @property
    def dp_shard(self) -> int:
        """Ranks that share one copy of the dense state: 1 when nothing is sharded."""
        return 1 if self.zero == 0 else self.dp_size // self.replicate

    @property
    def cuts_tables(self) -> bool:
        """True if embedding and output are read in tiles of `train.vocab_tile` rows and never gathered: all weights are off the device, and
        no other rank has a share or a copy of them."""
        return self.zero == 3 and self.state.weights_away == 1 and self.dp_size == 1

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
        head. Blocks are divided as evenly as possible; left-over blocks go to the first stages, one each, because the last stage
        also has the output projection. `layers`, if set, overrides this division.
        """
        return _bounds(self.layers, self.stages, blocks)

    def longest_stage(self, blocks: int) -> int:
        """Return the number of blocks of the stage that has the most."""
        return max(self.layers) if self.layers else -(-blocks // self.stages)

    def places(self, blocks: int) -> bool:
        """Return True if `layers`, where set, names every stage and places every block; only then are there `bounds`."""
        return not self.layers or (len(self.layers) == self.stages and sum(self.layers) == blocks)

    def retained(self, blocks: int) -> frozenset[int]:
        """Return the numbers of stages with a block from which tensors leave the device between forward and backward."""
        stages = enumerate(self.bounds(blocks))  # part 0 is the embedding, so block n is part n + 1
        return frozenset(
            stage
            for stage, (first, last) in stages
            if any(map(self.retain.leaves, range(max(0, first - 1), min(last - 1, blocks))))
        )


AUTO = "segments:auto"
"""The recomputation policy whose segment size is chosen by `cost.segments` before ranks start."""


def recomputed(number: int, *, blocks: int, policy: str) -> bool:
    """Return True if block `number` (of the whole model's `blocks`) keeps only its input in forward and is recomputed in its own
    backward. Under `sqrt`, the backward first recomputes a whole segment, whose blocks keep only their inputs and are later
    recomputed one by one. Blocks of multi-token prediction belong to no segment: each one is recomputed alone.
    """
    if policy in ("full", "sqrt"):
        return True
    if policy.startswith("every:"):
        return number % int(policy.removeprefix("every:")) == 0
    return policy.startswith("segments:") and number >= blocks


def segment_size(policy: str, *, blocks: int) -> int:
    """Return the number of consecutive blocks in a segment; 0 if the policy has no segments. A segment keeps only its first
    block's input (Chen et al. 2016, section 4.3). Raises ValueError for `segments:auto`, whose size is not known before blocks
    are traced."""
    if policy == AUTO:
        raise ValueError(
            f"plan.recompute = {AUTO!r} has no segment size: call `cost.segments.decided` first, which replaces it by segments:K"
        )
    if policy == "sqrt":
        return math.ceil(math.sqrt(blocks))
    return int(policy.removeprefix("segments:")) if policy.startswith("segments:") else 0


def segments(parts: Sequence[bool], size: int) -> tuple[range, ...]:
    """Cut a stage's blocks into segments of `size` blocks; the last segment may be shorter. `parts`: for each part of the stage,
    True if it is a block. Each segment is a range of part numbers."""
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
