"""Accounts of a run's time, and of the cost of each incident, computed from the event log alone. Every moment between the first
and the last event is assigned to exactly one cause, so the seconds of all causes add up to the wall time. The causes' names follow
Google's ml-goodput library, but detection and recovery are separate causes.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from enum import StrEnum
from statistics import median
from typing import Any

from megalith.events import (
    Checkpoint,
    Event,
    Incident,
    Merge,
    PrecisionWatched,
    Problem,
    Recovery,
    Rewound,
    RunFinished,
    RunStarted,
    Sample,
    Skipped,
    Step,
    Validation,
    of_kind,
)
from megalith.fleet.commands import Stop
from megalith.fleet.observations import Straggler


class Cause(StrEnum):
    """The use that a run made of a moment. If several causes apply to a moment, it is assigned to the one that comes last in this
    list."""

    OTHER = "other"
    USEFUL = "useful"
    STRAGGLING = "straggling"
    DATA = "data"
    VALIDATION = "validation"
    CHECKPOINT = "checkpoint"
    START = "start-up"
    LOST = "lost steps"
    AWAY = "away"
    RECOVERY = "recovery"
    DETECTION = "detection"


MEANING: dict[Cause, str] = {
    Cause.USEFUL: "steps that count",
    Cause.STRAGGLING: "time by which steps exceeded the median step time while a rank was known to be slow",
    Cause.DATA: "waiting for data",
    Cause.VALIDATION: "validation, and comparisons of gradients from low-precision and high-precision products",
    Cause.CHECKPOINT: "training waited for a save",
    Cause.START: "from a start of the ranks to their first step",
    Cause.LOST: "repeated steps, steps undone by a rewind, steps without an update, and the step in which a fault occurred",
    Cause.AWAY: "no process ran, because the run had ended (stopped, lost or failed) and was not started again yet",
    Cause.RECOVERY: "from the decision on a fault to the beginning of the first step after it",
    Cause.DETECTION: "from a fault to the decision on it",
    Cause.OTHER: "none of these",
}


@dataclass(frozen=True)
class Interval:
    """A time interval with one cause; `start` and `end` are in seconds since the epoch."""

    start: float
    end: float
    cause: Cause


@dataclass(frozen=True)
class Goodput:
    """Seconds of each cause, which add up to `wall`. `share`: useful time divided by the time in which a process ran."""

    seconds: dict[Cause, float]
    steps: int
    lost_steps: int
    incidents: int

    @property
    def wall(self) -> float:
        """Seconds from the first to the last event."""
        return sum(self.seconds.values())

    @property
    def share(self) -> float | None:
        """Useful time divided by the time in which a process ran; None if no time has passed."""
        there = self.wall - self.seconds.get(Cause.AWAY, 0.0)
        return self.seconds.get(Cause.USEFUL, 0.0) / there if there > 0 else None

    def as_json(self) -> dict[str, Any]:
        """Return the values for programs, as a JSON object."""
        seconds = {cause.value: value for cause, value in self.seconds.items()}
        counts = {"steps": self.steps, "lost_steps": self.lost_steps, "incidents": self.incidents}
        return {"goodput": self.share, "wall_seconds": self.wall, "seconds": seconds, **counts}

    def rows(self) -> list[tuple[str, float, float, str]]:
        """Return (cause, seconds, share of the wall time, meaning) of each cause with more than 0 seconds, the largest first."""
        wall = self.wall or 1.0
        used = sorted(((cause, value) for cause, value in self.seconds.items() if value > 0), key=lambda row: -row[1])
        return [(cause.value, value, value / wall, MEANING[cause]) for cause, value in used]


def goodput(events: Iterable[Event]) -> Goodput:
    """Return the time account of a run. `events`: the run's events in the order in which they were written."""
    whole = list(events)
    steps, lost = _steps(whole)
    intervals = [*_of_steps(steps, lost, whole), *_of_pauses(whole), *_of_incidents(whole, steps + lost), *_of_starts(whole)]
    times = [event.time for event in whole if not isinstance(event, Sample)]
    seconds = dict.fromkeys(Cause, 0.0)
    if times:
        own = [
            event.time for event in whole if not isinstance(event, Sample | Merge)
        ] or times  # a new site logs earlier merges too
        first = min([*own, *(interval.start for interval in intervals if interval.cause is not Cause.DETECTION)])
        for piece in partition([Interval(first, max(times), Cause.OTHER), *intervals], first, max(times)):
            seconds[piece.cause] += piece.end - piece.start
    return Goodput(seconds, steps=len(steps), lost_steps=len(lost), incidents=len(of_kind(whole, Incident)))


