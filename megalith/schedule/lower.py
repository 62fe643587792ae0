"""Lower a schedule (computations) to a program (the actions of each rank) by adding communication."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple

from megalith.schedule.action import Action, Kind, Row, RowEntry, Schedule, computations, parts

BACKWARDS: frozenset[str] = frozenset({"B", "I"})
"""Computations that take and return a gradient. W is not in this set: it uses only tensors that I kept."""

WEIGHT_GRADIENTS: frozenset[str] = frozenset({"B", "W"})
"""Computations after which a stage's weight gradients of one microbatch are complete."""

WEIGHT_USERS: frozenset[str] = frozenset({"F", "B", "I"})
"""Computations that read the weights. W is not in this set: it multiplies activations by gradients."""


class Channel(NamedTuple):
    """An ordered sequence of messages from one rank to another. A tag (gloo) or a communicator of its own (NCCL) separates a channel
    from other messages. Without separate channels, messages in opposite directions, or activations and gradients, would wait for each
    other."""

    source: int
    destination: int
    carries: Literal["F", "B"]


@dataclass(frozen=True)
class Program:
    """Actions of each pipeline rank in one step, communication included.

    `rows[r]` holds the entries of pipeline rank r in order.

    Sends and receives start at their position in the row and do not block. The computation that uses a received tensor waits for
    its receive (F for activations, B or I for gradients), and the end of the step waits for all sends. Stages on the same rank pass
    tensors without messages. A GATHER makes a stage's weights whole until the end of its next computation (ZeRO 3) or of the step
    (ZeRO 1, 2). A REDUCE belongs to the backward just before it (B, or W if the backward is split) and covers all gradients that
    are not yet reduced. In the stages `retained`, the tensors that a forward keeps for its backward are moved off the device. In
    the stages `retained`, an OFFLOAD follows each forward: there, the tensors of its microbatch have left the device. A FETCH begins to
    move a microbatch's tensors back, one computation before the backward (B or I). In a bidirectional schedule the two ranks that hold a
    stage share its collectives, but run their two stages in opposite orders. In a bidirectional schedule, every rank therefore gathers its
    stages at the beginning of the row, and reduces their gradients at the end, in ascending order.
    """

    schedule: Schedule
    zero: int
    rows: tuple[Row, ...]
    retained: frozenset[int] = frozenset()

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
        """The pipeline rank of each stage, for microbatches that are not mirrored."""
        return self.schedule.placement

    def channel(self, message: Action) -> Channel:
        """Return the channel of a send or receive of this program."""
        return channel_of(message, self.schedule)

    def peer(self, message: Action) -> int:
        """Return the rank at the other end of a send or receive."""
        channel = self.channel(message)
        return channel.destination if message.kind.startswith("SEND") else channel.source


PARTNERS: Mapping[Kind, tuple[Kind, int]] = MappingProxyType(
    {"SEND_F": ("RECV_F", +1), "RECV_F": ("SEND_F", -1), "SEND_B": ("RECV_B", -1), "RECV_B": ("SEND_B", +1)}
)
"""For each kind of message: the kind of the matching message at the other end, and that message's stage relative to this one's.
"""


def partner(message: Action) -> Action:
    """Return the receive of a send, or the send of a receive."""
    kind, distance = PARTNERS[message.kind]
    return Action(kind, message.stage + distance, message.microbatch)


def channel_of(message: Action, schedule: Schedule) -> Channel:
    """Return the channel of a send or receive."""
    kind, stage, microbatch = message
    assert microbatch is not None, message
    here, there = schedule.rank_of(stage, microbatch), schedule.rank_of(stage + PARTNERS[kind][1], microbatch)
    carries = "F" if kind.endswith("F") else "B"
    return Channel(here, there, carries) if kind.startswith("SEND") else Channel(there, here, carries)


def needs(action: Action, schedule: Schedule) -> Action | None:
    """Return the receive for which a computation waits, if another rank computes its input; else None."""
    kind, stage, microbatch = action
    if kind == "F" and stage > 0 and schedule.crossings[stage - 1]:
        return Action("RECV_F", stage, microbatch)
    if kind in BACKWARDS and schedule.crossings[stage]:
        return Action("RECV_B", stage, microbatch)
    return None


def gives(action: Action, schedule: Schedule) -> Action | None:
    """Return the send that carries a computation's result to another rank, if another rank needs the result; else None."""
    kind, stage, microbatch = action
    if kind == "F" and schedule.crossings[stage]:
        return Action("SEND_F", stage, microbatch)
    if kind in BACKWARDS and stage > 0 and schedule.crossings[stage - 1]:
        return Action("SEND_B", stage, microbatch)
    return None


