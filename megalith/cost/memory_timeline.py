"""Memory of one rank during its program, without persistent state. Activations that are offloaded (`plan.retain`) are counted separately.
No torch."""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import NamedTuple

from megalith.cost import released
from megalith.cost.gathered import TILES
from megalith.cost.parts import Numbers, Parts
from megalith.cost.profile import Phase, Profile
from megalith.cost.update import opened_bytes
from megalith.cost.workload import Workload
from megalith.mesh import Mesh
from megalith.schedule.action import Action
from megalith.schedule.lower import BACKWARDS, WEIGHT_GRADIENTS

DOES: dict[str, tuple[Phase, ...]] = {"F": ("F",), "B": ("I", "W"), "I": ("I",), "W": ("W",)}
"""Kind of computation in a schedule -> phases of a profile that it runs."""


class OffloadedBytes(NamedTuple):
    """Bytes that are offloaded from the device."""

    size: float = 0.0
    disk: float = 0.0
    """Bytes that are offloaded to disk. Offloaded bytes that are not on disk are in host memory."""

    def plus(self, other: "OffloadedBytes", times: int = 1) -> "OffloadedBytes":
        """Return the sum of these bytes and `times` the bytes of `other`."""
        return OffloadedBytes(self.size + times * other.size, self.disk + times * other.disk)


class Part(NamedTuple):
    """One part of a stage."""

    block: int | None
    """The block's number in the model; None: the embedding or the head."""
    profiles: tuple[Profile, ...]
    weights: Numbers
    gathered: Numbers
    """Bytes of the part's weights when they are gathered."""
    away: OffloadedBytes
    """Bytes of the forward's saved tensors that are offloaded until the part's backward."""
    cut: float = 0.0
    """Number of the part's weights that are read in tiles, and never gathered."""

    @property
    def whole(self) -> Numbers:
        """Numbers of weights that are in memory all at once."""
        return Numbers(self.weights.dense - self.cut, self.weights.expert)


class MemoryPoint(NamedTuple):
    """Bytes by the categories of a dry run: temporarily gathered weights, gradients, activations, and buffers of messages.
    `elsewhere`: offloaded activations."""

    weights: float
    gradients: float
    activations: float
    buffers: float
    elsewhere: OffloadedBytes

    @property
    def total(self) -> float:
        """Bytes on the device."""
        return self.weights + self.gradients + self.activations + self.buffers


def moments(
    workload: Workload,
    traced: Parts,
    actions: tuple[Action, ...],
    stages: Mapping[int, tuple[Part, ...]],
    segments: Mapping[int, tuple[tuple[int, ...], ...]],
) -> Iterator[MemoryPoint]:
    """Yield the memory of a rank while its program computes and reduces each part, and during the update. `segments`: for each stage, the
    numbers of the blocks in each segment."""
    timeline = _Timeline(workload, traced, stages, segments)
    for action, then in zip_longest(actions, actions[1:]):
        if action.kind == "F":
            yield from timeline.forward(timeline.stages[action.stage])
        elif action.kind == "FETCH":
            timeline.move(timeline.stages[action.stage].last, -1)
        elif action.kind in DOES:
            reduces = then is not None and (then.kind, then.stage) == ("REDUCE", action.stage)
            begins, forms = action.kind in BACKWARDS, action.kind in WEIGHT_GRADIENTS
            yield from timeline.backward(timeline.stages[action.stage], begins=begins, forms=forms, reduces=reduces)
        elif action.kind == "REDUCE":
            yield from timeline.reduce(timeline.stages[action.stage])
    timeline.joined = 0.0
    timeline.arrived.clear()
    yield timeline.moment(activations=opened_bytes(workload))


@dataclass
class _Stage:
    """A stage, and the gradients that the rank holds for it."""

    parts: tuple[Part, ...]
    saved: tuple[float, ...]
    """Bytes that a microbatch's forward keeps in each part."""
    deferred: tuple[float, ...]
    """Bytes that the first half of a microbatch's backward keeps in each part until the second half. An embedding has no first half."""
    inside: tuple[float, ...]
    """Bytes at the peak of each part's backward, without the bytes that forward saved, and without weight gradients."""
    formed: tuple[float, ...]
    """Bytes of a microbatch's own weight gradients at the peak of each part's backward, if the backward is not split."""
    coming: tuple[OffloadedBytes, ...]
    """Bytes that return to the device when the backward of each part begins: the tensors of the nearest earlier part that was offloaded."""
    last: OffloadedBytes
    """Bytes of the last offloaded part, which return before the stage's backward."""
    shares: list[float]
    """Bytes of this rank's share of each part's reduced gradients."""
    sums: list[float]
    """Bytes of each part's accumulated gradients before their reduction."""


