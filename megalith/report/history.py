"""A run's events by kind, with repeated steps separated."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import log
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import ValidationError

from megalith import epochs, events
from megalith.events import (
    Checkpoint,
    EarlyUpdatesPaused,
    Event,
    Holding,
    Incident,
    Kind,
    Lowered,
    PhaseBegan,
    PrecisionWatched,
    Problem,
    Rewound,
    RunFinished,
    RunStarted,
    Sample,
    Skipped,
    Spans,
    Spike,
    Step,
    Validation,
)
from megalith.fleet import commands
from megalith.machine.origin import without_user
from megalith.spec.files import PROVENANCE_FILE, STARTED
from megalith.spec.plan import Plan
from megalith.spec.sites import SitesSpec, part_of_batch

GOES_ON = frozenset(one.kind for one in (commands.Restart, commands.Shrink, commands.Grow, commands.Wait, commands.SaveState))
"""Kinds of commands of an incident after which the ranks start again."""


class Ending:
    """The end of a run, read event by event. `event`: the run's end; None: it has not ended. Ranks that a fault or a preemption ends
    log this end too, although the controller starts them again: it logs the incident shortly before or after."""

    def __init__(self) -> None:
        self.event: RunFinished | None = None
        self._last: RunFinished | None = None  # also an end that the run recovers from
        self._recovers = False

    def take(self, event: Event) -> None:
        """Take the next event of the log."""
        match event:
            case RunStarted():
                self.event, self._last, self._recovers = None, None, False
            case Incident():
                kinds = {command.get("kind") for command in event.commands}
                if commands.Stop.kind in kinds:
                    self.event, self._recovers = self._last, False
                elif kinds & GOES_ON:
                    self.event, self._recovers = None, True
            case RunFinished():
                self._last = event
                self.event = None if self._recovers and event.reason in ("lost", "stopped") else event


@dataclass(frozen=True)
class History:
    """The events of a run, oldest first: `events` has all of them, the other lists have those of one kind.

    A resumed run goes back to a checkpoint and repeats the steps after it. `repeated` has the steps that were repeated later;
    `steps`, `validations`, `watched`, `phases` and `samples` have only the newest event of each step. `skipped`: the number of
    lines of the log that hold no event.
    """

    events: list[Event] = field(default_factory=list)
    starts: list[RunStarted] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    repeated: list[Step] = field(default_factory=list)
    validations: list[Validation] = field(default_factory=list)
    watched: list[PrecisionWatched] = field(default_factory=list)
    phases: list[PhaseBegan] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    spans: list[Spans] = field(default_factory=list)
    holdings: list[Holding] = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    finished: RunFinished | None = None
    skipped: int = 0

    @property
    def start(self) -> RunStarted | None:
        """The newest start."""
        return self.starts[-1] if self.starts else None

    @property
    def spec(self) -> dict[str, Any]:
        """The resolved specification of the newest start; empty if the run never started."""
        return self.start.spec if self.start else {}

    @property
    def plan(self) -> Plan | None:
        """The plan of the newest start; None if none is recorded."""
        return plan_of(self.start) if self.start else None

    @property
    def microbatches(self) -> int | None:
        """Number of microbatches that a data rank computes in one step."""
        plan, batch = self.plan, own_batch_of(self.spec)
        return batch // (plan.data * plan.microbatch) if plan and batch else None

    @property
    def total_steps(self) -> int | None:
        """The number of the run's last step: `train.steps`, plus one for each skipped update; in a run with sites, plus one for
        each batch that some site has missed."""
        steps = self.spec.get("train", {}).get("steps")
        return steps and steps + (self.steps[-1].left_out if self.steps else 0)

    @property
    def branch(self) -> str:
        """The checkpoint from which the run branched, in words; empty if the run is not a branch."""
        branch = self.spec.get("branch")
        if not branch:
            return ""
        decay = f", decays over {branch['decay']:,} updates" if branch.get("decay") else ""
        return f"{branch['checkpoint']}, after {branch['updates']:,} updates and {branch['samples']:,} samples{decay}"

    @property
    def state(self) -> str:
        """State of the run: "not started", the logged reason of its end (finished, stopped, lost, failed), or "running,
        or ended without logging its end"."""
        if not self.starts and not self.steps:
            return "not started"
        return self.finished.reason if self.finished else "running, or ended without logging its end"

    def usual(self, number: Callable[[Step], float | None]) -> float | None:
        """Return the median over the steps of the number that `number` returns; None if it returns None for every step. The first
        two steps of each start (warm-up) are left out if there are others."""
        warm = {start.resumed_step + i for start in self.starts for i in (1, 2)}
        values = [number(step) for step in self.steps if step.step not in warm] or [number(step) for step in self.steps]
        known = [value for value in values if value is not None]
        return median(known) if known else None


def own_batch_of(spec: Mapping[str, Any]) -> int | None:
    """Return how many samples of each step the site of this log reads; in a run without sites, the global batch. The result is
    None if the specification lacks the batch, or describes sites in a way that this version cannot read."""
    batch, sites = spec.get("train", {}).get("global_batch"), spec.get("sites")
    if not batch or sites is None:
        return batch
    try:
        table = SitesSpec.model_validate(sites)
    except ValidationError:
        return None
    return part_of_batch(batch, table.site or 0, table.count, table.shares)


