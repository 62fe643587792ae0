"""Prediction of the figures that a dry run of one rank counts, from traced parts and the rank's program: bytes by category, calls and
bytes of collectives by axis, FLOPs. The figures have the names that `prove.meter` uses. Imports torch only to trace parts."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import chain
from typing import Any

from megalith.cost.constants import Calibration, calibration
from megalith.cost.gathered import gathered, kept, wide
from megalith.cost.host import move_seconds, on_disk, streamed
from megalith.cost.memory import Memory, by_rank, compared_bytes, non_torch, numbers, shares, updated, whole_bytes
from megalith.cost.memory_timeline import DOES, MemoryPoint, OffloadedBytes, Part, moments
from megalith.cost.narrow.ways import rounding_bytes
from megalith.cost.parts import Numbers, Parts, parts
from megalith.cost.profile import PHASES, Core, Phase, Profile
from megalith.cost.segments import decided
from megalith.cost.software import TRAINER
from megalith.cost.update import rest_bytes
from megalith.cost.workload import Workload, computed
from megalith.mesh import Mesh
from megalith.schedule import build, lower
from megalith.schedule.action import Action, Schedule, computations
from megalith.schedule.action import parts as actions_of
from megalith.schedule.lower import Program
from megalith.spec import cluster as clusters
from megalith.spec.plan import segments
from megalith.spec.run import RunSpec
from megalith.spec.sites import outer_slots, within
from megalith.spec.state import DISK_SLOTS
from megalith.spec.treatment import copied_each_step, table_kinds

KINDS = {"gather": "all-gather", "scatter": "reduce-scatter", "sum": "all-reduce", "all_to_all": "all-to-all"}
"""Kind of exchange in a profile -> the collective under which a dry run counts it. A ring is counted as sends and receives."""

WIDE = 4
"""Bytes of a number in fp32."""


@dataclass(frozen=True)
class Traffic:
    """Calls of one collective along one axis in a step. `bytes`: the bytes of the whole tensors, summed over the calls."""

    kind: str
    axis: str
    calls: int
    bytes: float


@dataclass(frozen=True)
class Work:
    """FLOPs of one rank's step by kind: masked attention scores are not counted, but recomputation is counted."""

    products: float
    attention: float


@dataclass(frozen=True)
class PredictedStep:
    """One rank's step. `memory`: bytes by category at the peak. `elsewhere`: bytes of offloaded state and activations, by
    tier."""

    memory: dict[str, float]
    traffic: tuple[Traffic, ...]
    work: Work
    elsewhere: dict[str, float]


@dataclass(frozen=True)
class Comparison:
    """One compared figure, such as "memory.weights", "traffic.tensor.all-gather.bytes" or "work.products". `predicted` is None for a figure
    that is not predicted."""

    name: str
    predicted: float | None
    counted: float

    @property
    def gap(self) -> float | None:
        """Relative excess of the prediction over the count; None if either is missing."""
        return None if self.predicted is None or not self.counted else self.predicted / self.counted - 1

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "gap": self.gap}


@dataclass(frozen=True)
class _Here:
    """A pipeline rank's program, and the profiles and buckets of weights of each of its stages."""

    actions: tuple[Action, ...]
    stages: dict[int, tuple[Profile, ...]]
    parts: dict[int, tuple[Part, ...]]
    weights: dict[int, tuple[Numbers, ...]]
    gathered: dict[int, tuple[Numbers, ...]]
    """Bytes of the stage's buckets in a gather."""
    kept: float
    """Bytes of rounded weights that are kept until the end of the step, for all gathers of the step"""
    segments: dict[int, tuple[tuple[int, ...], ...]]
    """The blocks of each segment, by their numbers in the model."""


def predict(workload: Workload, *, rank: int, figures: Calibration | None = None) -> PredictedStep:
    """Predict memory, traffic and FLOPs of `rank` of the workload's plan in a step."""
    traced = parts(workload)
    place = Mesh.of(workload.plan).coordinates(rank)["pipeline"]
    here = _here(workload, traced, place)
    return PredictedStep(
        memory=_memory(workload, traced, here, place, figures or calibration()),
        traffic=tuple(sorted(_traffic(workload, traced, here), key=lambda one: (one.axis, one.kind))),
        work=_work(here, passes=workload.passes),
        elsewhere=_elsewhere(workload, traced, here, place),
    )


