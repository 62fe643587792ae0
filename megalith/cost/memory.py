"""Bytes that a rank holds at the peak of a step, by purpose. No torch."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from operator import mul
from typing import NamedTuple

from megalith import schedule as schedules
from megalith.cost import host, released, update
from megalith.cost.constants import SoftwareOverheads
from megalith.cost.gathered import TILES, ends
from megalith.cost.kept import kept
from megalith.cost.narrow.ways import rounding_bytes
from megalith.cost.parts import Numbers, Parts, Segments
from megalith.cost.time import line
from megalith.cost.workload import Workload
from megalith.schedule.action import Row
from megalith.schedule.action import parts as parts_of
from megalith.schedule.table import SCHEDULES
from megalith.spec.model import MoeSpec
from megalith.spec.state import DISK_SLOTS


@dataclass(frozen=True)
class Memory:
    """Peak bytes of one rank."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    working: float
    logits: float
    reserve: float
    non_torch: float
    """Bytes that torch does not report as allocated: the device's context, communicators, buffers of the experts' all-to-all,
    and free memory in the pools of CUDA graphs."""
    rank: int
    """The pipeline rank."""
    host: float = 0.0
    """Bytes in the host's memory, not counted in `total`: state, buffers for state on disk, and offloaded activations."""
    disk: float = 0.0
    """Bytes in files on the host's disk: state and offloaded activations."""

    @property
    def allocated(self) -> float:
        """Bytes that torch reports as its peak."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.working + self.logits + self.reserve

    @property
    def total(self) -> float:
        return self.allocated + self.non_torch


CONTEXT = 1.06e9
"""Bytes of a device's context and the default communicator, as measured on 8 H100 before their first all-to-all (NVIDIA/nccl,
issue 1685)."""

PAIR, GROUP = 0.544e9, 0.688e9
"""Bytes of each further communicator, as measured on 4 A100 (NVIDIA/nccl, issue 964): of one with two ranks, and of one with more ranks."""

ALL_TO_ALL = 3.28e9
"""Bytes of a communicator for all-to-all, as measured at the first all-to-all on 8 H100 (NVIDIA/nccl, issue 1685)."""


Chunk = tuple[tuple[int, int], ...]
"""Blocks by kind: the index of the kind's first block (`Parts.kinds`), and the number of its blocks."""

PerChunk = tuple[tuple[int, ...], ...]
"""A number for each chunk of each rank."""


@dataclass(frozen=True)
class RankParts:
    """The parts of a pipeline rank. Ranks whose parts take the same memory compare equal."""

    chunks: tuple[Chunk, ...]
    embedding: bool
    head: bool

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """The hash, cached because a search needs it tens of thousands of times."""
        return hash((self.chunks, self.embedding, self.head))

    @cached_property
    def blocks(self) -> Chunk:
        """The blocks of all chunks."""
        return tuple(run for chunk in self.chunks for run in chunk)


@dataclass(frozen=True)
class Shares:
    """Division of the model by a schedule: `held`, the parts of each pipeline rank; for each of its chunks, `flying`, the number of
    microbatches in flight when the rank has the most in flight, and `waiting`, the number between the two halves of their backward when the
    rank has the most of these."""

    held: tuple[RankParts, ...]
    flying: PerChunk
    waiting: PerChunk

    @cached_property
    def worst_ranks(self) -> tuple[int, ...]:
        """A set of ranks that includes the rank with the peak memory: every rank outside the set has the same parts as a rank in the set,
        and no more microbatches of any kind of chunk in flight, or between the halves of their backward (between these halves, a
        microbatch holds more if blocks are recomputed)."""
        return self._not_exceeded(self.waiting)

    @cached_property
    def most_in_flight(self) -> tuple[int, ...]:
        """A subset of `worst_ranks` that suffices for `memory`, which does not count tensors between the halves of a backward."""
        return self._not_exceeded(tuple((0,) * len(each) for each in self.waiting))

    def _not_exceeded(self, waiting: PerChunk) -> tuple[int, ...]:
        found: dict[RankParts, dict[int, Counter[tuple[Chunk, bool]]]] = {}
        for rank, (here, flying, halfway) in enumerate(zip(self.held, self.flying, waiting, strict=True)):
            most = Counter[tuple[Chunk, bool]]()
            for chunk, times, halves in zip(here.chunks, flying, halfway, strict=True):
                most[chunk, False] += times
                most[chunk, True] += halves
            others = found.setdefault(replace(here, chunks=tuple(sorted(here.chunks))), {})
            if not any(most <= other for other in others.values()):
                others[rank] = most
        return tuple(sorted(rank for ranks in found.values() for rank in ranks))


