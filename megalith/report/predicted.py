"""The timeline of a run's pipeline and the terms of its step, predicted and measured."""

from collections.abc import Mapping, Sequence
from html import escape
from statistics import mean
from typing import TYPE_CHECKING, Any

from megalith.report import timeline, units
from megalith.report.history import History
from megalith.report.style import html_table
from megalith.schedule import Timeline, build, lower, simulate
from megalith.schedule.action import TRANSFERS, Action, RowEntry, parts
from megalith.spec.base import AbsentError
from megalith.spec.plan import Plan
from megalith.spec.problem import SpecErrors
from megalith.spec.run import RunSpec

if TYPE_CHECKING:
    from megalith.planner.slowdown import SlowdownReport

MAX_BARS = 4000
"""Maximum number of bars in a drawing; if there would be more, fewer microbatches are drawn."""


def predict(run: History) -> tuple[Timeline, str, int]:
    """Return the simulated timeline of the plan's schedule, the source of its costs, and its number of microbatches.

    The cost of a computation is the mean measured time of that stage's forward or backward. If a stage has no recorded spans, the cost
    is the run's mean forward or backward time, divided by the numbers of microbatches and chunks. If nothing was measured, a
    forward costs 1 s and a backward 2 s. If activations leave a stage, an OFFLOAD and a FETCH cost what its last block takes at the
    cluster's rates; a measured forward or backward contains the wait for the other blocks.
    """
    plan, microbatches = run.plan, run.microbatches
    assert plan is not None, "predict needs a recorded plan"
    assert microbatches, "predict needs a recorded batch"
    while plan.stages * microbatches * 2 > MAX_BARS and microbatches > plan.pipeline:
        microbatches = max(microbatches // 2, plan.pipeline)
    schedule = build(plan.schedule, ranks=plan.pipeline, microbatches=microbatches, chunks=plan.chunks)
    means = timeline.mean_seconds(recorded.spans for recorded in run.spans)
    steps = [step.breakdown for step in run.steps if step.breakdown.get("forward")]
    if {(kind, stage) for kind in "FB" for stage in range(plan.stages)} <= set(means):
        table, basis = means, "the mean time of each stage's forward and backward"
    elif steps:
        each = {"F": "forward", "B": "backward"}
        share = {
            kind: mean(step.get(name, 0.0) for step in steps) / (run.microbatches or 1) / plan.chunks
            for kind, name in each.items()
        }
        table = {(kind, stage): seconds for kind, seconds in share.items() for stage in range(plan.stages)}
        basis = "the run's mean forward and backward time"
    else:
        table = {(kind, stage): seconds for kind, seconds in (("F", 1.0), ("B", 2.0)) for stage in range(plan.stages)}
        basis = "a forward of 1 s and a backward of 2 s (nothing measured)"

    retained, moving = _transfers(run, plan)
    if moving:
        table = table | {(kind, stage): seconds for kind in TRANSFERS for stage, seconds in moving.items()}
        basis += ", and transfers of activations at the cluster's rates"

    def cost(entry: RowEntry) -> float:
        return sum(table.get((action.kind, action.stage), 0.0) for action in parts(entry) if isinstance(action, Action))

    return simulate(lower(schedule, plan.zero, retained=retained), cost), basis, microbatches


def _transfers(run: History, plan: Plan) -> tuple[frozenset[int], Mapping[int, float]]:
    """Return the stages from which activations leave, and the seconds of an OFFLOAD or FETCH of each; no seconds if they cannot be
    predicted. Traces the model of a run whose activations leave."""
    if not plan.retain.places:
        return frozenset(), {}
    from megalith.cost.predicted import transfer_seconds, workload_of

    try:
        spec = RunSpec.model_validate(run.spec)
        return plan.retained(len(spec.model.build().blocks)), transfer_seconds(workload_of(spec))
    except (ValueError, AssertionError, KeyError, AbsentError, SpecErrors):  # such as the specification of another version
        return frozenset(), {}


def trace(run: History) -> dict[str, Any]:
    """Return the pipeline's timelines as a trace for Perfetto: the predicted one, and each step with recorded spans."""
    groups: dict[str, Timeline | Sequence[timeline.Bar]] = {}
    if run.plan is not None and run.microbatches:
        predicted, basis, _ = predict(run)
        groups[f"predicted from {basis}"] = predicted
        groups |= {f"measured in step {one.step}": timeline.measured(one.spans, run.plan.pipeline) for one in run.spans}
    return timeline.chrome_trace(groups)


def term_section(compared: "SlowdownReport | str") -> str:
    """Tabulate the terms of a step as HTML, with the term that exceeds its prediction most first. If `compared` is text, it is
    the reason why there is no prediction, and is shown instead."""
    if isinstance(compared, str):
        return f'<p class="none">{escape(f"Nothing is predicted: {compared}.")}</p>' if compared else ""
    from megalith.report import plans  # imports the planner, which takes long and which few pages need

    rows = [(one.name, *map(_seconds, (one.predicted, one.measured)), f"{one.over:+.3g} s") for one in compared.terms]
    return f"<p>{escape(plans.slower(compared))}</p>{html_table(('term', 'predicted', 'measured', 'over'), rows)}"


def _seconds(value: float) -> str:
    return "0" if value == 0 else units.duration(value)
