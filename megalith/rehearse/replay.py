"""Replays a campaign in the simulator: the same faults at the same steps, the same policy, and the latencies of the campaign's log.

A replay compares the simulator with a run that had real faults: its goodput, and each cause of lost time.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop
from itertools import pairwise, takewhile
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from megalith import epochs, events
from megalith.control import ledger, policy
from megalith.control.ledger import Cause, Goodput
from megalith.events import Event, Incident, Recovery, RunStarted, Step, of_kind
from megalith.fleet import injection, observations, tiers
from megalith.fleet.commands import Command, Restart
from megalith.fleet.injection import Injection
from megalith.fleet.rank_info import slot_of
from megalith.fleet.tiers import Copy, Source, Tier
from megalith.rehearse.arrivals import Fault
from megalith.rehearse.campaign import FAULTED, LISTED, REPAIR_SECONDS
from megalith.rehearse.latencies import PROFILES, Latencies, calibrated
from megalith.rehearse.scenario import HOUR, Scenario, TimeUse
from megalith.rehearse.site import LIMIT, Site
from megalith.spec.run import RunSpec

SHOWS: dict[str, str] = {
    "kill": "crash", "segfault": "crash", "sockets": "crash", "two": "crash", "copy": "crash", "checkpoint": "crash", "altered": "crash",
    "exception": "bug", "stop": "hang", "stuck": "hang", "weight": "corrupt state", "moment": "corrupt state", "nan": "not finite",
    "interface": "crash", "preemption": "preemption", "node": "node lost",
    "agent": "node lost", "torn-chunk": "crash", "altered-chunk": "crash", "state-disk-full": "crash",
}  # fmt: skip
"""Kind of a campaign's fault -> its symptom in the simulator; `_Hurt.own` handles the other kinds."""

LOST = ("node", "interface", "agent")
"""Kinds of fault after which a node is away until it is repaired."""

CHECK_SECONDS = 1.0  # that a node's health check takes on one machine

_UNSEEN = replace(PROFILES["memory"], restore=dict.fromkeys(PROFILES["memory"].restore, 0.0))
"""Assumed latencies that a campaign's log does not contain: its state is small, so unused tiers are assumed to be as fast as the
used ones."""


@dataclass(frozen=True)
class Figures:
    """Latencies of a campaign's log, in seconds. `step`: the time of a step that is not the first of a start; `overhead`: the
    additional time between steps, as a fraction of a step; `first`: the extra time of the first step after a recovery; `partial`:
    the time between the last finished step and a fault; `failed`: the length of a start that ended in another fault; `slow`: the
    time that a straggler costs until the decision about it."""

    step: float
    overhead: float
    first: float
    partial: float
    failed: float
    slow: float
    latencies: Latencies


@dataclass(frozen=True)
class ReplayedCampaign:
    """A campaign's record, and the simulation of its list of faults. `seconds`: the predicted seconds of each use of time."""

    recorded: Goodput
    figures: Figures
    seconds: dict[TimeUse, float]
    restarts: int

    @property
    def wall(self) -> float:
        """Predicted seconds of the run, without those in which it waited for a person."""
        return sum(self.seconds.values()) - self.seconds[TimeUse.PERSON]

    @property
    def goodput(self) -> float:
        """Predicted goodput. The predicted goodput counts the useful time of the recorded run."""
        return self.recorded.seconds[Cause.USEFUL] / self.wall

    @property
    def gap(self) -> float:
        """Relative difference between the predicted and the recorded goodput."""
        assert self.recorded.share, "a campaign in which no step was finished"
        return self.goodput / self.recorded.share - 1

    def rows(self) -> list[tuple[str, float, float]]:
        """The table's rows: use of time, recorded seconds, predicted seconds."""
        then, now = self.recorded.seconds, self.seconds
        apart = (Cause.LOST, Cause.DETECTION, Cause.RECOVERY, Cause.AWAY)
        steps = sum(seconds for cause, seconds in then.items() if cause not in apart)
        return [
            ("steps that count", steps, now[TimeUse.USEFUL] + now[TimeUse.CHECKPOINT] + now[TimeUse.STRAGGLING]),
            ("lost steps", then[Cause.LOST], now[TimeUse.LOST]),
            ("detection", then[Cause.DETECTION], now[TimeUse.DETECTION]),
            ("recovery", then[Cause.RECOVERY], now[TimeUse.RECOVERY] + now[TimeUse.WAITING]),
        ]

    def as_json(self) -> dict[str, Any]:
        """Return the comparison as values for JSON."""
        rows = [{"what": what, "recorded": recorded, "predicted": predicted} for what, recorded, predicted in self.rows()]
        return {
            "goodput": self.goodput,
            "recorded": self.recorded.share,
            "gap": self.gap,
            "restarts": self.restarts,
            "seconds": rows,
        }