def shares(workload: Workload, parts: Parts) -> Shares:
    """Return each pipeline rank's share of the model by the schedule's placement of stages. Bidirectional schedules place
    each stage twice."""
    plan = workload.plan
    stages, flying, waiting = _program(plan.schedule, plan.pipeline, workload.representative_microbatches, plan.chunks)
    return _shares(stages, flying, waiting, plan.bounds(len(parts.blocks)), parts.kinds)


@cache
def _shares(
    stages: PerChunk, flying: PerChunk, waiting: PerChunk, bounds: tuple[tuple[int, int], ...], kinds: tuple[int, ...]
) -> Shares:
    parts = ("embedding", *kinds, "head")
    held: list[RankParts] = []
    for own in stages:
        mine = [Counter(parts[slice(*bounds[stage])]) for stage in own]
        chunks = tuple(tuple((kind, times) for kind, times in chunk.items() if isinstance(kind, int)) for chunk in mine)
        held.append(RankParts(chunks, any("embedding" in chunk for chunk in mine), any("head" in chunk for chunk in mine)))
    return Shares(tuple(held), flying, waiting)


@kept("schedule/*.py", "cost/memory.py", when=lambda name, *_: name in SCHEDULES)
def _program(name: str, ranks: int, microbatches: int, chunks: int) -> tuple[PerChunk, PerChunk, PerChunk]:
    """Return the stages of each rank, and `Shares.flying` and `Shares.waiting` of each stage."""
    schedule = schedules.build(name, ranks=ranks, microbatches=microbatches, chunks=chunks)
    stages = tuple(schedule.stages_of(rank) for rank in range(ranks))
    flying = tuple(_most(row, own, {"F": 1, "I": 0, "W": -1, "B": -1}) for row, own in zip(schedule.rows, stages, strict=True))
    waiting = tuple(_most(row, own, {"F": 0, "I": 1, "W": -1, "B": 0}) for row, own in zip(schedule.rows, stages, strict=True))
    return stages, flying, waiting


def _most(row: Row, stages: Sequence[int], changes: Mapping[str, int]) -> tuple[int, ...]:
    """Return, for the moment at which a rank holds the most microbatches, how many each of its stages holds. `changes`: by how much an
    action of each kind changes the number of microbatches that a stage holds."""
    held, most, now, top = Counter[int](), Counter[int](), 0, 0
    for slot in row:
        # in an overlap both are there before either is freed
        for action in sorted(parts_of(slot), key=lambda one: one.kind != "F"):
            change = changes[action.kind]
            held[action.stage] += change
            now += change
            if now > top:
                most, top = held.copy(), now
    return tuple(most[stage] for stage in stages)


def memory(workload: Workload, parts: Parts, overheads: SoftwareOverheads) -> Memory:
    """The worst rank's memory."""
    shared = shares(workload, parts)
    return max(_ranks(workload, parts, overheads, shared, shared.most_in_flight), key=lambda memory: memory.total)


def fits(workload: Workload, held: Memory, overheads: SoftwareOverheads, *, more: float = 0.0) -> bool:
    """True if the device has room for the memory, for `more` bytes (below 0: fewer) and for the allocator's loss, and the host has room
    for offloaded state."""
    cluster = workload.cluster
    limit = cluster.accelerator.memory
    near = limit is None or (held.total + more) * (1 + overheads.slack) <= limit
    return near and cluster.has_room(memory=held.host, disk=held.disk)


def by_rank(workload: Workload, parts: Parts, overheads: SoftwareOverheads, ranks: Iterable[int] | None = None) -> list[Memory]:
    """Return the memory of these pipeline ranks; None: of all."""
    ranks = range(workload.plan.pipeline) if ranks is None else ranks
    return _ranks(workload, parts, overheads, shares(workload, parts), ranks)


def _ranks(workload: Workload, parts: Parts, overheads: SoftwareOverheads, shared: Shares, ranks: Iterable[int]) -> list[Memory]:
    outside, graphed, rounding = non_torch(workload), _graphed(workload), rounding_bytes(workload, parts)
    return [_rank(workload, parts, overheads, shared, rank, outside, graphed, rounding) for rank in ranks]


