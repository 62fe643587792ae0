"""Prediction of a workload's step: memory of the worst rank, and seconds by purpose. Imports torch only to trace parts."""

from collections import Counter
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from math import log2
from typing import Any

from megalith.cost import host, network, update
from megalith.cost.constants import Calibration, calibration
from megalith.cost.gathered import widths
from megalith.cost.kept import kept
from megalith.cost.memory import Memory, RankParts, fits, memory, numbers, shares, updated
from megalith.cost.narrow.ways import Ways
from megalith.cost.network import gather
from megalith.cost.parts import Parts, parts
from megalith.cost.profile import Phase, Profile
from megalith.cost.time import Setting, SpentSeconds, line, router_of, spend
from megalith.cost.workload import Workload
from megalith.mesh import Mesh
from megalith.schedule import build, lower, simulate
from megalith.schedule.table import SCHEDULES, kind
from megalith.spec.numbers import PRECISIONS
from megalith.spec.optimizers import OPTIMIZERS
from megalith.spec.treatment import why_not_ahead


@dataclass(frozen=True)
class Time:
    """Seconds of a step by purpose; they add up to `step`."""

    step: float
    compute: float
    """Forward and backward of the worst rank: products, attention, element-wise work, and waits for the host."""
    tensor: float
    context: float
    expert: float
    pipeline: float
    """Seconds of messages between stages that are not hidden by computation."""
    data: float
    """Exposed gathers of weights, reductions of gradients, and transfers of activations to the host and back."""
    bubble: float
    optimizer: float
    other: float

    def __mul__(self, factor: float) -> "Time":
        return Time(*(factor * seconds for seconds in vars(self).values()))

    @property
    def exposed(self) -> float:
        """Communication that nothing hides."""
        return self.tensor + self.context + self.expert + self.pipeline + self.data


@dataclass(frozen=True)
class Estimate:
    """Prediction for one workload."""

    time: Time
    memory: Memory
    fits: bool
    limit: float | None
    """Bytes of the device's memory; None if not published."""
    flops: float
    """FLOPs of a step on all ranks: attention in full, recomputation not counted (PaLM's convention)."""
    tokens: int
    devices: int
    peak: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second for each device."""
        return self.tokens / self.time.step / self.devices

    @property
    def flops_per_second(self) -> float:
        """FLOP/s for each device."""
        return self.flops / self.time.step / self.devices

    @property
    def mfu(self) -> float:
        """Model FLOP/s divided by the devices' bf16 peak."""
        return self.flops_per_second / self.peak

    def to_json(self) -> dict[str, Any]:
        """Every figure by name."""
        names = ("tokens_per_second", "flops_per_second", "mfu")
        return asdict(self) | {name: getattr(self, name) for name in names} | {"memory_total": self.memory.total}


@dataclass(frozen=True)
class StageTime:
    """Seconds of one microbatch on one pipeline rank, over all its chunks."""

    forward: SpentSeconds
    backward: SpentSeconds

    @cached_property
    def total(self) -> float:
        return self.forward.total + self.backward.total

    @property
    def whole(self) -> SpentSeconds:
        """Forward and backward together."""
        return self.forward + self.backward


def estimate(
    workload: Workload,
    figures: Calibration | None = None,
    traced: Parts | None = None,
    space: Memory | None = None,
    spent: "PartTimes | None" = None,
) -> Estimate:
    """Predict one step. `traced`, `space` and `spent` are known results, which need not be computed again."""
    figures = figures or calibration()
    traced = traced or parts(workload)
    setting = Setting.of(workload, figures)
    space = space or memory(workload, traced, setting.overheads)
    return Estimate(
        time=step_time(workload, setting, traced, spent or part_times(traced, setting)),
        memory=space,
        fits=fits(workload, space, setting.overheads),
        limit=workload.cluster.accelerator.memory,
        flops=model_flops(workload, traced),
        tokens=workload.tokens,
        devices=workload.cluster.count,
        peak=workload.cluster.accelerator.wide,
    )


@dataclass(frozen=True, eq=False)  # told by identity, as `cost.parts.Parts`
class PartTimes:
    """Seconds of each part: (forward, backward)."""

    embedding: tuple[SpentSeconds, SpentSeconds]
    head: tuple[SpentSeconds, SpentSeconds]
    blocks: tuple[tuple[SpentSeconds, SpentSeconds], ...]