def held(
    workload: Workload, figures: Calibration | None = None, *, fits: Callable[[Memory], bool] = lambda memory: True
) -> Memory:
    """Return the peak memory of the worst rank over the trainer's program, including memory that torch does not report; or, if `fits` is
    False for the memory of a rank, that of the first such rank.

    The result has the categories of a dry run. The program has the smallest representative number of microbatches. `host` and `disk` only
    count offloaded activations, not state.
    """
    figures, plan = figures or calibration(), workload.plan
    few = replace(workload, global_batch=workload.representative_microbatches * plan.data * plan.microbatch)
    traced, overheads = parts(few), figures.overheads[workload.software_profile.overheads]
    outside = non_torch(workload) + overheads.reserve
    rounding = rounding_bytes(workload, traced)  # a dry run is on a processor, which has no such copies

    def of(place: int) -> Memory:
        here = _here(few, traced, place)
        found, waiting = _memory(few, traced, here, place, figures), _waiting(few, traced, here)
        return Memory(
            weights=found["weights"], gradients=found["gradients"], optimizer=found["optimizer"], activations=found["activations"],
            working=found["buffers"] + rounding, logits=0.0, reserve=0.0, non_torch=outside, rank=place,
            host=waiting.get("host", 0.0), disk=waiting.get("disk", 0.0),
        )  # fmt: skip

    found: list[Memory] = []
    for place in shares(few, traced).worst_ranks:
        found.append(of(place))
        if not fits(found[-1]):
            return found[-1]
    return max(found, key=lambda memory: memory.total)


def transfer_seconds(workload: Workload) -> dict[int, float]:
    """Return, for each stage from which activations leave, the seconds of one OFFLOAD or one FETCH: the transfer of the stage's last block
    that is offloaded. The other blocks of the stage are transferred during its forwards and backwards."""
    traced, found = parts(workload), dict[int, float]()
    for place in range(workload.plan.pipeline):
        for stage, own in _here(workload, traced, place).parts.items():
            last = next((part.away for part in reversed(own) if part.away.size), None)
            if last is not None:
                found[stage] = move_seconds(workload, last.size, last.disk)
    return found


def workload_of(spec: RunSpec) -> Workload:
    """Return the workload of a step of a run by Megalith's trainer. For cluster = "local", a CPU is assumed, because memory, traffic and
    FLOPs do not depend on the kind of device."""
    named = spec.cluster if spec.cluster != "local" else f"cpu:{spec.plan.ranks}"
    model, train, optimizer = spec.model.build(), spec.train, spec.optimizer
    cluster, batch = clusters.load(named), within(spec).train.global_batch
    format, narrow = computed(train.precision, spec.precision)
    rules = {
        "optimizer": optimizer.kind,
        "tables": table_kinds(optimizer),
        "moments": optimizer.small,
        "master": optimizer.master,
        "gradients": train.gradients,
        "outer": outer_slots(spec.sites),
        "narrow": narrow,
        "vocab_tile": train.vocab_tile,
        "copied": copied_each_step(spec),
    }
    return decided(Workload(model, spec.plan, cluster, train.seq_len, batch, format, TRAINER, **rules))


def _here(workload: Workload, traced: Parts, place: int) -> _Here:
    plan, model = workload.plan, workload.model
    retained = plan.retained(len(model.blocks))
    schedule, program = _program(plan.schedule, plan.pipeline, workload.microbatches, plan.chunks, plan.zero, retained)
    row = program.rows[place]
    parts = (traced.embedding, *traced.blocks)
    profiles = *((part,) for part in parts), _head(traced)
    # the embedding of multi-token prediction is kept once, but sent for the head too, apart from what no other stage has
    output = (traced.output, Numbers(traced.embedding.weights, 0)) if traced.ahead else (traced.output,)
    weights = *((Numbers(part.weights, part.expert_weights),) for part in parts), output
    numbers = None, *range(len(traced.blocks)), None
    each = [tuple(gathered(workload, one, number) for one in part) for part, number in zip(profiles, numbers, strict=True)]
    ends = (tuple(wide(workload, one) for one in weights[end]) for end in (0, -1))
    sent = next(ends), *each[1:-1], next(ends)
    own = {stage: slice(*plan.bounds(len(model.blocks))[stage]) for stage in schedule.stages_of(place)}
    cut = {stage: _segments(traced, where) for stage, where in own.items()}
    away = {stage: _away(workload, traced, numbers[where], cut[stage]) for stage, where in own.items()}
    return _Here(
        actions=tuple(action for slot in row for action in actions_of(slot)),
        stages={stage: tuple(chain(*profiles[where])) for stage, where in own.items()},
        parts={
            stage: tuple(map(partial(_part, workload), numbers[where], profiles[where], weights[where], sent[where], away[stage]))
            for stage, where in own.items()
        },
        weights={stage: tuple(chain(*weights[where])) for stage, where in own.items()},
        gathered={stage: tuple(chain(*sent[where])) for stage, where in own.items()},
        kept=sum(
            kept(workload, traced.blocks[number], number)
            for where in own.values()
            for number in numbers[where]
            if number is not None
        ),
        segments=cut,
    )