def _rank(
    workload: Workload,
    parts: Parts,
    overheads: SoftwareOverheads,
    shared: Shares,
    rank: int,
    outside: float,
    graphed: frozenset[int],
    rounding: float,
) -> Memory:
    here, flying = shared.held[rank], shared.flying[rank]
    own, held = _own(parts, here), numbers(workload, parts, here)
    shards, expert_shards = workload.shards
    state = _state(workload, held.dense, shards), _state(workload, held.expert, expert_shards)
    whole = whole_bytes(workload, parts, here)
    # the head's backward follows its forward: its logits are gone before any block's backward
    logits = parts.head.saved + parts.head.working if here.head else 0.0
    share = workload.plan.retain.away
    waiting, for_disk = (share * sum(map(mul, flying, each)) if share else 0.0 for each in (own.leaves, own.for_disk))
    far = host.on_disk(workload, waiting, for_disk) if share else 0.0
    coming = 0 if not share else 1 if share < 1 else 2  # a block's, and those of the one before it
    inside = update.opened_bytes(workload) if workload.plan.state.release else 0.0  # of updates during a backward
    working = overheads.working * own.working + coming * own.largest_leaves + rounding + inside
    saved = sum(map(mul, flying, own.saved)) - waiting + _recorded(parts, here, flying, graphed)
    saved += _outputs(workload, parts, here, flying)
    others = workload.software_profile.update_bytes * updated(workload, held)
    temporary = max(update.home_bytes(workload, here), update.opened_bytes(workload), others)
    updating = temporary - saved  # activations are gone by then
    rest, away = update.rest_bytes(workload, parts, here), workload.plan.state.away
    on_disk = workload.plan.state.optimizer == "disk"
    return Memory(
        weights=sum(s[0] for s in state) + whole,
        gradients=compared_bytes(workload, held)
        + workload.software_profile.microbatch_gradient_bytes * sum(held)
        + (
            _released(workload, parts, here)
            if workload.plan.state.release
            else sum(s[1] for s in state)
            + (shards > 1) * whole / workload.width * workload.gradient_bytes
            + _added_up(workload, parts, here)
        ),
        optimizer=sum(s[2] for s in state) + rest * (1 - away),
        activations=saved,
        working=max(working - logits, updating - logits, 0.0),
        logits=logits,
        reserve=overheads.reserve,
        non_torch=outside + _apart(workload, parts, here, graphed),
        rank=rank,
        host=sum(s[3] for s in state) + (host.streamed(workload) if on_disk else rest * away) + waiting - far,
        disk=sum(s[4] for s in state) + (DISK_SLOTS * rest * away if on_disk else 0.0) + far,
    )


def _added_up(workload: Workload, parts: Parts, here: RankParts) -> float:
    """Bytes of the unsharded gradients of one chunk, which some software adds up over several microbatches before ZeRO 2 reduces them."""
    if workload.plan.zero != 2 or workload.software_profile.reduces == "microbatch":
        return 0.0
    of = [part.weights + part.expert_weights for part in parts.blocks]
    chunks = [sum(of[kind] * times for kind, times in chunk) for chunk in here.chunks]
    first, last = ends(workload, parts, here)
    return workload.gradient_bytes * max(chunks[0] + first, *chunks, chunks[-1] + last)


def _released(workload: Workload, parts: Parts, here: RankParts) -> float:
    """Bytes of gradients that are released part by part, with the buffers that send them."""
    embedding = float(parts.embedding.weights)
    largest = max(_own(parts, here).largest, *ends(workload, parts, here, tiles=1))
    waiting = released.waiting(workload, embedding, first=here.embedding, last=here.head)
    return released.held(workload, largest) + released.in_transit(workload, largest) + waiting


def updated(workload: Workload, held: Numbers) -> float:
    """Return the number of weights that one rank updates, out of the weights `held` by its pipeline rank."""
    shards, expert_shards = workload.shards
    return held.dense / shards + held.expert / expert_shards


def compared_bytes(workload: Workload, held: Numbers) -> float:
    """Return the bytes of the second copy of a rank's gradients that a comparison keeps (`precision.watch_every`)."""
    if not workload.watched:
        return 0.0
    by_shards = zip(held, workload.shards, strict=True)
    return workload.gradient_bytes * sum(numbers / shards for numbers, shards in by_shards)


