"""Where a run's time went, what each incident cost, and what is known of each node. Read from records only: no clock of its own.

Every moment between a run's first and last event has exactly one cause, so the causes add up to the wall time. Names follow the
goodput measurement of Google's ml-goodput library, with detection and recovery apart.
"""

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from enum import StrEnum
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, Literal

from megalith import disk
from megalith.control.policy import State

Record = Mapping[str, Any]
"""One event as it stands in the log (`events.read`)."""


class Cause(StrEnum):
    """What a moment was spent on. Where two could claim it, the later in this list has it."""

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
    Cause.STRAGGLING: "what steps took beyond their median while a rank was known to be slow",
    Cause.DATA: "waiting for data",
    Cause.VALIDATION: "validation",
    Cause.CHECKPOINT: "training stood still for a save",
    Cause.START: "from a start to its first step",
    Cause.LOST: "steps that had to be done again, and the step in which a fault came",
    Cause.AWAY: "no process ran: stopped, or waiting for the scheduler",
    Cause.RECOVERY: "from a decision to the first step after it",
    Cause.DETECTION: "from a fault to the decision about it",
    Cause.OTHER: "nothing of these",
}


@dataclass(frozen=True)
class Interval:
    """Seconds since the epoch."""

    start: float
    end: float
    cause: Cause


@dataclass(frozen=True)
class Goodput:
    """Seconds by cause; they add up to `wall`. `share` is useful time over all time in which the run was not away."""

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
        """0..1; None before there is any time to divide by."""
        there = self.wall - self.seconds.get(Cause.AWAY, 0.0)
        return self.seconds.get(Cause.USEFUL, 0.0) / there if there > 0 else None

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        seconds = {cause.value: value for cause, value in self.seconds.items()}
        counts = {"steps": self.steps, "lost_steps": self.lost_steps, "incidents": self.incidents}
        return {"goodput": self.share, "wall_seconds": self.wall, "seconds": seconds, **counts}

    def rows(self) -> list[tuple[str, float, float, str]]:
        """(cause, seconds, share of the wall time, meaning) of each cause that took time, largest first."""
        wall = self.wall or 1.0
        used = sorted(((cause, value) for cause, value in self.seconds.items() if value > 0), key=lambda row: -row[1])
        return [(cause.value, value, value / wall, MEANING[cause]) for cause, value in used]


def goodput(records: Iterable[Record]) -> Goodput:
    """The account of a run, from its events in the order of their writing."""
    whole = list(records)
    steps, lost = _steps(whole)
    intervals = [*_of_steps(steps, lost, whole), *_of_pauses(whole), *_of_incidents(whole, steps + lost), *_of_starts(whole)]
    times = [record["time"] for record in whole if record["type"] != "sample"]
    seconds = dict.fromkeys(Cause, 0.0)
    if times:
        first = min([min(times), *(interval.start for interval in intervals if interval.cause is not Cause.DETECTION)])
        for piece in partition([Interval(first, max(times), Cause.OTHER), *intervals], first, max(times)):
            seconds[piece.cause] += piece.end - piece.start
    incidents = sum(record["type"] == "incident" for record in whole)
    return Goodput(seconds, steps=len(steps), lost_steps=len(lost), incidents=incidents)


_RANK = {cause: rank for rank, cause in enumerate(Cause)}


def partition(intervals: Iterable[Interval], start: float, end: float) -> list[Interval]:
    """Cut overlapping intervals so that each moment of [start, end] has one cause: the last in `Cause` of those that claim it."""
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