class _Timeline:
    """Memory counters of a rank while its program runs."""

    def __init__(
        self,
        workload: Workload,
        traced: Parts,
        stages: Mapping[int, tuple[Part, ...]],
        segments: Mapping[int, tuple[tuple[int, ...], ...]],
    ) -> None:
        plan, self.workload, self.traced, self.kept, self.elsewhere = workload.plan, workload, traced, 0.0, OffloadedBytes()
        self.stages = {number: self._stage(parts, segments[number]) for number, parts in stages.items()}
        mesh = Mesh.of(plan)
        copies, shards = (mesh.state[1], mesh.experts[1]), workload.shards
        once = workload.width * (1 - workload.lasting)
        self.gathers = Numbers(*(0.0 if plan.zero < 3 else workload.width if count > 1 else once for count in shards))
        """Bytes of a dense weight, and of an expert's weight, that exist only while its part computes."""
        self.sends = Numbers(*(float(plan.zero == 3 and count > 1) for count in shards))
        """1 if a gather sends messages, else 0. If a gather sends no messages, all weights of the next part are cast at once."""
        self.joins = Numbers(*(workload.gradient_bytes * (one * count > 1) for one, count in zip(copies, shards, strict=True)))
        """Bytes of a gradient in the buffer of a reduction."""
        self.shares = Numbers(*(workload.gradient_bytes / count for count in shards))
        """Bytes of a reduced gradient on this rank."""
        ends = [
            any(part.profiles[0] is end for each in stages.values() for part in each) for end in (traced.embedding, traced.head)
        ]
        tied = released.waiting(workload, traced.embedding.weights, first=ends[0], last=ends[1])
        self.opened = opened_bytes(workload) if plan.state.release else 0.0
        """Bytes of the temporary tensors of an update during the backward, if gradients are released."""
        self.waits = tied if plan.state.release else 0.0
        """Bytes of a tied embedding's gradient that waits for the gradient at the pipeline's other end, if other gradients are released."""
        sent = any(_times(part.weights, self.joins) for each in stages.values() for part in each)
        self.arrived = deque[float](maxlen=released.SHARES * sent + released.UPDATED * plan.state.release)
        self.joined = 0.0
        """Bytes of reduced shares that are not yet added up, and of the last part's gradients in the buffer of a reduction."""

    def _stage(self, parts: tuple[Part, ...], segments: tuple[tuple[int, ...], ...]) -> _Stage:
        head, again = self.traced.head, self.traced.segments
        saved, deferred, inside, formed = [], [], [], []
        before = {number: run[: at + 1] for run in segments for at, number in enumerate(run)}
        for part in parts:
            saved.append(sum(one.saved for one in part.profiles))
            whole = part.profiles[0] is self.traced.embedding
            deferred.append(sum(one.saved + one.output if whole else one.deferred for one in part.profiles))
            counted = part.block is not None and self.workload.layout.defers == "none"
            working = max(0.0 if one is head and not self.workload.tile else one.working for one in part.profiles)
            inside.append(part.profiles[0].beside if counted else working)
            formed.append(part.profiles[0].formed if counted else self.workload.width * sum(part.whole))
            if again is not None and part.block is not None:
                run = before[part.block]
                graphs = sum(again.inside[number].saved for number in run) - self.traced.blocks[run[0]].saved
                saved[-1] *= len(run) == 1  # one input for all blocks of the segment
                waiting = self.traced.blocks if self.workload.layout.defers == "others" else again.inside
                deferred[-1] = waiting[part.block].deferred
                mine = again.inside[part.block]
                inside[-1] = max(graphs + (mine.beside if counted else mine.working), 0.0)
                formed[-1] = mine.formed if counted else formed[-1]
        coming, left = [OffloadedBytes()] * len(parts), [number for number, part in enumerate(parts) if part.away.size]
        further: dict[int | None, int] = {run[0]: len(run) - 1 for run in segments}
        for number, then in pairwise(left):  # a segment's backward begins with its last block
            coming[then + further.get(parts[then].block, 0)] = parts[number].away
        last = parts[left[-1]].away if left else OffloadedBytes()
        kept = tuple(saved), tuple(deferred), tuple(inside), tuple(formed)
        return _Stage(parts, *kept, tuple(coming), last, [0.0] * len(parts), [0.0] * len(parts))

    def moment(self, *, weights: float = 0.0, gradients: float = 0.0, activations: float = 0.0) -> MemoryPoint:
        """Return the rank's memory plus the given bytes."""
        held = sum(sum(stage.shares) + sum(stage.sums) for stage in self.stages.values())
        arrived, release = sum(self.arrived), self.workload.plan.state.release
        gradients += held + arrived * release
        buffers = self.joined + arrived * (not release)
        activations += self.opened * (arrived > 0)
        return MemoryPoint(weights, gradients, self.kept + activations, buffers, self.elsewhere)

    def move(self, away: OffloadedBytes, times: int = 1) -> None:
        """Count activations that are offloaded; with `times` = -1, activations that return."""
        self.kept, self.elsewhere = self.kept - times * away.size, self.elsewhere.plus(away, times)

    def forward(self, stage: _Stage) -> Iterator[MemoryPoint]:
        """Count a forward. A part's activations are offloaded when its forward ends, so the peak may be just before a part is offloaded.
        If no part is offloaded, the peak is in the last part; the head also has logits and their gradients."""
        head = self.traced.head
        for number, part in enumerate(stage.parts):
            self.kept += stage.saved[number]
            if part.away.size or part is stage.parts[-1]:
                logits = head.working if any(one is head for one in part.profiles) and not self.workload.tile else 0.0
                yield self.moment(weights=_times(part.whole, self.gathers), activations=logits)
            self.move(part.away)
        if stage.last.size:
            yield self.moment()  # now the most is elsewhere

    def backward(self, stage: _Stage, *, begins: bool, forms: bool, reduces: bool) -> Iterator[MemoryPoint]:
        """Count a backward, or half of a backward. `begins`: True for the whole backward or its first half, which fetches activations and
        frees those that the second half does not need. `forms`: True for the whole backward or its second half, which computes weight
        gradients. `reduces`: True if each part's gradients are reduced after its backward."""
        narrow = self.workload.width < self.workload.gradient_bytes
        for number, part in reversed([*enumerate(stage.parts)]):
            weights, messages = self._gathered(part, stage.parts[number - 1] if number else None)
            new = self.workload.gradient_bytes * sum(part.whole)
            made = stage.formed[number] if narrow or not stage.sums[number] else 0.0
            table = self._share_of_tiles(part, stage.shares[number])
            messages += self._tiles(part)
            self.move(stage.coming[number], -begins)
            computes = forms if part.profiles[0] is self.traced.embedding else begins
            gradients = made * forms + table * computes + self.waits
            held = self.moment(weights=weights, gradients=gradients, activations=stage.inside[number] * computes)
            stage.shares[number] += table * computes
            yield held._replace(buffers=messages + held.buffers)
            self.kept -= stage.saved[number] if begins else stage.deferred[number]
            if forms:
                stage.sums[number] = new
            else:
                self.kept += stage.deferred[number]
            if forms and reduces:
                held = self.reduced(stage, number)
                yield held._replace(buffers=messages + held.buffers, gradients=self.waits + held.gradients)

    def reduce(self, stage: _Stage) -> Iterator[MemoryPoint]:
        """Count the reduction of a stage's accumulated gradients, part by part, unless its last backward reduced them."""
        for number, size in enumerate(stage.sums):
            if size:
                yield self.reduced(stage, number)

    def reduced(self, stage: _Stage, number: int) -> MemoryPoint:
        """Count the reduction of a part's gradients. Return the moment at which all buffers exist."""
        part = stage.parts[number]
        first, release = not stage.shares[number], self.workload.plan.state.release
        mine = _times(part.whole if release else part.weights, self.shares)
        joined = _times(part.weights, self.joins)
        if release and joined:
            self.arrived.append(mine)
        elif joined:
            self.arrived.append(0.0 if first else mine)
            stage.shares[number] = mine
        held = self.moment()
        held = held._replace(buffers=held.buffers + joined)
        if release and not joined:
            last = self.workload.gradient_bytes * self.workload.tile_numbers if part.cut else 0.0
            self.arrived.append(max(mine, last))  # while its update runs
        stage.sums[number], stage.shares[number], self.joined = 0.0, 0.0 if release else mine, joined
        return held

    def _share_of_tiles(self, part: Part, share: float) -> float:
        """Bytes of the gradient to which gradients of tiles are added, if it is new."""
        return 0.0 if share or self.workload.plan.state.release else self.workload.gradient_bytes * part.cut

    def _tiles(self, part: Part) -> float:
        """Bytes of the tiles of a part in its backward: weights that the head reads again, a gradient, and a gradient that is released."""
        if not part.cut:
            return 0.0
        read = 0 if part.profiles[0] is self.traced.embedding else TILES * self.workload.width
        gradients = 1 + released.UPDATED * self.workload.plan.state.release
        return self.workload.tile_numbers * (read + gradients * self.workload.gradient_bytes)

    def _gathered(self, part: Part, before: Part | None) -> tuple[float, float]:
        """Return the bytes of gathered weights while a part computes, and the bytes of the messages that gather the part
        before it."""
        weights, messages = _times(part.whole, self.gathers), 0.0
        if before is not None:
            alone = Numbers(*(size * (1 - sends) for size, sends in zip(self.gathers, self.sends, strict=True)))
            weights += _times(before.whole, alone)
            messages += _times(before.gathered, self.sends)
        return weights, messages


def _times(numbers: Numbers, each: Numbers) -> float:
    """Return the number of weights times the bytes of each, summed over dense and expert weights."""
    return numbers.dense * each.dense + numbers.expert * each.expert
