"""From a schedule (what is computed) to a program (what each rank does): communication is added here."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple

from megalith.schedule.action import Action, Kind, Row, Schedule, Slot, parts

BACKWARDS: frozenset[str] = frozenset({"B", "I"})
"""Computations that take a gradient in and give one out; W only uses what I left."""

WEIGHT_GRADIENTS: frozenset[str] = frozenset({"B", "W"})
"""Computations after which a stage's weight gradients of one microbatch are complete."""

WEIGHT_USERS: frozenset[str] = frozenset({"F", "B", "I"})
"""Computations that read the weights; W multiplies activations with gradients only."""


class Channel(NamedTuple):
    """One ordered lane of messages. Every lane needs its own order: a tag (gloo) or a communicator (NCCL), because the two
    directions of a pair of ranks, and activations and gradients, wait for each other."""

    source: int
    destination: int
    carries: Literal["F", "B"]


@dataclass(frozen=True)
class Program:
    """What each pipeline rank does in one step, communication included.

    `rows[r]` holds the slots of pipeline rank r in order.

    Sends and receives are started where they stand and do not block: a receive is waited for by the computation that uses it
    (F its activations, B or I its gradients), a send by the end of the step. Within a rank, stages hand tensors over without
    messages. A GATHER makes a stage's weights whole until its next computation has used them (ZeRO 3) or to the end of the step
    (ZeRO 1, 2). A REDUCE belongs to the backward just before it and covers all gradients not yet reduced.
    """

    schedule: Schedule
    zero: int
    rows: tuple[Row, ...]

    @property
    def ranks(self) -> int:
        """Pipeline ranks."""
        return len(self.rows)

    @property
    def stages(self) -> int:
        """Stages of the whole model."""
        return self.schedule.stages

    @property
    def microbatches(self) -> int:
        """Microbatches of one step."""
        return self.schedule.microbatches

    @property
    def placement(self) -> tuple[int, ...]:
        """Stage -> pipeline rank."""
        return self.schedule.placement

    def peer(self, message: Action) -> int:
        """The rank at the other end of a send or receive."""
        channel = channel_of(message, self.placement)
        return channel.destination if message.kind.startswith("SEND") else channel.source


PARTNERS: Mapping[Kind, tuple[Kind, int]] = MappingProxyType(
    {"SEND_F": ("RECV_F", +1), "RECV_F": ("SEND_F", -1), "SEND_B": ("RECV_B", -1), "RECV_B": ("SEND_B", +1)}
)
"""What stands at the other end of a message, and how many stages on."""


def partner(message: Action) -> Action:
    """The receive a send belongs to, or the send a receive belongs to."""
    kind, distance = PARTNERS[message.kind]
    return Action(kind, message.stage + distance, message.microbatch)


def channel_of(message: Action, placement: tuple[int, ...]) -> Channel:
    """The lane a send or receive goes through."""
    here, there = placement[message.stage], placement[partner(message).stage]
    source, destination = (here, there) if message.kind.startswith("SEND") else (there, here)
    return Channel(source, destination, "F" if message.kind.endswith("_F") else "B")


def needs(action: Action, placement: tuple[int, ...]) -> Action | None:
    """The receive a computation waits for, if what it uses was made on another rank."""
    before, after = action.stage - 1, action.stage + 1
    if action.kind == "F" and before >= 0 and placement[before] != placement[action.stage]:
        return Action("RECV_F", action.stage, action.microbatch)
    if action.kind in BACKWARDS and after < len(placement) and placement[after] != placement[action.stage]:
        return Action("RECV_B", action.stage, action.microbatch)
    return None


def gives(action: Action, placement: tuple[int, ...]) -> Action | None:
    """The send that carries a computation's result to another rank, if one needs it."""
    before, after = action.stage - 1, action.stage + 1
    if action.kind == "F" and after < len(placement) and placement[after] != placement[action.stage]:
        return Action("SEND_F", action.stage, action.microbatch)
    if action.kind in BACKWARDS and before >= 0 and placement[before] != placement[action.stage]:
        return Action("SEND_B", action.stage, action.microbatch)
    return None


