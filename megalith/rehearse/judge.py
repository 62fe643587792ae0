"""The judgement of a campaign, read from the two runs' event logs, from the records of the injected faults, and from the last checkpoints.

Two results are listed separately: hangs that were found late (`rehearse.hangs`), and restarts of a killed supervisor, because a
run cannot restart its own supervisor.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from megalith import events
from megalith.control.pace import percentile
from megalith.events import Event, Recovery, RunStarted, Step, of_kind
from megalith.fleet import injection
from megalith.fleet.agent import BEAT_SECONDS
from megalith.rehearse import hangs
from megalith.rehearse.campaign import CampaignRun
from megalith.rehearse.fates import FalseAlarm, Fate, false_alarms, fates_of
from megalith.rehearse.faults import KINDS
from megalith.rehearse.hangs import Hangs
from megalith.spec.fleet import FleetSpec

BLAMED = 0.98  # share of the faults for which the right rank must be blamed


@dataclass(frozen=True)
class Aims:
    """Limits on a campaign's speed; None means no limit, because speed also depends on the machine. `median`, `most`: seconds of
    recovery, in the median and at the 99th percentile; `minutes`: duration of both runs together; `silence`: the longest silence
    of a hang, as a multiple of its limit."""

    median: float | None = None
    most: float | None = None
    minutes: float | None = None
    silence: float | None = None


@dataclass(frozen=True)
class AimResult:
    """The result of one aim: the value found (None: there was nothing to measure), and the largest value allowed."""

    title: str
    unit: str
    found: float | None
    most: float

    @property
    def met(self) -> bool:
        """True if the value is at most the largest allowed, or there was nothing to measure."""
        return self.found is None or self.found <= self.most


@dataclass(frozen=True)
class Row:
    """The results of all faults of one kind."""

    kind: str
    title: str
    injected: int
    handled: int
    seen_as: str
    blamed: tuple[int, int]  # right, of so many
    detection: float | None
    recovery: float | None
    slowest: float | None
    among: int = 0
    hidden: int = 0


@dataclass(frozen=True)
class Judgement:
    """All results of a campaign. `problems` is empty if the campaign was passed.

    `same_end`: weights, moments, position, random numbers and every step's loss equal those of the run without faults. `blamed`:
    for how many faults the right rank was blamed, and of how many; `among`: how often other nodes were blamed too. `recovery_*`
    are seconds of recoveries by the run itself, without `supervisor_restarts`.
    """

    rows: tuple[Row, ...]
    problems: tuple[str, ...]
    injected: int
    handled: int
    blamed: tuple[int, int]
    recovery_median: float | None
    recovery_p99: float | None
    false_alarms: tuple[FalseAlarm, ...]
    generations: int
    lost_steps: int
    steps: int
    seconds: float
    seconds_without: float
    same_end: bool
    among: int
    hidden: int
    hangs: Hangs
    supervisor_restarts: tuple[float, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    aimed: Mapping[str, str] = field(default_factory=dict)
    asked: tuple[AimResult, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.problems

    def as_json(self) -> dict[str, Any]:
        """Return the values for programs, as a JSON object."""
        return {"ok": self.passed} | asdict(self)


def judge(
    whole: CampaignRun,
    faulted: CampaignRun,
    *,
    injections: Path,
    states: tuple[Any, Any],
    left_out: Mapping[str, str],
    aimed: Mapping[str, str],
    fleet: FleetSpec,
    timeout: float,
    aims: Aims = Aims(),
) -> Judgement:
    """Compare the run with faults to the run without faults. `states`: the end states of both runs; `timeout`: the run's
    `launch.timeout`."""
    happened = list(events.read(faulted.folder))
    fates = fates_of(injection.load(injections), injection.fired(injections), happened, restarts=faulted.supervisor_restarts)
    blamed = [fate.judged for fate in fates if fate.judged is not None]
    recoveries = sorted(
        fate.own_recovery
        for fate in fates
        if fate.own_recovery is not None and fate.injection.kind != "supervisor" and KINDS[fate.injection.kind].noticed
    )
    late = BEAT_SECONDS if _any(fates, "agent") else 0.0
    found = hangs.hangs_of(happened, fleet=fleet, timeout=timeout, seen_late=late)
    others = _other_end(states, list(events.read(whole.folder)), happened)
    judged = Judgement(
        rows=tuple(_row(kind, [fate for fate in fates if fate.injection.kind == kind]) for kind in KINDS if _any(fates, kind)),
        problems=(*others, *_problems(fates, faulted), *hangs.problems(found, fleet=fleet)),
        injected=len(fates),
        handled=sum(fate.handled for fate in fates),
        blamed=(sum(blamed), len(blamed)),
        recovery_median=median(recoveries) if recoveries else None,
        recovery_p99=percentile(recoveries, 0.99) if recoveries else None,
        false_alarms=tuple(false_alarms(fates, happened)),
        generations=len(of_kind(happened, RunStarted)),
        lost_steps=sum(recovery.lost_steps for recovery in of_kind(happened, Recovery)),
        steps=max((step.step for step in of_kind(happened, Step)), default=0),
        seconds=faulted.seconds,
        seconds_without=whole.seconds,
        same_end=not others,
        among=sum(fate.among and fate.judged is True for fate in fates),
        hidden=sum(fate.hidden for fate in fates),
        hangs=hangs.summary(found),
        supervisor_restarts=faulted.supervisor_restarts,
        left_out=left_out,
        aimed=aimed,
    )
    asked = _asked(aims, judged)
    missed = [f"{one.title} {one.found:.2f}{one.unit}, above the allowed {one.most:g}{one.unit}" for one in asked if not one.met]
    return replace(judged, asked=asked, problems=(*judged.problems, *missed))


def _asked(aims: Aims, found: Judgement) -> tuple[AimResult, ...]:
    table = (
        ("recovery in the median", " s", found.recovery_median, aims.median),
        ("recovery at the 99th percentile", " s", found.recovery_p99, aims.most),
        ("both runs", " min", (found.seconds + found.seconds_without) / 60, aims.minutes),
        ("silence of a hang", " times its limit", found.hangs.most, aims.silence),
    )
    return tuple(AimResult(title, unit, value, most) for title, unit, value, most in table if most is not None)


def _any(fates: Sequence[Fate], kind: str) -> bool:
    return any(fate.injection.kind == kind for fate in fates)


def _row(kind: str, fates: Sequence[Fate]) -> Row:
    detections = [fate.detection for fate in fates if fate.detection is not None]
    recoveries = [fate.own_recovery for fate in fates if fate.own_recovery is not None]
    seen = sorted({fate.seen_as for fate in fates if fate.seen_as})
    judged = [fate.judged for fate in fates if fate.judged is not None]
    return Row(
        kind=kind,
        title=KINDS[kind].title,
        injected=len(fates),
        handled=sum(fate.handled for fate in fates),
        seen_as=", ".join(seen),
        blamed=(sum(judged), len(judged)),
        detection=median(detections) if detections else None,
        recovery=median(recoveries) if recoveries else None,
        slowest=max(recoveries, default=None),
        among=sum(fate.among and fate.judged is True for fate in fates),
        hidden=sum(fate.hidden for fate in fates),
    )


def _other_end(states: tuple[Any, Any], whole: Sequence[Event], faulted: Sequence[Event]) -> list[str]:
    other = states[0] is None or states[0] != states[1]
    found = ["the end state differs from that of the run without faults"] if other else []
    return [*found, *_other_steps(_steps(whole), _steps(faulted))]


def _problems(fates: Sequence[Fate], ran: CampaignRun) -> list[str]:
    found = []
    if ran.by_hand:
        found.append(f"the command ended {ran.by_hand} times in a way that no fault explains")
    for fate in fates:
        one = fate.injection
        if fate.came is None:
            found.append(f"fault {one.number} ({one.kind} at step {one.step}) was never injected")
        elif not fate.handled:
            found.append(
                f"fault {one.number} ({one.kind} at step {one.step}) was not detected, or the run did not recover from it"
            )
    kills = sum(fate.injection.kind == "supervisor" and fate.came is not None for fate in fates)
    if kills != len(ran.supervisor_restarts):
        found.append(f"the supervisor was restarted {len(ran.supervisor_restarts)} times, but faults killed it {kills} times")
    judged = [fate.judged for fate in fates if fate.judged is not None]
    if judged and sum(judged) < BLAMED * len(judged):
        found.append(
            f"the right rank was blamed for {sum(judged)} of {len(judged)} faults, fewer than {BLAMED:.0%}".replace("%", " %")
        )
    return found


def _steps(events: Sequence[Event]) -> dict[int, tuple[float, float, int]]:
    """Return loss, gradient norm and tokens seen of each step. If a step was repeated, the values of the repetition count."""
    counted: dict[int, tuple[float, float, int]] = {}
    for event in events:
        if isinstance(event, RunStarted):
            counted = {step: value for step, value in counted.items() if step <= event.resumed_step}
        elif isinstance(event, Step):
            counted[event.step] = (event.loss, event.grad_norm, event.tokens_seen)
    return counted


def _other_steps(whole: dict[int, tuple[float, float, int]], faulted: dict[int, tuple[float, float, int]]) -> list[str]:
    """Describe the steps whose values differ. With the same samples and weights, a step's loss has the same bits."""
    missing = sorted(set(whole) - set(faulted))
    other = [step for step in sorted(set(whole) & set(faulted)) if whole[step] != faulted[step]]
    found = [f"steps that are not in the log: {len(missing)}, first {missing[0]}"] if missing else []
    return [*found, f"steps whose loss, gradient norm or tokens differ: {len(other)}, first {other[0]}"] if other else found