class _Own(NamedTuple):
    """Memory of a pipeline rank's parts, before a plan shards it."""

    largest: float
    """Number of weights of the largest block."""
    saved: tuple[float, ...]
    """Bytes that a microbatch keeps for backward, in each chunk."""
    working: float
    """Largest temporary bytes of a block."""
    leaves: tuple[float, ...]
    """Bytes of `saved` that can be offloaded."""
    for_disk: tuple[float, ...]
    """Bytes of `leaves` that are offloaded to disk if other activations go to host memory."""
    largest_leaves: float
    """Largest number of bytes of one block that can be offloaded."""


def numbers(workload: Workload, parts: Parts, here: RankParts) -> Numbers:
    """Return the number of weights that a pipeline rank holds.

    On the embedding's rank, a tied head adds only the weights of its norm, and MTP modules share the embedding.
    """
    tied = workload.model.head.tied and here.embedding and here.head
    return _numbers(parts, here, parts.head.weights - workload.model.dim if tied else 0)


@lru_cache(1 << 14)
def _numbers(parts: Parts, here: RankParts, shared: int) -> Numbers:
    """`shared`: number of the head's weights that are shared with the embedding."""
    held = [(parts.blocks[kind], times) for kind, times in here.blocks]
    if here.embedding or (here.head and parts.ahead):
        held.append((parts.embedding, 1))
    dense = sum(part.weights * times for part, times in held) + (parts.output.dense - shared if here.head else 0)
    expert = sum(part.expert_weights * times for part, times in held) + (parts.output.expert if here.head else 0)
    return Numbers(float(dense), float(expert))


@lru_cache(1 << 14)
def _own(parts: Parts, here: RankParts) -> _Own:
    blocks = [(parts.blocks[kind], times) for kind, times in here.blocks]
    largest = max((block.weights + block.expert_weights for block, _ in blocks), default=0)
    if parts.segments is not None:
        found = [_segmented(parts, parts.segments, chunk) for chunk in here.chunks]
        saved = tuple(saved for saved, _ in found)
        # a segment keeps its input only, all of which can leave
        x = max((block.leaves for block, _ in blocks), default=0.0)
        return _Own(largest, saved, max((working for _, working in found), default=0.0), saved, (0.0,) * len(saved), x)
    return _Own(
        largest=largest,
        saved=tuple(sum(parts.blocks[kind].saved * times for kind, times in chunk) for chunk in here.chunks),
        working=max((block.working for block, _ in blocks), default=0.0),
        leaves=tuple(sum(parts.blocks[kind].leaves * times for kind, times in chunk) for chunk in here.chunks),
        for_disk=tuple(sum(parts.blocks[kind].leaves_for_disk * times for kind, times in chunk) for chunk in here.chunks),
        largest_leaves=max((block.leaves for block, _ in blocks), default=0.0),
    )