def lower(schedule: Schedule, zero: int, *, ahead: int = 1) -> Program:
    """The program that runs a schedule under a ZeRO stage.

    A receive is started `ahead` computations before the one that uses it, so that it travels meanwhile; starting it early is
    always safe, since it does not block, as long as each channel's receives stand in the order of its sends, which they do for
    any schedule. ZeRO 0: one REDUCE a stage, after its last backward. 1: also one GATHER, before its first use. 2: a REDUCE after
    each backward. 3: also a GATHER before each F and B (or I). Raises ValueError for another `zero`.
    """
    if zero not in (0, 1, 2, 3):
        raise ValueError(f"zero = {zero} is not a ZeRO stage. Use 0, 1, 2 or 3.")
    arrivals = _arrivals(schedule)
    rows = []
    for row in schedule.rows:
        receives = _receives(row, schedule.placement, arrivals, ahead)
        gathers, reduces = _gathers(row, zero), _reduces(row, zero)
        lowered: list[Slot] = []
        for i, slot in enumerate(row):
            sends = (gives(action, schedule.placement) for action in parts(slot))
            lowered += [*receives[i], *gathers[i], slot, *reduces[i], *(send for send in sends if send)]
        rows.append(tuple(lowered))
    return Program(schedule, zero, tuple(rows))


def _arrivals(schedule: Schedule) -> Mapping[Channel, list[Action]]:
    """The receives of every channel, in the order their sends are made."""
    found: defaultdict[Channel, list[Action]] = defaultdict(list)
    for row in schedule.rows:
        for slot in row:
            for action in parts(slot):
                if send := gives(action, schedule.placement):
                    found[channel_of(send, schedule.placement)].append(partner(send))
    return found


def _receives(
    row: Row, placement: tuple[int, ...], arrivals: Mapping[Channel, list[Action]], ahead: int
) -> Mapping[int, list[Action]]:
    """The receives to start before each slot of a row: its own need `ahead` slots on, and all that the channel carries first."""
    started: Counter[Channel] = Counter()
    found: defaultdict[int, list[Action]] = defaultdict(list)
    turn = {receive: i for lane in arrivals.values() for i, receive in enumerate(lane)}
    for i, slot in enumerate(row):
        for receive in filter(None, (needs(action, placement) for action in parts(slot))):
            if receive not in turn:
                found[max(i - ahead, 0)].append(receive)  # its sender is missing from the schedule: `problems` says so
                continue
            channel = channel_of(receive, placement)
            found[max(i - ahead, 0)] += arrivals[channel][started[channel] : turn[receive] + 1]
            started[channel] = max(started[channel], turn[receive] + 1)
    return found


def _users(row: Row, kinds: frozenset[str]) -> Iterator[tuple[int, int]]:
    """(slot, stage) of every computation of these kinds."""
    return ((i, action.stage) for i, slot in enumerate(row) for action in parts(slot) if action.kind in kinds)


def _placed(kind: Kind, places: Iterable[tuple[int, int]]) -> Mapping[int, list[Action]]:
    """Collectives by slot, one of a kind for a stage in a slot."""
    found: defaultdict[int, list[Action]] = defaultdict(list)
    for i, stage in dict.fromkeys(places):
        found[i].append(Action(kind, stage))
    return found


def _gathers(row: Row, zero: int) -> Mapping[int, list[Action]]:
    """The gathers before each slot of a row."""
    if zero == 0:
        return _placed("GATHER", ())
    uses = list(_users(row, WEIGHT_USERS))
    if zero == 3:
        return _placed("GATHER", uses)
    first = {stage: i for i, stage in reversed(uses)}
    return _placed("GATHER", sorted((i, stage) for stage, i in first.items()))


def _reduces(row: Row, zero: int) -> Mapping[int, list[Action]]:
    """The reductions after each slot of a row."""
    made = list(_users(row, WEIGHT_GRADIENTS))
    if zero >= 2:
        return _placed("REDUCE", made)
    last = {stage: i for i, stage in made}
    return _placed("REDUCE", sorted((i, stage) for stage, i in last.items()))