def replay(folder: Path, *, like: Path | None = None) -> ReplayedCampaign:
    """Replay the campaign in a folder. `like`: the folder of another campaign whose log gives the latencies; by default this
    campaign's own log does.

    Raises FileNotFoundError if there is no campaign in the folder, ValueError if its log has no step.
    """
    run = folder / FAULTED
    described = epochs.newest(run, "spec.json")
    if not described.is_file():
        raise FileNotFoundError(
            f"{folder} holds no campaign: it has no {FAULTED}/spec.json. Give the folder that `megalith campaign` named"
        )
    spec = RunSpec.model_validate_json(described.read_text(encoding="utf-8"))
    recorded = ledger.goodput(list(events.read(run)))
    if not recorded.steps:
        raise ValueError(f"{run} has no step in its log: the campaign ended before the first step. Run it again")
    figures = measured(list(events.read(like / FAULTED if like else run)))
    site = _Hurt(spec, figures, injection.load(folder / LISTED)).live()
    return ReplayedCampaign(recorded, figures, site.seconds, site.tally.restarts.total())


def measured(records: Sequence[Event]) -> Figures:
    """Return the latencies in a log as means rather than medians, so that their totals are correct."""
    incidents = of_kind(records, Incident)
    over = {one.incident: one.time for one in of_kind(records, Recovery)}
    failed = [b.time - a.time for a, b in pairwise(incidents) if _restarts(a) and b.time < over.get(a.incident, 0.0)]
    slow = [one for one in incidents if one.cause == observations.Straggler.kind and _restarts(one)]
    marks = [one for one in records if isinstance(one, Step | Incident | RunStarted)]
    later = [(before, one) for before, one in pairwise(marks) if isinstance(before, Step) and isinstance(one, Step)]
    step = _mean([one.seconds for _, one in later if not _is_slow(one, slow)])
    sudden = [(before, one) for before, one in pairwise(marks) if isinstance(before, Step) and isinstance(one, Incident)]
    return Figures(
        step=step,
        overhead=_mean([max(0.0, one.time - before.time - one.seconds) for before, one in later]) / step,
        first=_mean([max(0.0, end - over - step) for over, end in _first_steps(records)]),
        partial=_mean([max(0.0, one.began - before.time) for before, one in sudden if one.cause != observations.Straggler.kind]),
        failed=_mean(failed),
        slow=sum(max(0.0, one.seconds - step) for _, one in later if _is_slow(one, slow)) / max(1, len(slow)),
        latencies=replace(calibrated(records, _UNSEEN, typical=fmean), check=CHECK_SECONDS),
    )


def _first_steps(records: Sequence[Event]) -> Iterator[tuple[float, float]]:
    """For each start after a fault, yield the time of its recovery and the time at which its first step ended."""
    for i, record in enumerate(records):
        if isinstance(record, RunStarted):
            here = list(takewhile(lambda one: not isinstance(one, RunStarted), records[i + 1 :]))
            over, ends = [one.time for one in of_kind(here, Recovery) if one.restored], of_kind(here, Step)
            if over and ends:
                yield over[0], ends[0].time


def _is_slow(step: Step, stragglers: Sequence[Incident]) -> bool:
    return any(one.began < step.time <= one.time for one in stragglers)


def _restarts(incident: Incident) -> bool:
    return any(command["kind"] == Restart.kind for command in incident.commands)


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return fmean(known) if known else 0.0