_RANK = {cause: rank for rank, cause in enumerate(Cause)}


def partition(intervals: Iterable[Interval], start: float, end: float) -> list[Interval]:
    """Cut overlapping intervals so that each moment of [start, end] has one cause: the last one in `Cause` of the intervals that
    contain it."""
    edges: list[tuple[float, int, int]] = []
    for interval in intervals:
        low, high = max(interval.start, start), min(interval.end, end)
        if high > low:
            edges += [(low, _RANK[interval.cause], 1), (high, _RANK[interval.cause], -1)]
    edges.sort()
    causes, open_count = list(Cause), [0] * len(Cause)
    pieces: list[Interval] = []
    at = start
    for time, rank, change in edges:
        if time > at:
            top = max((i for i, count in enumerate(open_count) if count), default=None)
            if top is not None:
                pieces.append(Interval(at, time, causes[top]))
            at = time
        open_count[rank] += change
    return pieces


def _steps(events: Sequence[Event]) -> tuple[list[Step], list[Step]]:
    """Return the steps that count, and the steps whose results were discarded, because the run later started from `resumed_step`
    or rewound to a copy."""
    counted: dict[int, Step] = {}
    lost: list[Step] = []
    for event in events:
        if isinstance(event, RunStarted):
            lost += [counted.pop(step) for step in sorted(counted) if step > event.resumed_step]
        elif isinstance(event, Rewound):
            lost += [counted.pop(step) for step in sorted(counted) if event.to < step < event.step]
        elif isinstance(event, Step):
            if event.step in counted:
                lost.append(counted[event.step])
            counted[event.step] = event
    return list(counted.values()), lost


def _of_steps(steps: Sequence[Step], lost: Sequence[Step], events: Sequence[Event]) -> list[Interval]:
    found = [Interval(step.time - step.seconds, step.time, Cause.LOST) for step in lost]
    slow = _slow_times(events)
    usual = median(step.seconds for step in steps) if steps else 0.0
    for step in steps:
        start, end = step.time - step.seconds, step.time
        found.append(Interval(start, end, Cause.USEFUL))
        found.append(Interval(start, start + step.breakdown.get("data", 0.0), Cause.DATA))
        if step.seconds > usual and any(low < end and start < high for low, high in slow):
            found.append(Interval(start + usual, end, Cause.STRAGGLING))
    return found


def _slow_times(events: Sequence[Event]) -> list[tuple[float, float]]:
    ends = _recoveries(events)
    stragglers = [one for one in of_kind(events, Incident) if one.cause == Straggler.kind]
    return [(one.began, ends[one.incident].time if one.incident in ends else one.time) for one in stragglers]


def _recoveries(events: Sequence[Event]) -> dict[int, Recovery]:
    """Return the recoveries from incidents. If the controller was killed before it logged a recovery, the next start is used. There
    is no recovery from an incident that stopped the run."""
    starts, found = of_kind(events, RunStarted), dict[int, Recovery]()
    for one in of_kind(events, Incident):
        start = next((start for start in starts if start.time > one.time), None)
        if start is not None and not _stops(one.commands):
            step, lost = start.resumed_step, max(0, one.step - start.resumed_step)
            found[one.incident] = Recovery(one.incident, step, f"step {step}", lost, time=start.time)
    return found | {recovery.incident: recovery for recovery in of_kind(events, Recovery)}