def _segmented(parts: Parts, segments: Segments, chunk: Chunk) -> tuple[float, float]:
    """Bytes that a microbatch keeps in a chunk's segments, and the largest additional bytes while a segment is recomputed. With several
    kinds of blocks, each segment is assumed to consist of the largest kind."""
    blocks = sum(times for _, times in chunk)
    if not blocks:
        return 0.0, 0.0
    inside = [segments.inside[kind] for kind, _ in chunk]
    x, size = max(parts.blocks[kind].saved for kind, _ in chunk), min(segments.size, blocks)
    again = size * max(block.saved for block in inside) - x + max(block.working for block in inside)
    return -(-blocks // segments.size) * x, again


def _graphed(workload: Workload) -> frozenset[int]:
    """Numbers of the blocks of which CUDA graphs launch a part; empty if graphs launch nothing or the whole step."""
    blocks = enumerate(workload.model.blocks)
    match workload.software_profile.graphs:
        case "parts":
            return frozenset(number for number, block in blocks if block.attention or block.mamba)
        case "router":
            return frozenset(number for number, block in blocks if isinstance(block.mlp, MoeSpec))
        case _:
            return frozenset()


def _recorded(parts: Parts, here: RankParts, flying: tuple[int, ...], graphed: frozenset[int]) -> float:
    """Bytes that CUDA graphs of parts of blocks keep: gradients of their inputs and outputs, as in torch.cuda.make_graphed_callables.
    Transformer Engine's graphs can share some gradients of inputs and outputs, but measurements agree with all of them being kept."""
    if not graphed:
        return 0.0
    recorded = [sum(parts.blocks[kind].output * times for kind, times in chunk if kind in graphed) for chunk in here.chunks]
    return 2 * sum(map(mul, flying, recorded))


def _outputs(workload: Workload, parts: Parts, here: RankParts, flying: tuple[int, ...]) -> float:
    """Bytes of the outputs of stages that software keeps after they were sent, in addition to what blocks keep."""
    if not workload.software_profile.keeps_outputs:
        return 0.0
    return sum(times * parts.blocks[chunk[-1][0]].output for times, chunk in zip(flying, here.chunks, strict=True) if chunk)


def _apart(workload: Workload, parts: Parts, here: RankParts, graphed: frozenset[int]) -> float:
    """Bytes of the temporary tensors of attention and Mamba-2 in CUDA graphs, whose memory pool nothing else may use."""
    if not graphed:
        return 0.0
    mixers = [
        parts.blocks[kind].working for kind, _ in here.blocks if kind in graphed and workload.model.blocks[kind].mlp is None
    ]
    return max(mixers, default=0.0)


def non_torch(workload: Workload) -> float:
    """Bytes of a rank outside of torch's allocator: context, a communicator for each axis, buffers of the experts' all-to-all. 0
    for devices that do not use NCCL, whose bytes are unknown."""
    plan, software_profile = workload.plan, workload.software_profile
    if workload.cluster.accelerator.vendor != "NVIDIA":
        return 0.0
    axes = [plan.dp_size, plan.tensor, plan.pipeline, plan.ulysses, plan.context // plan.ulysses]
    found = CONTEXT if workload.cluster.count > 1 else CONTEXT - PAIR
    found += ALL_TO_ALL * (plan.ulysses > 1)
    if plan.expert > 1:
        axes.append(line("expert_dp", workload).size)
        if software_profile.deduplicated:  # those of HybridEP: tokens of all near ranks, once to be sent and once to be added up
            near = min(plan.expert, workload.cluster.per_node)
            tokens = plan.microbatch * workload.seq_len // plan.context
            found += GROUP + 2 * near * tokens * workload.model.dim * workload.width
        else:
            found += ALL_TO_ALL
    return found + sum(GROUP if axis > 2 else PAIR for axis in axes if axis > 1)


def whole_bytes(workload: Workload, parts: Parts, here: RankParts) -> float:
    """Bytes of the weights that ZeRO 3 holds gathered at the same time: two blocks (the current and the next), or one module, which is at
    most a third of a block of three or more matrices. If the device keeps no other weights, the embedding or the head may be gathered
    instead of a block."""
    largest, (shards, _) = _own(parts, here).largest, workload.shards
    if workload.plan.zero == 3 and workload.plan.state.weights_away:
        return workload.width * (largest + max(largest, *ends(workload, parts, here, tiles=TILES)))
    gathered = 1.0 if shards > 1 else 1 - workload.lasting
    if workload.plan.zero != 3 or not gathered:
        return 0.0
    return workload.width * largest * gathered * (2 if workload.software_profile.gathers == "block" else 1 / 3)


def _state(workload: Workload, numbers: float, shards: int) -> tuple[float, float, float, float, float]:
    """Bytes of weights, gradients, optimizer, host memory and host disk for this number of parameters, as in ZeRO
    (Rajbhandari et al. 2019)."""
    zero, software_profile, state = workload.plan.zero, workload.software_profile, workload.plan.state
    weights = workload.width * workload.lasting * numbers / (shards if zero == 3 else 1)
    if workload.frozen:
        return weights, 0.0, 0.0, 0.0, 0.0
    gradients = workload.gradient_bytes * numbers / (shards if zero >= 2 else 1)
    own = numbers / (shards if zero >= 1 else 1)
    away = own * state.away
    if zero in (1, 2) and shards > 1 and (workload.halved or workload.width < software_profile.master_bytes):
        weights += workload.width * (
            own if workload.halved else away
        )  # what is gathered, where whole master weights are not at hand
    near = workload.state_bytes * (own - away) + workload.merged_bytes["device"] * own
    merged = workload.merged_bytes["host"] * own
    if state.optimizer == "disk":
        return weights, gradients, near, merged, DISK_SLOTS * workload.state_bytes * away
    return weights, gradients, near, merged + host.held(workload, away), 0.0
