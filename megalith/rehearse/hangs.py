"""How long ranks of a campaign were silent before the watch reported a hang, compared with the longest silence that the watch may
allow.

The watch (`control.watch`) checks a silent rank twice, half a limit apart, at turns of its loop. A silence therefore lasts at
most its limit and two turns, for which ALLOWED_SECONDS is enough. A silence can exceed its limit and two turns for two reasons,
which the log does not distinguish. Ranks that wait for a processor get more time in proportion (waiting half of the time adds
half a limit), up to MAX_LIMITS limits. A watch that gets no processor itself checks late. A lack of processors is the machine's
fault, not the run's, so late hangs are only counted and reported. A lack of processors does not explain a silence above
MAX_LIMITS limits and TURNS_SECONDS, so such a silence counts against the run.

The watch's limit is `max(hang_floor, hang_factor * the rolling 99th percentile of a step)` over the steps of all ranks
(`control.pace`). The log has only the steps of rank 0, so a limit is compared with the limit that the slowest of rank 0's newest
steps would give. A limit counts against the run if it is below the floor, or more than BETWEEN_RANKS times the limit from rank
0's steps. First steps of a start, saves and starts have other limits, for which the log has too few durations. Limits of hangs in
first steps, saves and starts are therefore not compared with rank 0's steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megalith.control.pace import KEPT
from megalith.control.watch import MAX_LIMITS
from megalith.events import Event, Incident, RunStarted, Step
from megalith.fleet import observations
from megalith.spec.fleet import FleetSpec

ALLOWED_SECONDS = 0.25  # two turns of the watch: 0.02 s each, and the time of its other work
TURNS_SECONDS = 2.0  # the most that two turns count for
BETWEEN_RANKS = 1.5  # by how much a rank's step may have been longer than rank 0's


@dataclass(frozen=True)
class Hang:
    """One hang. `pace`: the largest limit that rank 0's steps justify; None: the hang was not in a running step, or there were no
    step times yet."""

    incident: int
    silence: float
    limit: float
    pace: float | None

    @property
    def late(self) -> bool:
        """True if the silence was longer than the limit and two turns of the watch."""
        return self.silence > self.limit + ALLOWED_SECONDS


@dataclass(frozen=True)
class Hangs:
    """All hangs of a campaign. `most`: the longest silence as a multiple of its own limit; `limits`: the smallest and largest
    limit of hangs in running steps; `of_pace`: the largest limit as a multiple of the limit that rank 0's steps justify."""

    found: int = 0
    most: float | None = None
    late: int = 0
    limits: tuple[float, float] | None = None
    of_pace: float | None = None
    elsewhere: int = 0  # not in a running step: first steps, saves, starts
    elsewhere_limit: float | None = None


def hangs_of(events: Sequence[Event], *, fleet: FleetSpec, timeout: float, seen_late: float = 0.0) -> list[Hang]:
    """Return the hangs in a log.

    `timeout`: the limit before a rank has a pace (`launch.timeout`). `seen_late`: how many seconds more the watch may need to see
    one heartbeat than to see another. The longest step that the watch measures may therefore exceed the longest step in the log
    by `seen_late` seconds.
    """
    found: list[Hang] = []
    took: list[float] = []
    before, resumed, window = None, 0, KEPT
    for event in events:
        match event:
            case RunStarted():
                before, resumed, window = None, event.resumed_step, KEPT // max(1, event.world) + 1
            case Step():
                if (
                    before is not None
                ):  # from one step's end to the next: as a rank's beats are, with copies and saves between them
                    took.append(max(event.seconds, event.time - before))
                before = event.time
            case Incident(cause=observations.Hang.kind):
                observation = observations.load(event.evidence)
                assert isinstance(observation, observations.Hang), observation
                running = observation.phase == "step" and observation.step > resumed + 1  # all ranks are beyond their first
                slowest = max(took[-window:], default=None)
                paced = running and slowest is not None and observation.limit != timeout
                pace = max(fleet.hang_floor, fleet.hang_factor * (slowest + seen_late)) if paced and slowest is not None else None
                found.append(Hang(event.incident, observation.silence, observation.limit, pace))
    return found


def summary(hangs: Sequence[Hang]) -> Hangs:
    """Return the number of hangs, and their longest silence and limits."""
    running = [(hang.limit, hang.pace) for hang in hangs if hang.pace is not None]
    others = [hang.limit for hang in hangs if hang.pace is None]
    limits = [limit for limit, _ in running]
    return Hangs(
        found=len(hangs),
        most=max((hang.silence / hang.limit for hang in hangs), default=None),
        late=sum(hang.late for hang in hangs),
        limits=(min(limits), max(limits)) if limits else None,
        of_pace=max((limit / pace for limit, pace in running), default=None),
        elsewhere=len(others),
        elsewhere_limit=max(others, default=None),
    )


def problems(hangs: Sequence[Hang], *, fleet: FleetSpec) -> list[str]:
    """Return the problems that the machine cannot have caused."""
    found = []
    for hang in hangs:
        name = f"hang (incident {hang.incident})"
        if hang.silence > MAX_LIMITS * hang.limit + TURNS_SECONDS:
            found.append(f"{name}: silent for {hang.silence:.2f} s, more than {MAX_LIMITS} times its limit of {hang.limit:.2f} s")
        if hang.limit < fleet.hang_floor:
            found.append(f"{name}: its limit of {hang.limit:.2f} s is below fleet.hang_floor = {fleet.hang_floor:g} s")
        if hang.pace is not None and hang.limit > BETWEEN_RANKS * hang.pace:
            found.append(f"{name}: its limit of {hang.limit:.2f} s is larger than rank 0's steps justify, {hang.pace:.2f} s")
    return found