def plan_of(start: RunStarted) -> Plan | None:
    """Return the plan of a start; None if its specification has none that this version can read."""
    try:
        return Plan.model_validate(start.spec["plan"])
    except (KeyError, ValidationError):  # an early or foreign log: the report does without what depends on the plan
        return None


def history(run_dir: Path) -> History:
    """Return the history of the run in a folder; it is empty if the folder has no events."""
    reader = events.read(run_dir)
    found = gather(reader)
    return replace(found, skipped=reader.skipped)


def gather(records: Iterable[Event]) -> History:
    """Return the history of events, which are in the order of the log."""
    whole = list(records)
    starts: list[RunStarted] = []
    steps: dict[int, Step] = {}
    validations: dict[int, Validation] = {}
    watched: dict[int, PrecisionWatched] = {}
    phases: dict[int, PhaseBegan] = {}
    samples: dict[int, Sample] = {}
    spans: dict[int, Spans] = {}
    holdings: dict[int, Holding] = {}
    checkpoints: dict[int, Checkpoint] = {}
    repeated: list[Step] = []
    problems: list[Problem] = []
    ending = Ending()
    moved = False  # the ranks started again, perhaps on another mesh: the first new holding replaces all older ones
    for record in whole:
        ending.take(record)
        match record:
            case RunStarted():
                starts.append(record)
                moved = True
                repeated += _pop_after(steps, record.resumed_step)
                _pop_after(validations, record.resumed_step)
                _pop_after(watched, record.resumed_step - 1)  # a step's own come before it
                _pop_after(phases, record.resumed_step)
                _pop_after(samples, record.resumed_step)
                _pop_after(spans, record.resumed_step)
            case Step():
                steps[record.step] = record
            case Validation():
                validations[record.step] = record
            case PrecisionWatched():
                watched[record.step] = record
                if record.raised:
                    problems.append(Problem("warning", record.words, time=record.time))
            case PhaseBegan():
                phases[record.step] = record
            case Sample():
                samples[record.step] = record
            case Spans():
                spans[record.step] = record
            case Checkpoint():
                checkpoints[record.step] = record
            case Holding():
                if moved:
                    holdings.clear()
                    moved = False
                holdings[record.rank] = record
            case Skipped(spike=True):
                pass  # the spike's own events say more
            case Spike() | Rewound() | Lowered() | EarlyUpdatesPaused():
                problems.append(Problem("warning", record.words, time=record.time))
            case Skipped():
                problems.append(Problem("warning", record.words, time=record.time))
            case Problem():
                problems.append(record)
    return History(
        events=whole,
        starts=starts,
        steps=_in_order(steps),
        repeated=repeated,
        validations=_in_order(validations),
        watched=_in_order(watched),
        phases=_in_order(phases),
        samples=_in_order(samples),
        spans=_in_order(spans),
        holdings=_in_order(holdings),
        checkpoints=_in_order(checkpoints),
        problems=problems,
        finished=ending.event,
    )


def heading(name: str, folder: Path) -> str:
    """Return a run's name, followed by its folder's name if they differ, to distinguish runs of one file."""
    here = folder.resolve().name
    return name if here == name else f"{name} · {here}"


def origin_of(run_dir: Path) -> dict[str, str]:
    """Return a run's folder, and host, command and commit of its newest start as far as they are known. User names in paths are
    left out."""
    started = {
        key.removeprefix(STARTED): str(value)
        for key, value in read_json(epochs.newest(run_dir, PROVENANCE_FILE)).items()
        if key.startswith(STARTED)
    }
    return {"folder": without_user(str(run_dir.resolve()))} | started


def tokens_a_byte(spec: Mapping[str, Any]) -> dict[str, float]:
    """Return the tokens per byte of held-out text for each domain, and for all domains under "". The result is empty if the
    manifest of the run's data cannot be read. A relative data path starts at the current directory, as it does for the run.
    """
    try:
        domains = read_json(Path(str(spec["data"]["path"])) / "manifest.json")["domains"]
        held = {name: (one["validation"]["tokens"], one["validation"]["bytes"]) for name, one in domains.items()}
        held[""] = (sum(tokens for tokens, _ in held.values()), sum(size for _, size in held.values()))
        return {name: tokens / size for name, (tokens, size) in held.items() if size}
    except (KeyError, TypeError, AttributeError):
        return {}


def bits_a_byte(loss: float, rate: float) -> float:
    """Convert a loss in nats a token to bits a byte, for text of `rate` tokens a byte. Bits a byte are comparable between tokenizers."""
    return loss * rate / log(2)


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one if the file cannot be read, because reports are useful without it."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _pop_after(latest: dict[int, Kind], step: int) -> list[Kind]:
    return [latest.pop(late) for late in [one for one in latest if one > step]]


def _in_order(latest: dict[int, Kind]) -> list[Kind]:
    return [latest[key] for key in sorted(latest)]