def part_times(traced: Parts, setting: Setting) -> PartTimes:
    """Return the seconds of each part. Equal blocks are computed once."""
    format, router = setting.workload.format, router_of(setting.workload)
    wide = PRECISIONS[format].compute.name  # of embedding and head, which no narrow format multiplies
    after: tuple[Phase, ...] = ("I",) if setting.workload.frozen else ("I", "W")
    known: dict[tuple[int, tuple[str, ...]], tuple[SpentSeconds, SpentSeconds]] = {}

    def both(profile: Profile, kind: str, layers: tuple[str, ...] = ()) -> tuple[SpentSeconds, SpentSeconds]:
        if (key := (id(profile), layers)) not in known:
            first: tuple[Phase, ...] = ("F",)
            rules = {"format": kind, "router": router, "ways": Ways.of(setting.workload, profile, layers)}
            forward, backward = (spend(profile, phases, setting, **rules) for phases in (first, after))
            known[key] = forward, backward
        return known[key]

    head = both(traced.head, wide)
    if traced.ahead is not None:
        extra = both(traced.ahead, format)
        head = head[0] + (extra[0] + head[0]) * traced.depth, head[1] + (extra[1] + head[1]) * traced.depth
    narrow = traced.narrow or ((),) * len(traced.blocks)
    blocks = tuple(both(block, format, layers) for block, layers in zip(traced.blocks, narrow, strict=True))
    return PartTimes(both(traced.embedding, wide), head, blocks)


@lru_cache(1 << 14)
def stage_time(here: RankParts, spent: PartTimes, *, sides: int = 1) -> StageTime:
    """Return a pipeline rank's seconds for one microbatch. With `sides` copies of each stage, each copy computes 1 / `sides`
    of the microbatches."""
    mine = [(*spent.blocks[kind], times) for kind, times in here.blocks]
    mine += [(*spent.embedding, 1)] if here.embedding else []
    mine += [(*spent.head, 1)] if here.head else []
    forward, backward = SpentSeconds(), SpentSeconds()
    for f, b, times in mine:
        share = times / sides
        forward, backward = (forward + f, backward + b) if share == 1 else (forward + f * share, backward + b * share)
    return StageTime(forward, backward)


def step_time(workload: Workload, setting: Setting, traced: Parts, spent: PartTimes) -> Time:
    """Return the seconds of a step on its slowest rank."""
    plan, overheads, shared = workload.plan, setting.overheads, shares(workload, traced)
    m, ranks, passes = workload.microbatches, shared.held, workload.passes
    stages = [stage_time(here, spent, sides=plan.sides) for here in ranks]
    slowest = max(range(len(stages)), key=lambda rank: stages[rank].total)
    busy = stages[slowest].whole * m * passes
    sent = _message_seconds(workload, setting)
    bubble = passes * _bubble(workload, stages, slowest, sent)
    messages = passes * 2 * sent * m * plan.chunks * overheads.message_exposed if plan.pipeline > 1 else 0.0
    some = {0, slowest, len(ranks) - 1}
    data = passes * max(_data_seconds(workload, setting, traced, ranks[rank], stages[rank]) for rank in some)
    data += passes * max(_retained_seconds(workload, setting, traced, ranks[rank], stages[rank]) for rank in some)
    optimizer = max(_optimizer_seconds(workload, setting, traced, ranks[rank], stages[rank]) for rank in some)
    subtotal = busy.total + bubble + messages + data + optimizer
    straggling = subtotal * overheads.straggle * log2(max(1, workload.cluster.nodes))
    other = overheads.step + straggling
    return Time(
        step=subtotal + other,
        compute=busy.products + busy.attention + busy.memory + busy.host,
        tensor=busy.tensor, context=busy.context, expert=busy.expert,
        pipeline=messages, data=data, bubble=bubble, optimizer=optimizer, other=other,
    )  # fmt: skip


def busy_seconds(workload: Workload, traced: Parts, spent: PartTimes) -> float:
    """Return the seconds that the slowest rank computes in a step: a lower bound of the step."""
    ranks = dict.fromkeys(shares(workload, traced).held)
    longest = max(stage_time(here, spent, sides=workload.plan.sides).whole.total for here in ranks)
    return longest * workload.microbatches * workload.passes


def _message_seconds(workload: Workload, setting: Setting) -> float:
    plan = workload.plan
    if plan.pipeline == 1:
        return 0.0
    tokens = plan.microbatch * workload.seq_len / plan.context / plan.tensor  # ranks send a share each
    return network.message(tokens * workload.model.dim * 2, line("pipeline", workload), setting.wires)