def _stops(commands: Iterable[Mapping[str, Any]]) -> bool:
    """True if the response to an incident was to end the run, so that only a user can start it again."""
    return any(command.get("kind") == Stop.kind for command in commands)


def _of_pauses(events: Sequence[Event]) -> list[Interval]:
    """Return the intervals in which training paused. Each interval ends when its event was logged; for the wait for a save,
    this is only an approximation."""
    found = []
    for event in events:
        match event:
            case Validation() | PrecisionWatched():
                found.append(Interval(event.time - event.seconds, event.time, Cause.VALIDATION))
            case Skipped():
                found.append(Interval(event.time - event.seconds, event.time, Cause.LOST))
            case Checkpoint():
                found.append(Interval(event.time - event.wait_seconds, event.time, Cause.CHECKPOINT))
    return found


def _of_incidents(events: Sequence[Event], steps: Sequence[Step]) -> list[Interval]:
    """Return the intervals of detection and of recovery, and the lost time of interrupted steps. Recovery ends at the beginning
    of the first step after a restart, although the incident's event of recovery is logged later. It also ends when the run is
    stopped."""
    ends = sorted(step.time for step in steps)
    begins = sorted(step.time - step.seconds for step in steps)
    starts = sorted(start.time for start in of_kind(events, RunStarted))
    stops = [one.time for one in of_kind(events, Incident) if _stops(one.commands)]
    recovered = _recoveries(events)
    last = max((event.time for event in events), default=0.0)
    found = []
    for one in of_kind(events, Incident):
        if one.cause == Straggler.kind:
            continue
        over = recovered[one.incident].time if one.incident in recovered else last
        start, before = bisect_right(starts, over), bisect_right(ends, one.began)
        if start and starts[start - 1] > one.time:
            after = bisect_left(begins, starts[start - 1])
            over = begins[after] if after < len(begins) else over
        over = min([over, *(stop for stop in stops if stop >= one.time)])
        done = ends[before - 1] if before else one.began
        found += [
            Interval(done, one.began, Cause.LOST),
            Interval(one.began, one.time, Cause.DETECTION),
            Interval(one.time, over, Cause.RECOVERY),
        ]
    return found


def _of_starts(events: Sequence[Event]) -> list[Interval]:
    """Return the intervals from each start to its first step, and those between an end of the run and its next start."""
    found: list[Interval] = []
    start: RunStarted | None = None  # the newest, until its first step
    away: float | None = None  # since when no process has run
    for event in events:
        match event:
            case RunStarted():
                start = event
                if away is not None:
                    found.append(Interval(away, event.time, Cause.AWAY))
                away = None
            case Step() if start is not None:
                found.append(Interval(start.time, max(start.time, event.time - event.seconds), Cause.START))
                start = None
            case Incident():  # logged after the end of the ranks
                away = event.time if _stops(event.commands) else None
            case RunFinished():
                away = event.time
    return found


# Incidents


