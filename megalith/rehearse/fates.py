"""What became of each fault of a campaign, matched with the incidents in the run's event log, and incidents that no fault explains.

What is told apart rather than counted as the best case:
- a fault whose incident is another's (`Fate.hidden`): the run went on, but nobody was seen to find this one. Nobody is credited for blame
- the right node named together with others (`Fate.among`)
- incidents that no fault explains (`FalseAlarm`), one by one, with what each cost
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megalith.fleet.injection import Injection
from megalith.rehearse.faults import KINDS

EXPECTED: dict[str, tuple[str, ...]] = {
    "kill": ("rank_failed",),
    "stop": ("hang",),
    "stuck": ("hang",),
    "segfault": ("rank_failed",),
    "exception": ("rank_failed",),
    "sockets": ("rank_failed",),
    "weight": ("state_corrupt",),
    "moment": ("state_corrupt",),
    "nan": ("nonfinite",),
    "gradient": ("gradient_wrong", "state_corrupt"),
    "once": ("gradient_wrong",),
    "slow": ("straggler",),
    "preemption": ("preempted",),
    "checkpoint": ("rank_failed",),
    "altered": ("rank_failed",),
    "node": ("nodes_lost",),
    "two": ("rank_failed",),
    "copy": ("rank_failed",),
    "full": ("save_failed",),
    "shard": ("data_damaged",),
    "interface": ("rank_failed",),
    "agent": ("nodes_lost",),
    "supervisor": (),
}
"""As what each kind is to be seen."""

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Fate:
    """What became of one fault. Seconds; None: not known. `blamed` None: nobody is to be blamed.

    `interrupted`: the supervisor was killed before the run went on, which the next one's start is counted for.
    `among`: its node was named, and others with it. `hidden`: the incident is another fault's: it has another cause than this kind is
    seen as, or came for several faults at once and names another. The run went on from both; only that is known of this one.
    """

    injection: Injection
    came: float | None
    seen_as: str | None = None
    blamed: bool | None = None
    detection: float | None = None
    recovery: float | None = None
    incident: int | None = None
    among: bool = False
    hidden: bool = False
    interrupted: bool = False

    @property
    def own_recovery(self) -> float | None:
        """Seconds that the run itself took to go on."""
        return None if self.interrupted else self.recovery

    @property
    def handled(self) -> bool:
        """It came, was seen, and the run went on."""
        return self.came is not None and self.recovery is not None

    @property
    def judged(self) -> bool | None:
        """Whether the right rank was blamed; None: nobody is to be, or it was for another fault of the same incident."""
        return None if self.hidden and self.blamed else self.blamed


@dataclass(frozen=True)
class FalseAlarm:
    """An incident that no fault explains. `seconds` until the run went on, None: it did not; `lost_steps` were done again."""

    incident: int
    cause: str
    step: int
    node: str | None
    rank: int | None
    reason: str
    seconds: float | None
    lost_steps: int


def fates_of(
    injections: Sequence[Injection],
    came: Mapping[int, tuple[float, str]],
    records: Sequence[Record],
    *,
    restarts: Sequence[float] = (),
) -> list[Fate]:
    """What became of each fault: the first incident after it that it can have been; else the first at all, by which it was hidden, but for
    faults that had the run to themselves. `restarts`: seconds that each start of a killed supervisor took, in their order."""
    incidents = [record for record in records if record["type"] == "incident"]
    ends = {record["incident"]: record["time"] for record in records if record["type"] == "recovery"}
    finished = max((record["time"] for record in records if record["type"] == "run_finished"), default=None)
    pairs: list[tuple[Injection, Record | None]] = []
    for one in injections:
        at = came.get(one.number, (math.inf, ""))[0]
        after = [record for record in incidents if record["time"] >= at]
        like = [record for record in after if record["cause"] in EXPECTED[one.kind]]
        hidden = () if one.kind == "supervisor" or KINDS[one.kind].room else after[:1]
        pairs.append((one, _nearest(like, after) or next(iter(hidden), None)))
    kills = sorted(came[one.number][0] for one in injections if one.kind == "supervisor" and one.number in came)
    started = dict(zip(kills, restarts, strict=False))  # of other lengths: a problem, told as such
    fates = []
    for one, record in pairs:
        at, _ = came.get(one.number, (None, ""))
        if record is None or at is None:
            fates.append(Fate(one, at, recovery=None if at is None else started.get(at)))
            continue
        together = [other for other, theirs in pairs if theirs is record]
        over, interrupted = ends.get(record["incident"]), False
        if over is None:
            over = _went_on(records, after=record["time"]) or finished
            interrupted = over is not None and any(record["time"] < kill < over for kill in kills)
        blames = KINDS[one.kind].blames
        fates.append(
            Fate(
                one,
                at,
                seen_as=record["cause"],
                incident=record["incident"],
                blamed=_is_right(record, together, came) if blames else None,
                detection=max(0.0, record["time"] - at),
                recovery=None if over is None else max(0.0, over - record["time"]),
                among=blames and _is_right(record, together, came) and bool(_named(record) - _nodes(together, came)),
                hidden=_is_hidden(record, one, together, came),
                interrupted=interrupted,
            )
        )
    return fates


def _went_on(records: Sequence[Record], *, after: float) -> float | None:
    """When the first step of the next start was done."""
    later = iter([record for record in records if record["time"] > after])
    started = any(record["type"] == "run_started" for record in later)  # and leaves the rest
    return next((record["time"] for record in later if record["type"] == "step"), None) if started else None


def _nearest(like: Sequence[Record], after: Sequence[Record]) -> Record | None:
    """Of the incidents after a fault, the first of its kind, unless others came long before it."""
    return like[0] if like and after.index(like[0]) <= 2 else None


def _is_right(record: Record, together: Sequence[Injection], came: Mapping[int, tuple[float, str]]) -> bool:
    """Whether an incident names one of the ranks that its faults befell, or the node of one."""
    rank = _rank(record)
    if rank is not None:
        return rank in {rank for one in together for rank in one.ranks}
    return bool(_named(record) & _nodes(together, came))


def _is_hidden(record: Record, one: Injection, together: Sequence[Injection], came: Mapping[int, tuple[float, str]]) -> bool:
    """Whether an incident is that of another fault: of another cause, or one that it names where several share it."""
    if record["cause"] not in EXPECTED[one.kind]:
        return True
    others = [other for other in together if other is not one and record["cause"] in EXPECTED[other.kind]]
    return _is_right(record, others, came) and not _is_right(record, [one], came)


def _rank(record: Record) -> int | None:
    """The rank that an incident names; None: a node at most."""
    return record["rank"] if record["rank"] is not None else record["evidence"].get("rank")


def _named(record: Record) -> set[str]:
    """The nodes that an incident names, where it names no rank."""
    evidence = record["evidence"]
    if _rank(record) is not None:
        return set()
    return {record["node"], evidence.get("node"), *evidence.get("nodes", ()), *evidence.get("suspects", ())} - {None}


def _nodes(together: Sequence[Injection], came: Mapping[int, tuple[float, str]]) -> set[str]:
    return {came[one.number][1] for one in together if one.number in came}


def false_alarms(fates: Sequence[Fate], records: Sequence[Record]) -> Iterator[FalseAlarm]:
    """Incidents that no fault explains."""
    over = {record["incident"]: record for record in records if record["type"] == "recovery"}
    for record in records:
        if record["type"] == "incident" and not _is_explained(record, fates):
            end = over.get(record["incident"])
            yield FalseAlarm(
                incident=record["incident"],
                cause=record["cause"],
                step=record["step"],
                node=record["node"],
                rank=_rank(record),
                reason=record["reason"],
                seconds=None if end is None else max(0.0, end["time"] - record["time"]),
                lost_steps=0 if end is None else end["lost_steps"],
            )


def _is_explained(record: Record, fates: Sequence[Fate]) -> bool:
    """Whether an incident is what a fault was seen as, or follows from one: a damaged copy is met later, a slow rank told of twice."""
    if any(fate.incident == record["incident"] for fate in fates):
        return True
    kinds = {"copy_corrupt": ("checkpoint", "altered", "copy"), "straggler": ("slow",), "save_failed": ("full",)}
    before = [fate.injection for fate in fates if fate.came is not None and fate.came <= record["time"]]
    return any(one.kind in kinds.get(record["cause"], ()) and record["rank"] in (None, *one.ranks) for one in before)