def _bubble(workload: Workload, stages: list[StageTime], slowest: int, sent: float) -> float:
    """Return the idle seconds of the slowest rank in a step.

    Schedules that fill and drain have a closed form (Narayanan et al. 2021): the sum over all other ranks of the time for one microbatch,
    divided by `chunks`, plus messages; with equal stages, (p - 1) / chunks of a rank's time for one microbatch. For other schedules, all
    stages are assumed to take the mean time.
    """
    plan = workload.plan
    others = sum(stage.total for rank, stage in enumerate(stages) if rank != slowest)
    if kind(plan.schedule).fills_and_drains:
        return others / plan.chunks + 2 * (plan.pipeline - 1) * sent
    few = workload.representative_microbatches
    forward = sum(stage.forward.total for stage in stages) / len(stages)
    backward = sum(stage.backward.total for stage in stages) / len(stages)
    return _idle(plan.schedule, plan.pipeline, few, plan.chunks, round(backward / forward, 1)) * forward


@kept("schedule/*.py", "cost/estimate.py", when=lambda name, *_: name in SCHEDULES)
def _idle(name: str, ranks: int, microbatches: int, chunks: int, backward: float) -> float:
    """Return the idle time of a rank, in units of its forward of one microbatch. Both halves of a backward are assumed to
    take equal time. A schedule without a closed form is simulated."""
    row = kind(name)
    known = row.idle(ranks, microbatches, chunks, backward) if row.idle else None
    if known is not None:
        return known
    program = lower(build(name, ranks=ranks, microbatches=microbatches, chunks=chunks), 0)
    per_stage = len(program.schedule.stages_of(0)) // (2 if row.bidirectional else 1)
    seconds = {"F": 1.0, "B": backward, "I": backward / 2, "W": backward / 2}
    timeline = simulate(program, {kind: value / per_stage for kind, value in seconds.items()})
    return timeline.end - max(timeline.busy)


