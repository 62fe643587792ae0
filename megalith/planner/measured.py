"""A user's measurements, from tables or finished runs, as logarithms of measured over predicted values. Imports torch only to trace
parts."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from math import exp, log
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from pydantic import ValidationError

from megalith import epochs
from megalith.cost.estimate import Estimate, estimate
from megalith.cost.predicted import held, workload_of
from megalith.cost.software import OURS
from megalith.cost.workload import Workload
from megalith.planner.published.express import express, measured_seconds
from megalith.planner.published.rows import Row, read
from megalith.planner.search import assumed
from megalith.spec.base import AbsentError
from megalith.spec.files import SPEC_FILE
from megalith.spec.model import MoeSpec
from megalith.spec.phases import Phases, during
from megalith.spec.plan import Plan
from megalith.spec.problem import Problem, SpecErrors
from megalith.spec.run import RunSpec

if TYPE_CHECKING:
    from megalith.events import PhaseBegan, RunStarted, Step

WARM = 3
"""Number of first steps of a plan or phase that are not measured, because of compilation and caches."""


@dataclass(frozen=True)
class Own:
    """One row that a user measured, relative to its prediction."""

    name: str
    software: str
    """Name of the software that trained."""
    machine: str
    """Kind of machine on which the software trained (`ClusterSpec.machine`)."""
    kind: str
    """time.dense or time.expert."""
    time: float | None
    """Logarithm of measured over predicted step time; None if time was not measured."""
    memory: float | None
    """Logarithm of measured over predicted peak memory of a rank; None if memory was not measured."""

    @property
    def ratio(self) -> float:
        """Measured over predicted step time."""
        return exp(self.time or 0.0)


def measured(paths: Iterable[Path], software: str) -> tuple[Own, ...]:
    """Return the rows of tables (.csv, in the format of the bundled measurements) and of run folders. The rows of tables are taken as
    measurements of the software that the argument `software` names. Raises SpecErrors with every unusable file."""
    found, problems = list[Own](), list[Problem]()
    for path in paths:
        try:
            found += _table(path, software) if path.suffix == ".csv" else [_run(path)]
        except (OSError, ValueError, KeyError, AbsentError, SpecErrors) as error:
            reasons = [one.reason for one in error.problems] if isinstance(error, SpecErrors) else [_said(error)]
            way_out = "Give a table (.csv) in the format of megalith/planner/published/measurements.csv, or the folder of a run."
            problems += [Problem("error", "--measured", str(path), reason, way_out, "command line") for reason in reasons]
    if problems:
        raise SpecErrors(problems)
    return tuple(found)


def _said(error: Exception) -> str:
    return f"these measurements cannot be used: {error or type(error).__name__}"


def _table(path: Path, software: str) -> list[Own]:
    rows = read(path)
    said = [(row, express(row)) for row in rows]
    if unsaid := [f"{row.name or 'a row'}: {one.reason}" for row, one in said if not one.choices]:
        raise ValueError("; ".join(unsaid))
    return [_of_row(row, _taken(row, one.choices, software), software) for row, one in said]


def _taken(row: Row, choices: Sequence[Workload], software: str) -> Workload:
    """Return the row as a workload of this software. If the row leaves settings open, return the workload whose predicted time is nearest
    to the measurement."""
    known = [replace(one, software_profile=assumed(one.plan, software)) for one in choices]
    seconds = measured_seconds(row, known[0])
    return min(known, key=lambda one: abs(log(seconds / estimate(one).time.step))) if seconds else known[0]


def _of_row(row: Row, workload: Workload, software: str) -> Own:
    return _over(row.name, software, workload, measured_seconds(row, workload), row.memory)


def _run(folder: Path) -> Own:
    """Return the row of a run: its median step time after the first steps, and the peak memory of its first rank."""
    spec, steps = newest(folder)
    peak = max(step.memory.get("peak", 0) for step in steps)
    return _over(folder.name, OURS, workload_of(spec), median(step.seconds for step in steps), peak)


def spec_of(folder: Path) -> RunSpec:
    """Return the run in a folder. Raises ValueError if the run names no cluster, or if this version cannot read its
    description; OSError if the folder has no run."""
    try:
        spec = RunSpec.model_validate_json(epochs.newest(folder, SPEC_FILE).read_text(encoding="utf-8"))
    except ValidationError as error:
        raise ValueError(unreadable(error)) from error
    if spec.cluster == "local":
        raise ValueError('a prediction needs a named cluster, but the run has cluster = "local"')
    return spec


def unreadable(error: ValidationError) -> str:
    """Return the reason why this version cannot read a run's description, with the keys that it refuses."""
    keys = dict.fromkeys(".".join(map(str, one["loc"])) for one in error.errors())
    return f"another version of Megalith wrote the run's {SPEC_FILE}: this version refuses {', '.join(keys) or 'this file'}"


def newest(folder: Path) -> "tuple[RunSpec, list[Step]]":
    """Return a run as its newest steps are made, and these steps: all with the newest plan, cluster, sequence length and batch, except the
    first WARM. A prediction holds for no others. Raises as `spec_of`, and ValueError if no step is left."""
    from megalith import events  # most searches measure nothing, and these take long to import

    spec, start = spec_of(folder), None
    steps, phases = dict[int, events.Step](), dict[int, events.PhaseBegan]()
    for event in events.read(folder):
        match event:
            case events.Step():
                steps[event.step] = event
            case events.PhaseBegan():
                phases[event.step] = event
            case events.RunStarted():
                again = start is not None and _layout(start) == _layout(event)
                steps = {number: step for number, step in steps.items() if again and number <= event.resumed_step}
                phases = {number: phase for number, phase in phases.items() if number <= event.resumed_step}
                start = event
            case _:
                pass
    alike = _alike([phases[number] for number in sorted(phases)])
    kept = [steps[number] for number in sorted(steps) if not alike or number >= alike[0].step][WARM:]
    if not kept:
        raise ValueError(f"the run has no step after the first {WARM} with its newest plan and batch")
    known = Phases.of(spec).all
    spec = during(spec, known[min(alike[-1].number if alike else 0, len(known) - 1)])
    return spec.model_copy(update={"plan": _plan(start) or spec.plan}), kept


def _layout(start: "RunStarted") -> tuple[object, ...]:
    return start.spec.get("plan"), start.spec.get("cluster")


def _plan(start: "RunStarted | None") -> Plan | None:
    """Return the plan of a start, which differs from the run's if devices were lost; None if this version cannot read it."""
    try:
        return None if start is None else Plan.model_validate(start.spec.get("plan"))
    except ValidationError:
        return None


def _alike(phases: "Sequence[PhaseBegan]") -> "list[PhaseBegan]":
    """Return the last phases that have the same sequence length and batch, and so the same cost."""
    shapes = [(one.seq_len, one.global_batch) for one in phases]
    count = len(list(takewhile(lambda shape: shape == shapes[-1], reversed(shapes))))
    return list(phases[len(phases) - count :])


def _over(name: str, software: str, workload: Workload, seconds: float | None, peak: float | None) -> Own:
    predicted: Estimate = estimate(workload)
    ours = workload.software_profile == assumed(workload.plan, OURS)
    memory = (held(workload) if ours else predicted.memory).allocated
    experts = any(isinstance(block.mlp, MoeSpec) for block in set(workload.model.blocks))
    return Own(
        name, software, workload.cluster.machine, "time.expert" if experts else "time.dense",
        log(seconds / predicted.time.step) if seconds else None, log(peak / memory) if peak else None,
    )  # fmt: skip