def _steps(records: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """Steps that count, and those whose result was thrown away: a start goes back to `resumed_step`."""
    counted: dict[int, Record] = {}
    lost: list[Record] = []
    for record in records:
        if record["type"] == "run_started":
            lost += [counted.pop(step) for step in sorted(counted) if step > record["resumed_step"]]
        elif record["type"] == "step":
            if record["step"] in counted:
                lost.append(counted[record["step"]])
            counted[record["step"]] = record
    return list(counted.values()), lost


def _of_steps(steps: Sequence[Record], lost: Sequence[Record], records: Sequence[Record]) -> list[Interval]:
    found = [Interval(step["time"] - step["seconds"], step["time"], Cause.LOST) for step in lost]
    slow = _slow_times(records)
    usual = median(step["seconds"] for step in steps) if steps else 0.0
    for step in steps:
        start, end = step["time"] - step["seconds"], step["time"]
        found.append(Interval(start, end, Cause.USEFUL))
        found.append(Interval(start, start + step.get("breakdown", {}).get("data", 0.0), Cause.DATA))
        if step["seconds"] > usual and any(low < end and start < high for low, high in slow):
            found.append(Interval(start + usual, end, Cause.STRAGGLING))
    return found


def _slow_times(records: Sequence[Record]) -> list[tuple[float, float]]:
    """When a straggler was being borne: from its first slow step to the end of the incident."""
    ends = {record["incident"]: record["time"] for record in records if record["type"] == "recovery"}
    return [
        (record["began"], ends.get(record["incident"], record["time"]))
        for record in records
        if record["type"] == "incident" and record["cause"] == "straggler"
    ]


def _of_pauses(records: Sequence[Record]) -> list[Interval]:
    """A validation stands right before its event. A save's wait is somewhere before its event: as late as possible is near enough."""
    waits = {"validation": ("seconds", Cause.VALIDATION), "checkpoint": ("wait_seconds", Cause.CHECKPOINT)}
    found = []
    for record in records:
        if record["type"] in waits:
            name, cause = waits[record["type"]]
            found.append(Interval(record["time"] - record[name], record["time"], cause))
    return found


def _of_incidents(records: Sequence[Record], steps: Sequence[Record]) -> list[Interval]:
    """Detection, then recovery up to the first step after it. What the broken step had done is lost, too.

    That step's own time is none of it, though the incident is over only once that step is seen to run.
    """
    ends = sorted(step["time"] for step in steps)
    begins = sorted(step["time"] - step["seconds"] for step in steps)
    starts = sorted(record["time"] for record in records if record["type"] == "run_started")
    recovered = {record["incident"]: record["time"] for record in records if record["type"] == "recovery"}
    last = max((record["time"] for record in records), default=0.0)
    found = []
    for record in records:
        if record["type"] != "incident" or record["cause"] == "straggler":
            continue
        over = recovered.get(record["incident"], last)
        start, before = bisect_right(starts, over), bisect_right(ends, record["began"])
        if start and starts[start - 1] > record["time"]:
            after = bisect_left(begins, starts[start - 1])
            over = begins[after] if after < len(begins) else over
        done = ends[before - 1] if before else record["began"]
        found += [
            Interval(done, record["began"], Cause.LOST),
            Interval(record["began"], record["time"], Cause.DETECTION),
            Interval(record["time"], over, Cause.RECOVERY),
        ]
    return found


def _of_starts(records: Sequence[Record]) -> list[Interval]:
    """From each start to its first step; before a start that follows no incident, the run was away since the last event."""
    found = []
    before: float | None = None
    for i, record in enumerate(records):
        if record["type"] == "run_started":
            first = next((step for step in islice(records, i + 1, None) if step["type"] in ("step", "run_started")), None)
            if first is not None and first["type"] == "step":
                found.append(Interval(record["time"], max(record["time"], first["time"] - first["seconds"]), Cause.START))
            if before is not None:
                found.append(Interval(before, record["time"], Cause.AWAY))
        before = None if record["type"] == "incident" else record["time"] if record["type"] == "run_finished" else before
    return found


# Incidents


@dataclass(frozen=True)
class PostMortem:
    """One incident from its beginning to its end. Times in seconds since the epoch, costs in seconds; `over` None: it is not over."""

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
        """Seconds from the decision until the ranks went on."""
        return None if self.over is None else max(0.0, self.over - self.decided)

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return asdict(self) | {"detection_seconds": self.detection, "recovery_seconds": self.recovery}

    def text(self) -> str:
        """A page for people: what happened, whose fault, what was done, what it cost."""
        whom = self.node and (f"{self.node}, rank {self.rank}" if self.rank is not None else self.node)
        cost = f"{self.detection:.2f} s until it was seen, " + (
            "not over"
            if self.recovery is None
            else f"{self.recovery:.2f} s until the ranks went on, {self.lost_steps} steps again"
        )
        orders = "; ".join(_order(command) for command in self.commands) or "nothing"
        lines = [
            f"incident {self.incident}: {self.cause} at step {self.step}",
            f"  what     {self.reason}",
            f"  blamed   {whom or 'nobody'}",
            f"  ordered  {orders}",
            f"  restored {self.restored or 'nothing: went on in place'}",
            f"  cost     {cost}",
            "  timeline",
            *(f"    {_clock(time)}  {words}" for time, words in self.timeline),
        ]
        evidence = [f"    {name} = {value}" for name, value in self.evidence.items() if name not in ("kind", "time", "step")]
        return "\n".join([*lines, "  evidence", *evidence] if evidence else lines)


def post_mortems(records: Iterable[Record]) -> list[PostMortem]:
    """Every incident of a run, oldest first. An incident that came while another was being dealt with is in both timelines."""
    whole = list(records)
    ends = {record["incident"]: record for record in whole if record["type"] == "recovery"}
    found = []
    for record in whole:
        if record["type"] != "incident":
            continue
        end = ends.get(record["incident"])
        found.append(
            PostMortem(
                **{name: record[name] for name in ("incident", "cause", "reason", "step", "node", "rank", "began", "evidence")},
                decided=record["time"],
                over=end["time"] if end else None,
                restored=end["restored"] if end else None,
                lost_steps=end["lost_steps"] if end else 0,
                commands=tuple(record["commands"]),
                timeline=_timeline(record, end, whole),
            )
        )
    return found


def _timeline(incident: Record, end: Record | None, records: Sequence[Record]) -> tuple[tuple[float, str], ...]:
    over = end["time"] if end else max(record["time"] for record in records)
    told = [(incident["began"], "it happened (last sign of life)"), (incident["time"], f"decided: {incident['reason']}")]
    for record in records:
        if incident["began"] <= record["time"] <= over and record is not incident and record is not end:
            words = _words(record)
            told += [(record["time"], words)] if words else []
    if end:
        told.append((end["time"], f"going on at step {end['step']}"))
    return tuple(sorted(told, key=lambda entry: entry[0]))


def _words(record: Record) -> str | None:
    match record["type"]:
        case "incident":
            return f"meanwhile incident {record['incident']}: {record['reason']}"
        case "run_started":
            return f"ranks are ready, from step {record['resumed_step']}"
        case "problem":
            return record["message"]
        case "run_finished":
            return f"ranks ended: {record['reason']}"
    return None


def _order(command: Mapping[str, Any]) -> str:
    detail = [
        str(command[name]) for name in ("node", "spare", "slot", "tier", "step", "seconds") if command.get(name) is not None
    ]
    return " ".join([str(command["kind"]).replace("_", " "), *detail])


def _clock(time: float) -> str:
    return datetime.fromtimestamp(time).isoformat(sep=" ", timespec="milliseconds")


# Nodes

NODES_FILE = "nodes.jsonl"


@dataclass(frozen=True)
class NodeRecord:
    """One thing that happened to a node. `time`: seconds since the epoch."""

    time: float
    node: str
    what: Literal["fault", "quarantined", "check passed", "check failed"]
    detail: str = ""
    run: str = ""


@dataclass(frozen=True)
class Standing:
    """What is known of a node. `quarantined` since when, None: it may be used. `faults` are (time, detail) since it last passed a check,
    oldest first."""

    node: str
    faults: tuple[tuple[float, str], ...] = ()
    quarantined: float | None = None
    checks: tuple[tuple[float, bool], ...] = field(default=())

    def faults_since(self, time: float) -> tuple[float, ...]:
        """When it had faults after a time."""
        return tuple(at for at, _ in self.faults if at > time)


def note(path: Path, record: NodeRecord) -> None:
    """Append to a ledger of nodes; it outlives runs, and several runs may write to one. One write a record; none on a full disk, or one
    that is away."""
    line = json.dumps(asdict(record), separators=(",", ":")) + "\n"
    with disk.if_available(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b", buffering=0) as file:
            disk.append(file.fileno(), line.encode())


def read_nodes(path: Path) -> list[NodeRecord]:
    """A ledger of nodes, oldest first; empty when there is none. Torn lines are left out."""
    return [NodeRecord(**record) for record in disk.lines(path)]


def standings(records: Iterable[NodeRecord]) -> dict[str, Standing]:
    """What the records say of each node, in the order in which nodes first appear."""
    found: dict[str, Standing] = {}
    for record in records:
        old = found.get(record.node, Standing(record.node))
        faults, out, checks = old.faults, old.quarantined, old.checks
        match record.what:
            case "fault":
                faults = (*faults, (record.time, record.detail))
            case "quarantined":
                out = record.time if out is None else out
            case "check passed":
                out, faults, checks = None, (), (*checks, (record.time, True))
            case "check failed":
                out, checks = record.time if out is None else out, (*checks, (record.time, False))
        found[record.node] = Standing(record.node, faults, out, checks)
    return found


def node_changes(before: State, after: State, *, time: float, reason: str, run: str) -> list[NodeRecord]:
    """What a decision of the policy means for nodes: `standings` of all of them says what the state does."""
    found = []
    for node, times in after.faults.items():
        if times and times[-1:] != before.faults.get(node, ())[-1:]:
            found.append(NodeRecord(times[-1], node, "fault", reason, run))
    new = [(node, at) for node, at in after.quarantined.items() if node not in before.quarantined]
    found += [NodeRecord(at, node, "quarantined", reason, run) for node, at in new]
    failed = [node for node, count in after.failed_checks.items() if count > before.failed_checks.get(node, 0)]
    found += [NodeRecord(time, node, "check failed", reason, run) for node in failed]
    passed = [node for node in before.quarantined if node not in after.quarantined]
    return [*found, *(NodeRecord(time, node, "check passed", reason, run) for node in passed)]
