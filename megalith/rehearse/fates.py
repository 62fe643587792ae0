"""Matches each fault of a campaign with an incident in the run's event log, and finds incidents that no fault explains.

The following are also counted separately:
- a fault whose incident belongs to another fault (`Fate.hidden`): the run resumed, but this fault was not detected separately, and
  a right blame does not count
- a fault whose node was named together with other nodes (`Fate.among`)
- incidents that no fault explains (`FalseAlarm`), one by one, with what each cost
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megalith.events import Event, Incident, Recovery, RunFinished, RunStarted, Step, of_kind
from megalith.fleet import observations
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
    "torn-chunk": ("rank_failed",),
    "altered-chunk": ("rank_failed",),
    "state-disk-full": ("rank_failed",),
    "slow-disk": (),
    "interface": ("rank_failed",),
    "agent": ("nodes_lost",),
    "supervisor": (),
}
"""The observations as which each kind of fault should be reported; none if it needs no report."""

_OfRank = (
    observations.RankFailed
    | observations.Hang
    | observations.Nonfinite
    | observations.StateCorrupt
    | observations.Straggler
    | observations.Preempted
)
"""Observations that name a rank and its node."""


@dataclass(frozen=True)
class Fate:
    """Fate of one fault. Times are in seconds; None: not known. `blamed`: True if the right rank or node was blamed; None if no
    node is at fault.

    `interrupted`: the supervisor was killed before the run resumed, so the recovery lasts until the supervisor has started again.
    `among`: the fault's node was blamed together with others. `hidden`: the incident belongs to another fault, because its cause
    is not an observation expected for this kind, or because several faults share it and it names a rank of another fault. The run
    resumed after the hidden fault and after the other fault, but nothing else is known about the hidden fault.
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
        """Seconds that the run took to resume; None if a killed supervisor had to be started again first."""
        return None if self.interrupted else self.recovery

    @property
    def handled(self) -> bool:
        """True if the fault was injected and detected, and the run resumed."""
        return self.came is not None and self.recovery is not None

    @property
    def judged(self) -> bool | None:
        """True if the right rank was blamed; None if no rank is at fault, or if the blame is right but the fault is hidden by
        another one."""
        return None if self.hidden and self.blamed else self.blamed


@dataclass(frozen=True)
class FalseAlarm:
    """An incident that no fault explains. `seconds`: the time until the run resumed (None if it did not resume); `lost_steps`:
    the number of repeated steps."""

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
    events: Sequence[Event],
    *,
    restarts: Sequence[float] = (),
) -> list[Fate]:
    """Match each fault with the first later incident of an expected kind, if at most two other incidents come before it. If that one
    belongs to an earlier fault, and was logged only after this one came, the first incident that names this fault's own rank is preferred.
    A fault without an incident of an expected kind among the first three is matched with the first later incident of any kind, which then
    hides the fault; killed supervisors, kinds with `room` and kinds that need no incident are not matched in this way. `restarts`: the
    seconds that each start after a killed supervisor took, in order."""
    incidents = of_kind(events, Incident)
    ends = {recovery.incident: recovery.time for recovery in of_kind(events, Recovery)}
    finished = max((end.time for end in of_kind(events, RunFinished)), default=None)
    pairs: list[tuple[Injection, Incident | None]] = []
    for one in injections:
        at = came.get(one.number, (math.inf, ""))[0]
        after = [incident for incident in incidents if incident.time >= at]
        like = [incident for incident in after if incident.cause in EXPECTED[one.kind]]
        hidden = () if one.kind == "supervisor" or KINDS[one.kind].room or not KINDS[one.kind].noticed else after[:1]
        nearest = _nearest(like, after)
        if nearest is not None and _rank(nearest) in _waiting(one, injections, came, incidents) - {*one.ranks}:
            nearest = _nearest([incident for incident in like if _rank(incident) in one.ranks], after) or nearest
        pairs.append((one, nearest or next(iter(hidden), None)))
    kills = sorted(came[one.number][0] for one in injections if one.kind == "supervisor" and one.number in came)
    started = dict(zip(kills, restarts, strict=False))  # of other lengths: a problem, told as such
    fates = []
    for one, incident in pairs:
        at, _ = came.get(one.number, (None, ""))
        if incident is None or at is None:
            fates.append(Fate(one, at, recovery=_without_incident(one, at, events, started)))
            continue
        together = [other for other, theirs in pairs if theirs is incident]
        over, interrupted = ends.get(incident.incident), False
        if over is None:
            over = _went_on(events, after=incident.time) or finished
            interrupted = over is not None and any(incident.time < kill < over for kill in kills)
        blames = KINDS[one.kind].blames
        fates.append(
            Fate(
                one,
                at,
                seen_as=incident.cause,
                incident=incident.incident,
                blamed=_is_right(incident, together, came) if blames else None,
                detection=max(0.0, incident.time - at),
                recovery=None if over is None else max(0.0, over - incident.time),
                among=blames and _is_right(incident, together, came) and bool(_named(incident) - _nodes(together, came)),
                hidden=_is_hidden(incident, one, together, came),
                interrupted=interrupted,
            )
        )
    return fates