def _data_seconds(workload: Workload, setting: Setting, traced: Parts, here: RankParts, stage: StageTime) -> float:
    """Return the seconds that gathers and reductions add to a step of one rank."""
    plan, software_profile = workload.plan, workload.software_profile
    if workload.frozen or (plan.dp_size == 1 and not plan.state.weights_away):
        return 0.0
    dense, expert = numbers(workload, traced, here)
    whole, own = line("dp", workload), line("expert_dp", workload)
    shards = network.Line(plan.dp_shard, whole.stride) if plan.zero else whole
    copies = Mesh.of(plan).experts[1] if plan.zero else 1
    expert_shards = network.Line(max(1, own.size // copies), own.stride)
    wires, m, width = setting.wires, workload.microbatches, widths(workload, traced)
    blocks = sum(times for _, times in here.blocks)
    calls = blocks * (6 if software_profile.gathers == "module" else 1) if plan.zero >= 2 else _buckets(dense, shards.size)

    def moved(of_dense: float, of_expert: float) -> float:
        every = gather(of_dense * dense, shards, wires, calls=calls)
        return every + gather(of_expert * expert, expert_shards, wires, calls=calls)

    reductions, gathers = moved(workload.gradient_bytes, workload.gradient_bytes), moved(*width)
    if plan.zero and plan.dp_replicate > 1:  # and the shards' sums over the groups
        across = network.Line(plan.dp_replicate, whole.stride * plan.dp_shard)
        reductions += network.reduce(workload.gradient_bytes * dense / plan.dp_shard, across, wires, calls=calls)
        across = network.Line(copies, own.stride * expert_shards.size)
        reductions += network.reduce(workload.gradient_bytes * expert / expert_shards.size, across, wires, calls=calls)
    forward, backward = stage.forward.total, stage.backward.total
    if plan.zero == 0:
        summed = network.reduce(workload.gradient_bytes * dense, whole, wires, calls=calls)
        summed += network.reduce(workload.gradient_bytes * expert, own, wires, calls=calls)
        return _beside(summed, backward, setting)
    if plan.zero == 3:
        size = traced.segments.size if traced.segments else 1
        again = 2 - 1 / size  # a segment's weights once more, but for its last block's
        late = host.read_seconds(workload, dense / shards.size + expert / expert_shards.size)
        if plan.state.weights == "disk":  # a thread reads ahead, and messages are sent where they are needed
            late, gathers = gathers, late
        beside = _beside(gathers, forward, setting) + _beside(again * gathers + reductions, backward, setting)
        return m * (beside + (1 + again) * late)
    if plan.zero == 2:
        times = workload.reductions
        return times * _beside(reductions, backward * m / times, setting) + _beside(gathers, forward, setting)
    if software_profile.gathers == "rank":
        return _beside(reductions, backward, setting) + gather(width.dense * dense, shards, wires, calls=shards.size)
    return _beside(reductions, backward, setting) + _beside(gathers, forward, setting)


def _retained_seconds(workload: Workload, setting: Setting, traced: Parts, here: RankParts, stage: StageTime) -> float:
    """Return the seconds that offloading of activations adds to a step of one rank. If transfers take longer than computation, two
    transfers of the last block overlap: the backward fetches its first tensors while its last tensors still leave. A block that keeps
    only its input has one tensor, so nothing overlaps."""
    plan, away = workload.plan, workload.plan.retain.away
    if not away or not here.blocks:
        return 0.0
    away /= (traced.segments.size if traced.segments else 1) * plan.sides
    size = away * sum(traced.blocks[kind].leaves * times for kind, times in here.blocks)
    for_disk = away * sum(traced.blocks[kind].leaves_for_disk * times for kind, times in here.blocks)
    moving = host.move_seconds(workload, size, for_disk)
    both = [_beside(moving, computing.total, setting) for computing in (stage.forward, stage.backward)]
    longer = moving * (1 - setting.overheads.data_exposed) - max(stage.forward.total, stage.backward.total)
    overlap = 0.0
    if plan.recompute == "none" and longer > 0:
        last = traced.blocks[here.blocks[-1][0]]
        one = host.move_seconds(workload, last.leaves / plan.sides, last.leaves_for_disk / plan.sides)
        overlap = min(one, longer)
    return workload.microbatches * (sum(both) - overlap)


def _buckets(numbers: float, ranks: int) -> float:
    """Return the number of calls that reduce gradients: buckets have 40 million elements, or, with more than 40 ranks, a million for each
    rank (Megatron-Core's rule, which keeps messages long)."""
    return max(1.0, numbers / max(40e6, 1e6 * ranks))


def _beside(moving: float, computing: float, setting: Setting) -> float:
    """Return exposed communication, the seconds added to `computing`: all of `moving`; or, if they overlap, the part longer than
    `computing`, the part that cannot overlap (the first gather, the last reduction), and the slowdown of the computation."""
    if not setting.workload.software_profile.overlap_data:
        return moving
    overheads = setting.overheads
    never = overheads.data_exposed * moving
    hidden = min(moving - never, computing)
    return never + max(0.0, moving - never - computing) + overheads.contention * hidden


def _optimizer_seconds(workload: Workload, setting: Setting, traced: Parts, here: RankParts, stage: StageTime) -> float:
    """Return the exposed seconds of the update: of the state on the device, then of the state off the device, unless a backward or forward
    hides it (`_hidden_update`)."""
    if workload.frozen:
        return 0.0
    own = updated(workload, numbers(workload, traced, here))
    away = own * workload.plan.state.away
    moved = OPTIMIZERS[workload.optimizer].moved_with(workload.moments)
    each = setting.overheads.optimizer * moved / OPTIMIZERS["adamw"].moved  # measured with AdamW
    whole = update.seconds(workload, setting, here)
    offloaded = host.seconds(workload, away)
    offloaded -= _hidden_update(workload, offloaded, here, stage) if offloaded else 0.0
    return each * (own - away) / setting.bandwidth + offloaded + whole


def _hidden_update(workload: Workload, seconds: float, here: RankParts, stage: StageTime) -> float:
    """Return the seconds of an update of state off the device that computation hides. If gradients are released, the backward hides the
    update of all parts but the last. Otherwise the first microbatch's forward hides that of all parts but two: the part that it begins
    with, and the next one, whose gather begins as early. An update in host memory is not hidden if a CPU computes, or if the state is
    copied after each step."""
    plan, parts = workload.plan, here.embedding + here.head + sum(times for _, times in here.blocks)
    shared = plan.state.optimizer == "host" and workload.cluster.accelerator.kind == "cpu"
    if plan.state.release:
        return 0.0 if shared else min(seconds * (1 - 1 / parts), stage.backward.total * workload.microbatches)
    busy = shared or (plan.state.optimizer == "host" and workload.copied)
    if busy or not workload.software_profile.ours or why_not_ahead(plan, [workload.optimizer]):
        return 0.0
    if plan.zero and kind(plan.schedule).bidirectional:  # all parts are gathered before the first forward
        return 0.0
    return min(seconds * max(0.0, 1 - 2 / parts), stage.forward.total)


def model_flops(workload: Workload, traced: Parts) -> float:
    """Return the model FLOPs of a step: the FLOPs of forward, and twice as many for backward."""
    plan = workload.plan
    return 3 * _forward_flops(traced) * plan.tensor * plan.context * workload.global_batch / plan.microbatch


@lru_cache(1 << 14)
def _forward_flops(traced: Parts) -> float:
    counts = Counter(traced.kinds)
    blocks = sum(times * traced.blocks[kind].flops("F") for kind, times in counts.items())
    head = traced.head.flops() / 3  # a chunked loss forms the gradients in forward
    if traced.ahead is not None:
        blocks += traced.ahead.flops("F") * traced.depth
        head *= 1 + traced.depth
    return blocks + head
