"""Cost of breaking the field's rules on a cluster, relative to plans that follow them. Imports torch only to trace parts."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megalith.check import check
from megalith.cost.constants import calibration
from megalith.planner.candidates import even_layers
from megalith.planner.find import workload_of
from megalith.planner.plan_result import PlanResult, short
from megalith.planner.request import ResolvedRequest
from megalith.planner.search import Scorer
from megalith.schedule.table import kind
from megalith.spec.plan import Plan
from megalith.spec.problem import Problem

GAINED = 1e-3
"""Share of a step below which a difference counts as zero."""


@dataclass(frozen=True)
class Price:
    """A broken rule, and the cost relative to a plan that follows it. `instead`: the plan that follows the rule; None if no such plan
    passes megalith check."""

    problem: Problem
    change: str
    instead: Plan | None
    seconds: float
    """Seconds of a step of the plan that breaks the rule, minus seconds of a step under `instead`; below 0: following the rule would be
    slower."""
    share: float
    """`seconds` divided by the step of the unchanged plan."""
    memory: float
    """Bytes of the worst rank under the plan that breaks the rule, minus bytes of the worst rank under `instead`."""
    fits: bool
    """True if `instead` fits."""
    dollars: float | None
    """US dollars that the broken rule costs in the whole training; None if the price, the length of training, or a plan that follows the
    rule is not known."""

    @property
    def verdict(self) -> str:
        """Return the verdict in a few words."""
        if self.instead is None:
            return "no plan that follows the rule passes megalith check"
        if not self.fits:
            return "a plan that follows the rule would not fit"
        if abs(self.share) < GAINED:
            return "costs no time"
        return "costs" if self.share > 0 else "breaking the rule pays: the plan that follows it is slower"

    def to_json(self) -> dict[str, Any]:
        plan = None if self.instead is None else self.instead.model_dump()
        layout = None if self.instead is None else short(self.instead)
        return {**vars(self), "problem": vars(self.problem), "instead": plan, "layout": layout, "verdict": self.verdict}


Followed = Iterator[tuple[str, Plan]]
"""Changes as text, each with the resulting plan."""


def _fewer_tensor_ranks(plan: Plan, request: ResolvedRequest) -> Followed:
    """Yield plans with fewer tensor ranks and more data ranks or pipeline ranks."""
    fast = request.cluster.accelerator.scale_up_domain
    times = -(-plan.tensor // fast)
    if plan.tensor % times == 0:
        inside = {"tensor": plan.tensor // times}
        yield f"tensor {inside['tensor']}, data {plan.data * times}", _with(plan, request, data=plan.data * times, **inside)
        yield (
            f"tensor {inside['tensor']}, pipeline {plan.pipeline * times}",
            _with(plan, request, pipeline=plan.pipeline * times, **inside),
        )


def _more_microbatches(plan: Plan, request: ResolvedRequest) -> Followed:
    """Yield plans whose pipeline idles less: with smaller microbatches, fewer pipeline ranks, or more stages a rank."""
    if plan.microbatch > 1:
        yield "microbatch 1", _with(plan, request, microbatch=1)
    if plan.pipeline % 2 == 0:
        half = plan.pipeline // 2
        yield f"pipeline {half}, data {plan.data * 2}", _with(plan, request, pipeline=half, data=plan.data * 2)
        yield f"pipeline {half}, tensor {plan.tensor * 2}", _with(plan, request, pipeline=half, tensor=plan.tensor * 2)
    chunks = plan.chunks * 2
    if kind(plan.schedule).fills_and_drains:
        yield f"{chunks} chunks a rank", _with(plan, request, chunks=chunks, schedule="interleaved")


def _sharded(plan: Plan, request: ResolvedRequest) -> Followed:
    yield "zero 1", plan.model_copy(update={"zero": 1})


def _recomputed(plan: Plan, request: ResolvedRequest) -> Followed:
    yield "the mlp recomputed", plan.model_copy(update={"recompute": "selective", "recompute_parts": ("mlp",)})
    yield "all recomputed", plan.model_copy(update={"recompute": "full"})


def _experts_near(plan: Plan, request: ResolvedRequest) -> Followed:
    expert = plan.expert
    while expert * plan.expert_tensor > request.cluster.accelerator.scale_up_domain and expert % 2 == 0:
        expert //= 2
    yield f"expert {expert}", plan.model_copy(update={"expert": expert})


REMEDIES: Mapping[str, Callable[[Plan, ResolvedRequest], Followed]] = {
    "plan.tensor": _fewer_tensor_ranks,
    "plan.pipeline": _more_microbatches,
    "plan.zero": _sharded,
    "plan.recompute": _recomputed,
    "plan.expert": _experts_near,
}
"""Key of an advice -> plans that follow it. Breaking advice about keys that are not in this table costs no time."""


def prices(request: ResolvedRequest, plan: Plan) -> tuple[Price, ...]:
    """Return each broken rule that has a cost in time, the most expensive first. Of several plans that follow a rule, the
    fastest that fits counts."""
    found = check(request.run.model_copy(update={"plan": plan}), files=False)
    advice = [problem for problem in found if problem.severity == "advice" and problem.key in REMEDIES]
    scorer = Scorer(calibration())
    return tuple(sorted((_price(problem, request, plan, scorer) for problem in advice), key=lambda price: -price.seconds))


def prices_of(result: PlanResult) -> tuple[Price, ...]:
    """Return the prices of the rules that the run file's plan breaks, or, if the run file has no valid plan for all devices, of the rules
    that the best plan breaks."""
    subject = result.own or result.found.best
    if subject is None or result.request.forward_only:
        return ()
    return prices(result.request, subject.plan)


def _price(problem: Problem, request: ResolvedRequest, plan: Plan, scorer: Scorer) -> Price:
    own = scorer.estimate(workload_of(request, plan))
    ways = [(words, other) for words, other in REMEDIES[problem.key](plan, request) if other != plan and request.is_valid(other)]
    estimates = [(words, other, scorer.estimate(workload_of(request, other))) for words, other in ways]
    if not estimates:
        return Price(problem, "", None, 0.0, 0.0, 0.0, False, None)
    words, other, best = min(estimates, key=lambda one: (not one[2].fits, one[2].time.step))
    seconds = own.time.step - best.time.step
    price, cluster = request.cluster.price_per_hour, request.cluster
    hours = seconds * request.run.train.steps / 3600 * cluster.count
    return Price(
        problem, words, other, seconds, seconds / own.time.step, own.memory.total - best.memory.total, best.fits,
        None if price is None or request.tokens is None else hours * price,
    )  # fmt: skip


def _with(plan: Plan, request: ResolvedRequest, **change: Any) -> Plan:
    changed = plan.model_copy(update=change)
    if changed.pipeline == 1:
        changed = changed.model_copy(update={"schedule": "1f1b", "chunks": 1})
    return changed.model_copy(update={"layers": even_layers(len(request.model.blocks), changed.stages)})
