"""Simulate a program, given the cost of each action, to predict the timeline, the bubble, and the memory of microbatches in
flight."""

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, TypeAlias

from megalith.schedule.action import (
    COLLECTIVES,
    COMPUTATIONS,
    MESSAGES,
    TRANSFERS,
    Action,
    Overlap,
    Row,
    RowEntry,
    Schedule,
    parts,
)
from megalith.schedule.lower import BACKWARDS, Channel, Program, needs

Seconds: TypeAlias = Mapping[str, float] | Callable[[RowEntry], float]


class Span(NamedTuple):
    """One action on one rank, from `start` to `end` in seconds."""

    rank: int
    action: RowEntry
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Times of the actions of each of `ranks` ranks. `transfers` are the messages, listed under the sender's rank."""

    ranks: int
    spans: tuple[Span, ...]
    transfers: tuple[Span, ...] = ()

    @cached_property
    def end(self) -> float:
        """Time at which the last rank has finished, in seconds from the start of the step."""
        return max((span.end for span in self.spans), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Seconds that each rank computes."""
        seconds = [0.0] * self.ranks
        for span in self.spans:
            if _computes(span.action):
                seconds[span.rank] += span.end - span.start
        return tuple(seconds)

    @property
    def idle(self) -> tuple[float, ...]:
        """Seconds for which each rank idles before the step ends."""
        return tuple(self.end - busy for busy in self.busy)

    @property
    def bubble(self) -> float:
        """Idle time divided by useful time, over all ranks: (ranks - 1) / microbatches for GPipe and 1F1B with even stages."""
        useful = sum(self.busy)
        return sum(self.idle) / useful if useful else 0.0

    @cached_property
    def gaps(self) -> tuple[float, ...]:
        """Seconds for which each rank idles between the start of its first computation and the end of its last one."""
        first, last = [self.end] * self.ranks, [0.0] * self.ranks
        for span in self.spans:
            if _computes(span.action):
                first[span.rank] = min(first[span.rank], span.start)
                last[span.rank] = max(last[span.rank], span.end)
        return tuple(max(last[rank] - first[rank] - busy, 0.0) for rank, busy in enumerate(self.busy))

    @property
    def bubble_seconds(self) -> float:
        """The bubble as papers define it: the longest idle time of any rank between its own first and last computation. If each
        rank starts its next step when its own part of the current step ends, a step takes longer than its work by this bubble.
        `idle` also counts the time until the last rank ends."""
        return max(self.gaps, default=0.0)

    @cached_property
    def rows(self) -> tuple[tuple[Span, ...], ...]:
        """Actions of each rank, in order."""
        found: list[list[Span]] = [[] for _ in range(self.ranks)]
        for span in self.spans:
            found[span.rank].append(span)
        return tuple(map(tuple, found))

    def row(self, rank: int) -> tuple[Span, ...]:
        """Return the actions of one rank, in order."""
        return self.rows[rank]


def _computes(entry: RowEntry) -> bool:
    return isinstance(entry, Overlap) or entry.kind in COMPUTATIONS


class Wait(NamedTuple):
    """A wait: rank `rank` cannot start `entry`, because it needs `missing` from rank `on`."""

    rank: int
    entry: RowEntry
    missing: Action
    on: int


def simulate(program: Program, seconds: Seconds, transfer: float | Callable[[Action], float] = 0.0) -> Timeline:
    """Return the timeline of a program. `seconds`: the time of an action by kind (defaults: 0 for collectives and transfers, the
    sum of the two computations for OVERLAP), or a function of the action or overlap. `transfer`: the time of a message once both
    ends are ready; messages of one channel are sequential. A GATHER delays its stage's next computation, so `seconds` must give
    only its exposed time; a REDUCE overlaps later computations. The OFFLOADs of a rank follow each other, and so do its FETCHes.
    OFFLOADs and FETCHes overlap computations, but a backward waits for its FETCH. Raises ValueError if the program cannot run to
    its end.
    """
    machine = _Machine(program, _cost(seconds), transfer if callable(transfer) else lambda _: transfer)
    if waits := machine.run():
        raise ValueError("the program cannot finish: " + "; ".join(map(explain, waits)))
    return Timeline(program.ranks, tuple(machine.spans), tuple(machine.transfers))


def blocked(program: Program) -> list[Wait]:
    """Return the waits that never end when the program runs; empty if it runs to its end."""
    return _Machine(program, lambda _: 0.0, lambda _: 0.0).run()


def explain(wait: Wait) -> str:
    """Describe a wait."""
    return f"rank {wait.rank} at {wait.entry} waits for {wait.missing} of rank {wait.on}"


def activations(schedule: Schedule, saved: Sequence[float], waiting: Sequence[float] | None = None) -> list[float]:
    """Return the peak memory that each rank keeps for backward, in the unit of `saved` (bytes, or any other). `saved[stage]`: the
    memory of one microbatch on a stage, which F allocates and B frees. With a split backward, I frees all of this memory except
    `waiting[stage]` (inputs of the matrix products and gradients of their outputs), which W frees. By default, W frees
    everything, as in the memory tables of the zero-bubble papers.
    """
    kept = saved if waiting is None else waiting
    return [max(accumulate(_held(row, saved, kept)), default=0) for row in schedule.rows]


def in_flight(schedule: Schedule) -> list[int]:
    """Return the largest number of microbatches that each rank holds between forward and backward. A microbatch counts once for
    each of the rank's chunks."""
    return [int(peak) for peak in activations(schedule, [1] * schedule.stages)]


def _held(row: Row, saved: Sequence[float], waiting: Sequence[float]) -> list[float]:
    """Return the memory that each computation of a row adds (negative if it frees memory). In an overlap, memory is allocated
    before any is freed."""

    def change(action: Action) -> float:
        stage = action.stage
        return {"F": saved[stage], "B": -saved[stage], "I": waiting[stage] - saved[stage], "W": -waiting[stage]}[action.kind]

    changes: list[float] = []
    for entry in row:
        changes += sorted(map(change, parts(entry)), reverse=True)
    return changes


def _cost(seconds: Seconds) -> Callable[[RowEntry], float]:
    """Return `seconds` as a function. A computation that has no time in the table is an error."""
    if callable(seconds):
        return seconds
    table = seconds

    def cost(entry: RowEntry) -> float:
        if isinstance(entry, Overlap):
            return table["OVERLAP"] if "OVERLAP" in table else cost(entry.first) + cost(entry.second)
        if entry.kind in COMPUTATIONS and entry.kind not in table:
            raise ValueError(
                f"the time of {entry.kind} ({entry}) is missing: the table has only {', '.join(table)}. Add an entry for {entry.kind}."
            )
        return table.get(entry.kind, 0.0)

    return cost


@dataclass
class _Lane:
    """State of a channel during a simulation: its k-th send matches its k-th receive."""

    sent: list[tuple[Action, float]] = field(default_factory=list)
    posted: list[tuple[Action, float]] = field(default_factory=list)
    met: int = 0
    free: float = 0.0


@dataclass
class _Machine:
    """State of all ranks during a simulation: each rank continues until an input is missing."""

    program: Program
    cost: Callable[[RowEntry], float]
    transfer: Callable[[Action], float]
    spans: list[Span] = field(default_factory=list)
    transfers: list[Span] = field(default_factory=list)
    ready: dict[Action, float] = field(default_factory=dict)  # computations and receives -> when they were complete
    lanes: defaultdict[Channel, _Lane] = field(default_factory=lambda: defaultdict(_Lane))

    def __post_init__(self) -> None:
        self.at = [0] * self.program.ranks
        self.clock = [0.0] * self.program.ranks
        self.collectives = [0.0] * self.program.ranks  # when the rank's lane for gathers and reductions is free
        self.gathered: list[dict[int, float]] = [{} for _ in range(self.program.ranks)]
        self.links = dict.fromkeys(((rank, kind) for rank in range(self.program.ranks) for kind in TRANSFERS), 0.0)
        self.moved: dict[Action, float] = {}  # transfers -> when they were complete
        self.waits: dict[Action, Wait] = {}  # a result not there yet -> the ranks that wait for it
        self.woken: list[int] = []  # ranks whose wait has just ended

    def run(self) -> list[Wait]:
        able = deque(range(self.program.ranks))
        while able:
            rank = able.popleft()
            if wait := self._advance(rank):
                self.waits[wait.missing] = wait
            able.extend(self.woken)
            self.woken.clear()
        return sorted(self.waits.values())

    def _advance(self, rank: int) -> Wait | None:
        row = self.program.rows[rank]
        for at in range(self.at[rank], len(row)):
            if wait := self._start(rank, row[at]):
                self.at[rank] = at
                return wait
        self.at[rank] = len(row)
        return None

    def _start(self, rank: int, entry: RowEntry) -> Wait | None:
        if isinstance(entry, Action) and entry.kind in MESSAGES:
            self._message(entry, self.clock[rank])
            return None
        if isinstance(entry, Action) and entry.kind in COLLECTIVES:
            self._collective(rank, entry)
            return None
        if isinstance(entry, Action) and entry.kind in TRANSFERS:
            self._transfer(rank, entry)
            return None
        begin = self.clock[rank]
        for action in parts(entry):
            begin = max(begin, self.gathered[rank].get(action.stage, 0.0))
            if action.kind in BACKWARDS:
                begin = max(begin, self.moved.get(action._replace(kind="FETCH"), 0.0))
            for need in self._inputs(action):
                if need not in self.ready:
                    return self._wait(rank, entry, need)
                begin = max(begin, self.ready[need])
        end = self.clock[rank] = begin + self.cost(entry)
        self.spans.append(Span(rank, entry, begin, end))
        for action in parts(entry):
            self.ready[action] = end
        return None

    def _inputs(self, action: Action) -> list[Action]:
        kind, stage, i = action
        if kind == "W":
            return [Action("I", stage, i)]
        if kind == "F":
            if receive := needs(action, self.program.schedule):
                return [receive]
            return [Action("F", stage - 1, i)] if stage > 0 else []
        own = Action("F", stage, i)
        if receive := needs(action, self.program.schedule):
            return [own, receive]
        if stage + 1 < self.program.stages:
            whole, half = Action("B", stage + 1, i), Action("I", stage + 1, i)
            return [own, half if half in self.ready else whole]
        return [own]

    def _wait(self, rank: int, entry: RowEntry, need: Action) -> Wait:
        return Wait(rank, entry, need, self.program.channel(need).source if need.kind in MESSAGES else rank)

    def _message(self, action: Action, now: float) -> None:
        """Start a send or a receive. The transfer begins when both ends have started and the channel is free."""
        channel = self.program.channel(action)
        lane = self.lanes[channel]
        (lane.sent if action.kind.startswith("SEND") else lane.posted).append((action, now))
        while lane.met < min(len(lane.sent), len(lane.posted)):
            (send, sent), (receive, posted) = lane.sent[lane.met], lane.posted[lane.met]
            begin = max(sent, posted, lane.free)
            lane.free = self.ready[receive] = begin + self.transfer(send)
            lane.met += 1
            self.transfers.append(Span(channel.source, send, begin, lane.free))
            if wait := self.waits.pop(receive, None):
                self.woken.append(wait.rank)

    def _collective(self, rank: int, action: Action) -> None:
        begin = max(self.clock[rank], self.collectives[rank])
        end = self.collectives[rank] = begin + self.cost(action)
        if action.kind == "GATHER":
            self.gathered[rank][action.stage] = end
        if end > begin:
            self.spans.append(Span(rank, action, begin, end))

    def _transfer(self, rank: int, action: Action) -> None:
        """Transfer the saved tensors of a microbatch. Tensors must have been offloaded before they are fetched."""
        begin = max(self.clock[rank], self.links[rank, action.kind], self.moved.get(action._replace(kind="OFFLOAD"), 0.0))
        end = self.links[rank, action.kind] = self.moved[action] = begin + self.cost(action)
        if end > begin:
            self.spans.append(Span(rank, action, begin, end))