class _Hurt(Site):
    """A simulated run until its last step, with a list of faults at given steps instead of random times."""

    def __init__(self, spec: RunSpec, figures: Figures, injections: Sequence[Injection]) -> None:
        fleet, step = spec.fleet, figures.step
        if spec.plan.state.optimizer == "disk":  # has no copies in memory
            fleet = fleet.model_copy(update={"memory_every": 0, "disk_every": 0})
        plan = Scenario(
            name=spec.name, nodes=fleet.nodes, devices_per_node=max(1, spec.plan.ranks // fleet.nodes), days=float("inf"), faults=0.0,
            causes=(), latencies=figures.latencies, fleet=fleet, step_seconds=step,
            store_every=step * (spec.checkpoint.every or spec.train.steps),
        )  # fmt: skip
        super().__init__(plan, np.random.default_rng(0))
        self.overhead, self.figures, self.ranks, self.end = figures.overhead, figures, spec.plan.ranks, spec.train.steps * step
        self.left = sorted((one for one in injections if one.after is None), key=self._moment)
        self.after = {one.after: one for one in injections if one.after is not None}
        self.first = figures.first
        self.next: Injection | None = None  # comes while the ranks start again
        self.damaged: set[int] = set()  # checkpoints
        self.unwritten: set[int] = set()
        self.saved: set[int] = set()  # besides those that are due
        self.every, self.keep = spec.checkpoint.every, spec.checkpoint.keep
        self.own: dict[str, Callable[[Injection], object]] = {
            "gradient": self._spoil, "once": self._spoil, "slow": self._slow_down_for_steps, "full": self._leave_no_room,
            "shard": self._damage_data, "supervisor": self._kill_supervisor, "slow-disk": lambda one: None,
        }  # fmt: skip

    def live(self) -> "_Hurt":
        self._at(0.0, self._ready, of_group=True)
        for _ in range(LIMIT):
            if self.running and self.progress >= self.end - 1e-9:
                self.seconds[TimeUse.USEFUL] += self.progress
                return self
            time, _, happen = heappop(self.queue)
            self._advance(time)
            happen()
        raise RuntimeError(
            f"{self.plan.name}: more than {LIMIT:,} events before its last step: its faults occur again and again without progress"
        )

    # When faults come

    def _ready(self) -> None:
        first, self.first = self.first, 0.0
        if first:
            self._spend(TimeUse.CHECKPOINT)
            self._at(first, self._ready, of_group=True)
            return
        super()._ready()
        self._await_next()

    def _go_back(self, source: Source) -> None:
        super()._go_back(source)
        self.first = self.figures.first

    def _await_next(self) -> None:
        until = min(self.end, self._moment(self.left[0])) if self.left else self.end
        self._at(max(0.0, until - self.progress) * (1 + self.overhead), self._come, of_group=True)

    def _moment(self, one: Injection) -> float:
        """Return the progress (seconds of work) at which a fault occurs: within a step, or between its update and the next step."""
        step = self.plan.step_seconds
        return (one.step + 1) * step if one.moment == "resting" else one.step * step + self.figures.partial

    def _come(self) -> None:
        """Inject the faults that are due. If a fault ends the ranks, other faults due at the same time are skipped. Before the
        faults, the policy learns the current step, and forgets failures at earlier steps."""
        self.state = policy.decide(self.state, observations.Progressed(**self._when()), fleet=self.plan.fleet).state
        while self.left and self._moment(self.left[0]) <= self.progress + 1e-9:
            one = self.left.pop(0)
            if self.running:
                self._befall(one)
        if self.running:
            self._await_next()

    def _copies(self, *, saved: bool = False) -> tuple[Copy, ...]:
        """Return the copies as any simulated run would have them, but with the campaign's checkpoints: those that were due and
        written, and those saved before a node was taken away."""
        step, others = self._step(), [copy for copy in super()._copies() if copy.tier is not Tier.STORE]
        self.saved = {at for at in self.saved if at <= step} | ({step} if saved else set())
        written = int((self.progress - self.plan.latencies.write) / self.plan.step_seconds)
        due = set(range(self.every, written + 1, self.every)) - self.unwritten if self.every else set[int]()
        kept = sorted(due | self.saved)[-self.keep :]
        return (*others, *(Copy(Tier.STORE, at) for at in kept))

    def _begin(self, seconds: float, spending: TimeUse) -> None:
        super()._begin(seconds, spending)
        if self.next is not None:
            one, self.next = self.next, None
            self._at(min(seconds, self.figures.failed), lambda: self._befall(one), of_group=True)

    def _obey(self, command: Command, *, replaced: bool, spending: TimeUse) -> None:
        """Carry out a command. A damaged checkpoint is found when it is read."""
        super()._obey(command, replaced=replaced, spending=spending)
        if not isinstance(command, Restart):
            return
        step, read = command.source.step, {command.source.tier, *dict(command.source.elsewhere).values()}
        if Tier.STORE in read and step in self.damaged:
            self.damaged.discard(step)
            observation = observations.CopyCorrupt(tier=Tier.STORE, copy_step=step, step=self._step())
            self._at(self.figures.failed, lambda: self._decide(observation), of_group=True)

    # What they do

    def _befall(self, one: Injection) -> None:
        self.next = self.after.pop(one.number, None)
        if one.kind in self.own:
            self.own[one.kind](one)
            return
        number, name = self.number[self._node(one)], f"{one.kind} {one.number}"
        lost = one.kind in LOST
        self._strike(Fault(SHOWS[one.kind], name, (number,), REPAIR_SECONDS / HOUR, hardware=lost, idle=lost, time=self.now))
        self.state = replace(self.state, copies=self._left_of(self.state.copies, one))

    def _slot(self, one: Injection) -> int:
        return slot_of(one.ranks[0], world=self.ranks, slots=self.plan.nodes)

    def _node(self, one: Injection) -> str:
        return self.state.placement[self._slot(one)]

    def _left_of(self, copies: tuple[Copy, ...], one: Injection) -> tuple[Copy, ...]:
        """Return the copies that remain after a fault. When the fault occurs, the current update has no copy yet, and the buddy's
        copy of the last step is still in flight."""
        nodes, distance = self.plan.nodes, self.plan.fleet.buddy_distance(self.plan.nodes)
        slots = {slot_of(rank, world=self.ranks, slots=nodes) for rank in one.ranks}
        copies = tuple(copy for copy in copies if copy.step < one.step + (copy.tier is not Tier.BUDDY))
        if one.kind in ("checkpoint", "altered"):
            self.damaged |= {max((copy.step for copy in copies if copy.tier is Tier.STORE), default=0)}
            slots = set(range(nodes))
        if one.kind in ("checkpoint", "altered", "two"):
            return tiers.without_nodes(copies, slots, nodes=nodes, distance=distance)
        if one.kind == "copy":
            return tuple(replace(copy, missing=copy.missing | slots) if copy.tier is Tier.MEMORY else copy for copy in copies)
        return copies

    def _spoil(self, one: Injection) -> None:
        """Compute wrong gradients until the next verified step, possibly the current one."""
        every = self.plan.fleet.verify_every
        seen = -(-one.step // every) * every
        node, good = self._node(one), max(0, seen - every)
        wait = max(0.0, seen * self.plan.step_seconds + self.figures.partial - self.progress) * (1 + self.overhead)
        observation = observations.GradientWrong(good_step=good, suspects=(node,), step=seen)
        self._at(wait, lambda: self._decide(observation), of_group=True)

    def _slow_down_for_steps(self, one: Injection) -> None:
        """Add the time that a straggler cost in the recorded run before the decision; then the policy decides."""
        self._stand_still()
        self._spend(TimeUse.STRAGGLING)
        self._at(self.figures.slow, lambda: self._tell_of_slow(one), of_group=True)

    def _tell_of_slow(self, one: Injection) -> None:
        observation = observations.Straggler(
            slot=self._slot(one), node=self._node(one), rank=one.ranks[0], ratio=2.0, lost=1.0, replacing=1.0, **self._when()
        )
        if not self._decide(observation).commands:
            self._ready()  # there is no spare, so the slow node is kept

    def _leave_no_room(self, one: Injection) -> None:
        self.unwritten.add(one.step)
        self._decide(observations.SaveFailed(tier=Tier.STORE, error="no room", **self._when()))

    def _damage_data(self, one: Injection) -> None:
        self._decide(observations.DataDamaged(shard="", error=f"fault {one.number}", other_copy="a copy", **self._when()))

    def _kill_supervisor(self, one: Injection) -> None:
        """Kill the supervisor: the same command then resumes from memory. The time without a supervisor is not counted."""
        self._stand_still()
        self._decide(observations.Started(**self._when()), spending=TimeUse.PERSON)
