"""When everything in a program happens, given what each action costs: the predicted timeline, its bubble, memory in flight."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from megalith.schedule.action import COMPUTATIONS, MESSAGES, Action, Overlap, Row, Schedule, Slot, parts
from megalith.schedule.lower import BACKWARDS, Channel, Program, channel_of, needs

HOLDS: Mapping[str, int] = MappingProxyType({"F": +1, "B": -1, "I": 0, "W": -1})
"""Does a computation keep (+1) or free (-1) one microbatch of its stage? W still needs what F saved."""

Seconds: TypeAlias = Mapping[str, float] | Callable[[Slot], float]


class Span(NamedTuple):
    """One action on one rank, from `start` to `end` in seconds."""

    rank: int
    action: Slot
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """What each of `ranks` ranks does when. `transfers` are messages under way, on the sender's rank, beside the computations."""

    ranks: int
    spans: tuple[Span, ...]
    transfers: tuple[Span, ...] = ()

    @cached_property
    def end(self) -> float:
        """When the last rank has finished, in seconds from the start of the step."""
        return max((span.end for span in self.spans), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Seconds each rank computes."""
        seconds = [0.0] * self.ranks
        for span in self.spans:
            if all(action.kind in COMPUTATIONS for action in parts(span.action)):
                seconds[span.rank] += span.end - span.start
        return tuple(seconds)

    @property
    def idle(self) -> tuple[float, ...]:
        """Seconds each rank does not compute before the step ends."""
        return tuple(self.end - busy for busy in self.busy)

    @property
    def bubble(self) -> float:
        """Idle time over useful time, all ranks together: (ranks - 1) / microbatches for GPipe and 1F1B with even stages."""
        useful = sum(self.busy)
        return sum(self.idle) / useful if useful else 0.0

    def row(self, rank: int) -> tuple[Span, ...]:
        """What one rank did, in order."""
        return tuple(span for span in self.spans if span.rank == rank)


class Wait(NamedTuple):
    """Rank `rank` cannot start `slot`: it needs `missing`, which rank `on` makes."""

    rank: int
    slot: Slot
    missing: Action
    on: int


def simulate(program: Program, seconds: Seconds, transfer: float | Callable[[Action], float] = 0.0) -> Timeline:
    """The timeline of a program.

    `seconds` says what an action costs: by kind (GATHER, REDUCE and an absent OVERLAP cost nothing, nothing, and the sum of the
    two), or a function of the action or overlap. `transfer` is the time of a message, once both its ends are ready; messages of
    one channel go one after the other. A GATHER holds up its stage's next computation, so give only the part of it that is not
    hidden; a REDUCE runs beside the computations that follow. Raises ValueError if the program cannot run to its end.
    """
    machine = _Machine(program, _cost(seconds), transfer if callable(transfer) else lambda _: transfer)
    if waits := machine.run():
        raise ValueError("the program cannot finish: " + "; ".join(map(explain, waits)))
    return Timeline(program.ranks, tuple(machine.spans), tuple(machine.transfers))


def blocked(program: Program) -> list[Wait]:
    """Where ranks stand still for ever when the program runs; empty if it runs to its end."""
    return _Machine(program, lambda _: 0.0, lambda _: 0.0).run()


def explain(wait: Wait) -> str:
    """A wait in words."""
    return f"rank {wait.rank} at {wait.slot} waits for {wait.missing} of rank {wait.on}"


def activations(schedule: Schedule, saved: Sequence[float]) -> list[float]:
    """Peak of what each rank keeps for backward; `saved[stage]` is what one microbatch leaves there (bytes, or any unit)."""
    return [max(accumulate(_held(row, saved)), default=0) for row in schedule.rows]


def in_flight(schedule: Schedule) -> list[int]:
    """Peak number of microbatches each rank holds between forward and backward; several chunks of a rank count each."""
    return [int(peak) for peak in activations(schedule, [1] * schedule.stages)]


def _held(row: Row, saved: Sequence[float]) -> list[float]:
    """What each computation of a row adds to memory; in an overlap both are there before either is freed."""
    changes: list[float] = []
    for slot in row:
        changes += sorted((HOLDS[action.kind] * saved[action.stage] for action in parts(slot)), reverse=True)
    return changes


def _cost(seconds: Seconds) -> Callable[[Slot], float]:
    """`seconds` as a function; a kind that computes and has no entry is an error."""
    if callable(seconds):
        return seconds
    table = seconds

    def cost(slot: Slot) -> float:
        if isinstance(slot, Overlap):
            return table["OVERLAP"] if "OVERLAP" in table else cost(slot.first) + cost(slot.second)
        if slot.kind in COMPUTATIONS and slot.kind not in table:
            raise ValueError(f"no seconds for {slot.kind} ({slot}), only for {', '.join(table)}. Add an entry for {slot.kind}.")
        return table.get(slot.kind, 0.0)

    return cost


@dataclass
class _Lane:
    """A channel while it runs: the k-th send meets the k-th receive."""

    sent: list[tuple[Action, float]] = field(default_factory=list)
    posted: list[tuple[Action, float]] = field(default_factory=list)
    met: int = 0
    free: float = 0.0


@dataclass
class _Machine:
    """All ranks of a program while it runs: each goes on until it needs what is not there yet."""

    program: Program
    cost: Callable[[Slot], float]
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

    def run(self) -> list[Wait]:
        """Run to the end, or to where no rank can go on; returns what the ranks then wait for."""
        while True:
            before = sum(self.at)
            waits = [wait for rank in range(self.program.ranks) if (wait := self._advance(rank))]
            if sum(self.at) == before:
                return waits

    def _advance(self, rank: int) -> Wait | None:
        """Take a rank as far as it can go; what it then waits for, or None at the end of its row."""
        row = self.program.rows[rank]
        while self.at[rank] < len(row):
            if wait := self._start(rank, row[self.at[rank]]):
                return wait
            self.at[rank] += 1
        return None

    def _start(self, rank: int, slot: Slot) -> Wait | None:
        """Do the rank's next slot, or say what it waits for."""
        if isinstance(slot, Action) and slot.kind in MESSAGES:
            self._message(slot, self.clock[rank])
        elif isinstance(slot, Action) and slot.kind not in COMPUTATIONS:
            self._collective(rank, slot)
        else:
            inputs = [need for action in parts(slot) for need in self._inputs(action)]
            for need in inputs:
                if need not in self.ready:
                    return self._wait(rank, slot, need)
            whole = [self.gathered[rank].get(action.stage, 0.0) for action in parts(slot)]
            begin = max([self.clock[rank], *whole, *(self.ready[need] for need in inputs)])
            self.clock[rank] = begin + self.cost(slot)
            self.spans.append(Span(rank, slot, begin, self.clock[rank]))
            self.ready.update((action, self.clock[rank]) for action in parts(slot))
        return None

    def _inputs(self, action: Action) -> list[Action]:
        """What a computation uses: a receive from another rank or a computation of its own."""
        stage, i = action.stage, action.microbatch
        own = {"F": [], "B": [Action("F", stage, i)], "I": [Action("F", stage, i)], "W": [Action("I", stage, i)]}[action.kind]
        if receive := needs(action, self.program.placement):
            return [*own, receive]
        if action.kind == "F" and stage > 0:
            return [*own, Action("F", stage - 1, i)]
        if action.kind in BACKWARDS and stage + 1 < self.program.stages:
            whole, half = Action("B", stage + 1, i), Action("I", stage + 1, i)
            return [*own, half if half in self.ready else whole]
        return own

    def _wait(self, rank: int, slot: Slot, need: Action) -> Wait:
        if need.kind in MESSAGES:
            return Wait(rank, slot, need, channel_of(need, self.program.placement).source)
        return Wait(rank, slot, need, rank)

    def _message(self, action: Action, now: float) -> None:
        """Start a send or a receive; it is under way when both ends have started and the channel is free."""
        channel = channel_of(action, self.program.placement)
        lane = self.lanes[channel]
        (lane.sent if action.kind.startswith("SEND") else lane.posted).append((action, now))
        while lane.met < min(len(lane.sent), len(lane.posted)):
            (send, sent), (receive, posted) = lane.sent[lane.met], lane.posted[lane.met]
            begin = max(sent, posted, lane.free)
            lane.free = self.ready[receive] = begin + self.transfer(send)
            lane.met += 1
            self.transfers.append(Span(channel.source, send, begin, lane.free))

    def _collective(self, rank: int, action: Action) -> None:
        begin = max(self.clock[rank], self.collectives[rank])
        end = self.collectives[rank] = begin + self.cost(action)
        if action.kind == "GATHER":
            self.gathered[rank][action.stage] = end
        if end > begin:
            self.spans.append(Span(rank, action, begin, end))