def _away(
    workload: Workload, traced: Parts, numbers: Sequence[int | None], cut: tuple[tuple[int, ...], ...]
) -> tuple[OffloadedBytes, ...]:
    """Bytes that are offloaded in each part of a stage: only blocks are offloaded, and of each segment that is recomputed
    as a whole, only the input of its first block."""
    retain, inside = workload.plan.retain, {number for run in cut for number in run[1:]}
    leaving = (None if number is None or number in inside or not retain.leaves(number) else number for number in numbers)
    blocks = (None if number is None else traced.blocks[number] for number in leaving)
    return tuple(
        OffloadedBytes(block.leaves, on_disk(workload, block.leaves, block.leaves_for_disk)) if block else OffloadedBytes()
        for block in blocks
    )


@lru_cache(maxsize=64)
def _program(
    schedule: str, ranks: int, microbatches: int, chunks: int, zero: int, retained: frozenset[int]
) -> tuple[Schedule, Program]:
    """Return a schedule and its program, cached because a search asks for the same few programs often."""
    built = build(schedule, ranks=ranks, microbatches=microbatches, chunks=chunks)
    return built, lower(built, zero, retained=retained)


def _segments(traced: Parts, where: slice) -> tuple[tuple[int, ...], ...]:
    """The segments of the stage whose parts are in the slice `where`. Part 0 is the embedding, and part 1 is block 0."""
    numbers = range(len(traced.blocks) + 2)[where]
    size = traced.segments.size if traced.segments else 0
    cut = segments([0 < number <= len(traced.blocks) for number in numbers], size)
    return tuple(tuple(numbers[at] - 1 for at in run) for run in cut)


def _part(
    workload: Workload,
    block: int | None,
    profiles: tuple[Profile, ...],
    weights: Sequence[Numbers],
    sent: Sequence[Numbers],
    away: OffloadedBytes,
) -> Part:
    """Return a part with the sums over its buckets of weights."""
    whole, bytes = (Numbers(*map(sum, zip(*each, strict=True))) for each in (weights, sent))
    return Part(block, profiles, whole, bytes, away, workload.cut if block is None else 0)


def _head(traced: Parts) -> tuple[Profile, ...]:
    """The head's profiles; with multi-token prediction, also a block and the output for each depth."""
    if traced.ahead is None:
        return (traced.head,)
    return traced.head, *(traced.ahead, traced.head) * traced.depth


def _memory(workload: Workload, traced: Parts, here: _Here, place: int, figures: Calibration) -> dict[str, float]:
    """Return memory by the categories of a dry run: persistent state as in `cost.memory`, where the optimizer's copy of the weights
    counts as weights; other memory at the peak of the program."""
    plan, software_profile = workload.plan, workload.software_profile
    (found,) = by_rank(workload, traced, figures.overheads[software_profile.overheads], [place])
    held = shares(workload, traced).held[place]
    lasting = found.weights - whole_bytes(workload, traced, held)
    own = updated(workload, numbers(workload, traced, held)) * workload.master_bytes
    more = rest_bytes(workload, traced, held, "weights") * (1 - plan.state.away)
    if workload.width < WIDE:
        near = own * (1 - plan.state.away)
        weights, optimizer = lasting + near + more, found.optimizer - near
    else:  # a share is kept beside the whole weights, unless it is all of them
        apart = plan.zero in (1, 2) and plan.dp_shard > 1
        weights, optimizer = lasting + apart * own, found.optimizer
    peak = max(_moments(workload, traced, here), key=lambda moment: moment.total)
    gradients = peak.gradients + compared_bytes(workload, numbers(workload, traced, held))
    return {
        "weights": weights + peak.weights,
        "gradients": gradients,
        "optimizer": optimizer,
        "activations": peak.activations,
        "buffers": peak.buffers + here.kept + streamed(workload),
    }


def _moments(workload: Workload, traced: Parts, here: _Here) -> Iterator[MemoryPoint]:
    return moments(workload, traced, here.actions, here.parts, here.segments)


def _elsewhere(workload: Workload, traced: Parts, here: _Here, place: int) -> dict[str, float]:
    """Bytes in the host's memory or on its disk: state, and the peak of offloaded activations."""
    state, found = workload.plan.state, _waiting(workload, traced, here)
    held = shares(workload, traced).held[place]
    if merged := workload.merged_bytes["host"] * updated(workload, numbers(workload, traced, held)):
        found["host"] = found.get("host", 0.0) + merged
    if state.away:
        kept = updated(workload, numbers(workload, traced, held)) * workload.state_bytes + rest_bytes(workload, traced, held)
        kept += rest_bytes(workload, traced, held, "weights")
        kept *= state.away * (DISK_SLOTS if state.optimizer == "disk" else 1)
        found[state.optimizer] = found.get(state.optimizer, 0.0) + kept
    return found