@dataclass(frozen=True)
class PostMortem:
    """Summary of one incident. Times are in seconds since the epoch, durations in seconds. `over`: time of the incident's end;
    None: it has not ended."""

    incident: int
    cause: str
    reason: str
    step: int
    node: str | None
    rank: int | None
    began: float
    decided: float
    over: float | None
    restored: str | None
    lost_steps: int
    evidence: dict[str, Any]
    commands: tuple[dict[str, Any], ...]
    timeline: tuple[tuple[float, str], ...] = ()

    @property
    def detection(self) -> float:
        """Seconds from the fault to the decision."""
        return max(0.0, self.decided - self.began)

    @property
    def recovery(self) -> float | None:
        """Seconds from the decision until the ranks continued; None if they have not."""
        return None if self.over is None else max(0.0, self.over - self.decided)

    def as_json(self) -> dict[str, Any]:
        """Return the values for programs, as a JSON object."""
        return asdict(self) | {"detection_seconds": self.detection, "recovery_seconds": self.recovery}

    def text(self) -> str:
        """The incident as text for a person: its cause, the blamed node, the response, and the costs."""
        whom = self.node and (f"{self.node}, rank {self.rank}" if self.rank is not None else self.node)
        if self.recovery is not None:
            repeated = f"{self.lost_steps} step{'s' * (self.lost_steps != 1)} repeated"
            then = f"{self.recovery:.2f} s until the ranks resumed, {repeated}"
        elif _stops(self.commands):
            then = "the run stopped"
        else:
            then = "the incident is not over: the ranks have not resumed"
        orders = "; ".join(_order(command) for command in self.commands) or "nothing"
        nothing = "nothing" if self.recovery is None else "nothing: the ranks continued in place"
        lines = [
            f"incident {self.incident}: {self.cause} at step {self.step}",
            f"  what     {self.reason}",
            f"  blamed   {whom or 'nobody'}",
            f"  ordered  {orders}",
            f"  restored {self.restored or nothing}",
            f"  cost     {self.detection:.2f} s until the fault was detected, {then}",
            "  timeline",
            *(f"    {_clock(time)}  {words}" for time, words in self.timeline),
        ]
        evidence = [f"    {name} = {value}" for name, value in self.evidence.items() if name not in ("kind", "time", "step")]
        return "\n".join([*lines, "  evidence", *evidence] if evidence else lines)


def post_mortems(events: Iterable[Event]) -> list[PostMortem]:
    """Return every incident of a run, oldest first. The timeline of an incident includes others that began during it."""
    whole = list(events)
    ends = _recoveries(whole)
    found = []
    for one in of_kind(whole, Incident):
        end = ends.get(one.incident)
        found.append(
            PostMortem(
                incident=one.incident,
                cause=one.cause,
                reason=one.reason,
                step=one.step,
                node=one.node,
                rank=one.rank,
                began=one.began,
                decided=one.time,
                over=end.time if end else None,
                restored=end.restored if end else None,
                lost_steps=end.lost_steps if end else 0,
                evidence=one.evidence,
                commands=tuple(one.commands),
                timeline=_timeline(one, end, whole),
            )
        )
    return found


def _timeline(incident: Incident, end: Recovery | None, events: Sequence[Event]) -> tuple[tuple[float, str], ...]:
    starts = (start.time for start in of_kind(events, RunStarted) if start.time > incident.time)
    over = end.time if end else next(starts, max(event.time for event in events))
    began = "the incident began (estimate: the last heartbeat, or a slow rank's first slow step)"
    told = [(incident.began, began), (incident.time, f"decided: {incident.reason}")]
    for event in events:
        if incident.began <= event.time <= over and event is not incident and event is not end:
            words = _words(event)
            told += [(event.time, words)] if words else []
    if end:
        told.append((end.time, f"resumed at step {end.step}"))
    return tuple(sorted(told, key=lambda entry: entry[0]))


def _words(event: Event) -> str | None:
    match event:
        case Incident():
            return f"meanwhile incident {event.incident}: {event.reason}"
        case RunStarted():
            return f"ranks are ready, from step {event.resumed_step}"
        case Problem():
            return event.message
        case RunFinished():
            return f"ranks ended: {event.reason}"
    return None


def _order(command: Mapping[str, Any]) -> str:
    detail = [
        str(command[name]) for name in ("node", "spare", "slot", "tier", "step", "seconds") if command.get(name) is not None
    ]
    return " ".join([str(command["kind"]).replace("_", " "), *detail])


def _clock(time: float) -> str:
    return datetime.fromtimestamp(time).isoformat(sep=" ", timespec="milliseconds")