def lower(schedule: Schedule, zero: int, *, ahead: int = 1, retained: Collection[int] = ()) -> Program:
    """Return the program of a schedule under a ZeRO stage. A receive starts `ahead` computations before the computation that uses
    it, so that the transfer overlaps these computations. An early start is safe, because a receive does not block, and each
    channel's receives are in the order of its sends. ZeRO 0 has one REDUCE per stage, after the stage's last backward. ZeRO 1 has the
    REDUCE of ZeRO 0, and one GATHER per stage, before the first use of the stage's weights. ZeRO 2 has the GATHER of ZeRO 1, but a REDUCE
    after each backward. ZeRO 3 has a REDUCE after each backward, and a GATHER before each F and B (or I). `retained`: stages whose forwards
    are followed by an OFFLOAD, and whose backwards are preceded by a FETCH, which starts `ahead` computations earlier. Raises ValueError if
    `zero` is not 0 to 3, or if it is 2 or 3 with a bidirectional schedule.
    """
    if zero not in (0, 1, 2, 3):
        raise ValueError(f"zero = {zero} is not a ZeRO stage. Use 0, 1, 2 or 3.")
    if schedule.mirrored is not None and zero >= 2:
        raise ValueError(
            f"zero = {zero} with schedule = {schedule.name!r}, which runs the two copies of a stage in different orders: the "
            f"exchanges of ZeRO 2 and 3 for each microbatch would not match. Use zero = 0 or 1, or schedule = 'dualpipev'."
        )
    arrivals = _arrivals(schedule)
    turns = {receive: turn for lane in arrivals.values() for turn, receive in enumerate(lane)}
    rows = []
    for rank, row in enumerate(schedule.rows):
        receives = _receives(row, schedule, arrivals, turns, ahead)
        gathers, reduces = ({}, {}) if schedule.mirrored is not None else (_gathers(row, zero), _reduces(row, zero))
        first, last = ((), ()) if schedule.mirrored is None else ends(schedule, rank, zero)
        fetches = _fetches(row, retained, ahead)
        lowered: list[RowEntry] = [*first]
        for i, entry in enumerate(row):
            sends = (gives(action, schedule) for action in parts(entry))
            lowered += [*receives.get(i, ()), *fetches.get(i, ()), *gathers.get(i, ()), entry, *reduces.get(i, ())]
            lowered += [*_offloads(entry, retained), *(send for send in sends if send)]
        rows.append((*lowered, *last))
    return Program(schedule, zero, tuple(rows), frozenset(retained))


def ends(schedule: Schedule, rank: int, zero: int) -> tuple[Row, Row]:
    """Return the gathers at the beginning and the reductions at the end of a rank's row in a bidirectional schedule. A row
    without backwards has no reductions."""
    stages = schedule.stages_of(rank)
    trains = any(action.kind in WEIGHT_GRADIENTS for row in schedule.rows for action in computations(row))
    gathers = tuple(Action("GATHER", stage) for stage in stages if zero > 0)
    return gathers, tuple(Action("REDUCE", stage) for stage in stages if trains)


def _arrivals(schedule: Schedule) -> Mapping[Channel, list[Action]]:
    """Return the receives of every channel, in the order in which their sends are made."""
    found: defaultdict[Channel, list[Action]] = defaultdict(list)
    for row in schedule.rows:
        for action in computations(row):
            if send := gives(action, schedule):
                found[channel_of(send, schedule)].append(partner(send))
    return found


def _receives(
    row: Row, schedule: Schedule, arrivals: Mapping[Channel, list[Action]], turns: Mapping[Action, int], ahead: int
) -> Mapping[int, list[Action]]:
    """Return the receives to start before each entry of a row. Before an entry start the receive that is needed `ahead` entries
    later, and all earlier receives of its channel."""
    started: Counter[Channel] = Counter()
    found: defaultdict[int, list[Action]] = defaultdict(list)
    for i, entry in enumerate(row):
        for receive in filter(None, (needs(action, schedule) for action in parts(entry))):
            if receive not in turns:
                found[max(i - ahead, 0)].append(receive)  # the schedule lacks the matching send, which `problems` reports
                continue
            channel = channel_of(receive, schedule)
            found[max(i - ahead, 0)] += arrivals[channel][started[channel] : turns[receive] + 1]
            started[channel] = max(started[channel], turns[receive] + 1)
    return found


def _offloads(entry: RowEntry, retained: Collection[int]) -> Iterator[Action]:
    return (action._replace(kind="OFFLOAD") for action in parts(entry) if action.kind == "F" and action.stage in retained)


def _fetches(row: Row, retained: Collection[int], ahead: int) -> Mapping[int, list[Action]]:
    """Return the fetches to start before each entry of a row. Each fetch starts `ahead` entries before its backward, but not
    before its forward."""
    found: defaultdict[int, list[Action]] = defaultdict(list)
    made: dict[tuple[int, int | None], int] = {}
    for i, entry in enumerate(row):
        for kind, stage, microbatch in parts(entry):
            if stage in retained and kind == "F":
                made[stage, microbatch] = i
            elif stage in retained and kind in BACKWARDS:
                found[max(i - ahead, made.get((stage, microbatch), -1) + 1, 0)].append(Action("FETCH", stage, microbatch))
    return found


def _users(row: Row, kinds: frozenset[str]) -> Iterator[tuple[int, int]]:
    return ((i, action.stage) for i, entry in enumerate(row) for action in parts(entry) if action.kind in kinds)


def _placed(kind: Kind, places: Iterable[tuple[int, int]]) -> Mapping[int, list[Action]]:
    found: defaultdict[int, list[Action]] = defaultdict(list)
    for i, stage in dict.fromkeys(places):
        found[i].append(Action(kind, stage))
    return found


def _gathers(row: Row, zero: int) -> Mapping[int, list[Action]]:
    if zero == 0:
        return _placed("GATHER", ())
    uses = list(_users(row, WEIGHT_USERS))
    if zero == 3:
        return _placed("GATHER", uses)
    first = {stage: i for i, stage in reversed(uses)}
    return _placed("GATHER", sorted((i, stage) for stage, i in first.items()))


def _reduces(row: Row, zero: int) -> Mapping[int, list[Action]]:
    made = list(_users(row, WEIGHT_GRADIENTS))
    if zero >= 2:
        return _placed("REDUCE", made)
    last = {stage: i for i, stage in made}
    return _placed("REDUCE", sorted((i, stage) for stage, i in last.items()))