def _waiting(workload: Workload, traced: Parts, here: _Here) -> dict[str, float]:
    """Peak bytes of offloaded activations, by the tier that holds them (`plan.retain`)."""
    if not workload.plan.retain.places:
        return {}
    points = [moment.elsewhere for moment in _moments(workload, traced, here)]
    most = {"host": max(one.size - one.disk for one in points), "disk": max(one.disk for one in points)}
    return {place: most[place] for place in workload.plan.retain.places}


def _traffic(workload: Workload, traced: Parts, here: _Here) -> Iterator[Traffic]:
    """Yield all traffic except single numbers (the norm, the loss, and requests to stop), in all passes over the step."""
    calls: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for axis, kind, times, size in (*_exchanges(workload, here), *_messages(workload, here), *_state(workload, traced, here)):
        if times and size:
            calls[axis, kind] += times * workload.passes
            sizes[axis, kind] += times * workload.passes * size  # pyright: ignore[reportArgumentType]  # bytes of a share may be broken numbers
    return (Traffic(kind, axis, calls[axis, kind], float(sizes[axis, kind])) for axis, kind in calls)


Sent = tuple[str, str, int, float]
"""Axis, kind, calls, bytes of one call."""


def _exchanges(workload: Workload, here: _Here) -> Iterator[Sent]:
    """Yield the messages that modules send during their forward or backward."""
    for stage, times in _times(here).items():
        for profile in here.stages[stage]:
            for one in profile.exchanges:
                count = one.times * times[one.phase]
                if one.kind == "ring":
                    hops = workload.plan.context // workload.plan.ulysses - 1
                    yield from (("context", kind, count * hops, one.size) for kind in ("receive", "send"))
                else:
                    yield one.axis, KINDS[one.kind], count, one.size


def _times(here: _Here) -> dict[int, Counter[Phase]]:
    found: dict[int, Counter[Phase]] = {stage: Counter() for stage in here.stages}
    for action in computations(here.actions):
        found[action.stage].update(DOES[action.kind])
    return found


def _messages(workload: Workload, here: _Here) -> Iterator[Sent]:
    """Yield activations and gradients between stages. A tensor rank with a share of the sequence sends only this share."""
    plan = workload.plan
    split = plan.context * (plan.tensor if plan.sequence else 1)
    size = plan.microbatch * workload.seq_len // split * workload.model.dim * workload.width
    kinds = Counter(action.kind.partition("_")[0] for action in here.actions)
    yield "pipeline", "send", kinds["SEND"], size
    yield "pipeline", "receive", kinds["RECV"], size


def _state(workload: Workload, traced: Parts, here: _Here) -> Iterator[Sent]:
    """Yield gathers of weights and reductions of gradients, part by part, for dense weights and for experts' weights."""
    mesh = Mesh.of(workload.plan)
    kinds = Counter((action.kind, action.stage) for action in here.actions if action.kind in ("GATHER", "REDUCE"))
    moved = [
        (kind, times, (here.gathered if kind == "GATHER" else here.weights)[stage]) for (kind, stage), times in kinds.items()
    ]
    if workload.plan.zero == 3:
        moved += [("GATHER", _times(here)[stage]["I"], _gathered_again(workload, traced, here, stage)) for stage in here.stages]
    for kind, times, weights in moved:
        for part in weights:
            for names, count, (copies, shards) in (
                (("dp_replicate", "dp_shard"), part.dense, mesh.state[1:3]),
                (("expert dp_replicate", "expert dp_shard"), part.expert, mesh.experts[1:3]),
            ):
                if kind == "GATHER" and shards > 1:
                    yield names[1], "all-gather", times, count
                if kind == "REDUCE" and shards > 1:
                    yield names[1], "reduce-scatter", times, count * workload.gradient_bytes
                if kind == "REDUCE" and copies > 1:
                    yield names[0], "all-reduce", times, count * workload.gradient_bytes / shards


def _gathered_again(workload: Workload, traced: Parts, here: _Here, stage: int) -> tuple[Numbers, ...]:
    """Bytes that ZeRO 3 gathers once more in each backward: the weights of all blocks of a segment except the last, whose backward
    directly follows its recomputation."""
    return tuple(gathered(workload, traced.blocks[number], number) for run in here.segments[stage] for number in run[:-1])


def _work(here: _Here, *, passes: int) -> Work:
    products = attention = 0.0
    for stage, times in _times(here).items():
        for profile in here.stages[stage]:
            for phase in PHASES:
                products += times[phase] * sum(one.flops for one in profile.products if one.phase == phase)
                attention += times[phase] * sum(_unmasked(one) for one in profile.cores if one.phase == phase)
    return Work(passes * products, passes * attention)


def _unmasked(core: Core) -> float:
    """FLOPs of unmasked pairs: a query attends to itself and to earlier tokens. Context ranks divide the unmasked pairs evenly."""
    return core.flops * (core.keys + 1) / (2 * core.keys)