def _waiting(
    one: Injection, injections: Sequence[Injection], came: Mapping[int, tuple[float, str]], incidents: Sequence[Incident]
) -> set[int]:
    """Return the ranks of the two faults before, if their kinds are reported like this one's and their incidents were not logged yet when
    it came."""
    at, found = came[one.number][0], set[int]()
    for other in injections:
        earlier = came.get(other.number, (math.inf, ""))[0]
        if not 0 < one.number - other.number <= 2 or earlier > at or not {*EXPECTED[other.kind]} & {*EXPECTED[one.kind]}:
            continue
        between = (incident for incident in incidents if earlier <= incident.time < at and incident.cause in EXPECTED[other.kind])
        if not any(_rank(incident) in other.ranks for incident in between):
            found.update(other.ranks)
    return found


def _without_incident(one: Injection, at: float | None, events: Sequence[Event], started: Mapping[float, float]) -> float | None:
    """Return the seconds until the run went on after a fault that came at `at` and has no incident; None if it did not go on, or if
    such a fault must have an incident."""
    if at is None or KINDS[one.kind].noticed:
        return None if at is None else started.get(at)
    return next((step.time - at for step in of_kind(events, Step) if step.time >= at), None)


def _went_on(events: Sequence[Event], *, after: float) -> float | None:
    """Return the time at which the next start after `after` finished its first step; None if there was no such start or step."""
    later = iter([event for event in events if event.time > after])
    started = any(isinstance(event, RunStarted) for event in later)  # and leaves the rest
    return next((event.time for event in later if isinstance(event, Step)), None) if started else None


def _nearest(like: Sequence[Incident], after: Sequence[Incident]) -> Incident | None:
    """Return the first incident in `like` if at most two other incidents of `after` come before it; else None."""
    return like[0] if like and after.index(like[0]) <= 2 else None


def _is_right(incident: Incident, together: Sequence[Injection], came: Mapping[int, tuple[float, str]]) -> bool:
    rank = _rank(incident)
    if rank is not None:
        return rank in {rank for one in together for rank in one.ranks}
    return bool(_named(incident) & _nodes(together, came))


def _is_hidden(incident: Incident, one: Injection, together: Sequence[Injection], came: Mapping[int, tuple[float, str]]) -> bool:
    """True if an incident belongs to another fault: its cause is not expected for this fault's kind, or several faults share the
    incident and it names a rank of another fault."""
    if incident.cause not in EXPECTED[one.kind]:
        return True
    others = [other for other in together if other is not one and incident.cause in EXPECTED[other.kind]]
    return _is_right(incident, others, came) and not _is_right(incident, [one], came)


def _rank(incident: Incident) -> int | None:
    if incident.rank is not None:
        return incident.rank
    observation = observations.load(incident.evidence)
    return observation.rank if isinstance(observation, _OfRank) else None


def _named(incident: Incident) -> set[str]:
    if _rank(incident) is not None:
        return set()
    observation, blamed = observations.load(incident.evidence), {incident.node}
    if isinstance(observation, observations.NodesLost):
        blamed |= {*observation.nodes}
    elif isinstance(observation, observations.GradientWrong):
        blamed |= {*observation.suspects}
    elif isinstance(observation, _OfRank | observations.NodeJoined | observations.HealthChecked):
        blamed |= {observation.node}
    return {node for node in blamed if node is not None}


def _nodes(together: Sequence[Injection], came: Mapping[int, tuple[float, str]]) -> set[str]:
    return {came[one.number][1] for one in together if one.number in came}


def false_alarms(fates: Sequence[Fate], events: Sequence[Event]) -> Iterator[FalseAlarm]:
    """Yield the incidents that no fault explains."""
    over = {recovery.incident: recovery for recovery in of_kind(events, Recovery)}
    for incident in of_kind(events, Incident):
        if not _is_explained(incident, fates):
            end = over.get(incident.incident)
            yield FalseAlarm(
                incident=incident.incident,
                cause=incident.cause,
                step=incident.step,
                node=incident.node,
                rank=_rank(incident),
                reason=incident.reason,
                seconds=None if end is None else max(0.0, end.time - incident.time),
                lost_steps=0 if end is None else end.lost_steps,
            )


def _is_explained(incident: Incident, fates: Sequence[Fate]) -> bool:
    """True if a fault explains an incident: the incident is the expected observation of the fault, or a later consequence, such
    as a damaged copy found at the next load or a second report of a slow rank."""
    if any(fate.incident == incident.incident for fate in fates):
        return True
    damaged = ("checkpoint", "altered", "copy", "torn-chunk", "altered-chunk")
    kinds = {"copy_corrupt": damaged, "straggler": ("slow",), "save_failed": ("full",)}
    before = [fate.injection for fate in fates if fate.came is not None and fate.came <= incident.time]
    return any(one.kind in kinds.get(incident.cause, ()) and incident.rank in (None, *one.ranks) for one in before)
