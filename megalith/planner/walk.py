"""Guided way to a first plan, one technique at a time: how the model fits, which microbatch it takes, and what makes it fast. Imports
torch only to trace parts."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megalith.cost.estimate import Estimate
from megalith.cost.memory import Memory
from megalith.cost.workload import Workload
from megalith.planner.candidates import MICROBATCHES, candidates, offloaded
from megalith.planner.find import choice_of, scorer_of, space_of, workload_of
from megalith.planner.measured import Own
from megalith.planner.plan_result import PlanResult, best_plans, headroom, short
from megalith.planner.request import ResolvedRequest
from megalith.planner.search import Candidate, Scorer
from megalith.spec.numbers import PRECISIONS
from megalith.spec.plan import Plan
from megalith.spec.problem import Problem, SpecErrors
from megalith.spec.sizes import count_model
from megalith.spec.state import MASTER, bytes_each, kept
from megalith.spec.treatment import kept_of, slots_of

CLOSE = 3
"""Number of layouts whose memory is counted exactly: the layouts with the least memory by the quick count."""


@dataclass(frozen=True)
class Technique:
    """One way to split work or save memory, and its effect in a sentence."""

    name: str
    does: str
    used: Callable[[Plan], bool]
    spares: bool = True
    """True if this technique reduces the memory of the worst rank."""


PLAIN = Technique(
    "data parallelism", "each device holds the whole model and reads its own share of the batch", lambda plan: False
)

TECHNIQUES: tuple[Technique, ...] = (
    Technique("expert parallelism", "experts are divided among ranks, and tokens are sent to these ranks", lambda plan: plan.expert > 1),
    Technique("ZeRO 1", "each data rank keeps only a share of the optimizer's state", lambda plan: plan.zero == 1),
    Technique("ZeRO 2", "each data rank keeps only a share of the gradients, too", lambda plan: plan.zero == 2),
    Technique("ZeRO 3", "each data rank keeps only a share of the weights, gathered block by block (FSDP)", lambda plan: plan.zero == 3),
    Technique("recomputation", "the backward computes activations again", lambda plan: plan.recompute != "none"),
    Technique("tensor parallelism", "each matrix product is split over ranks on fast links", lambda plan: plan.tensor > 1),
    Technique("pipeline", "each rank holds some of the blocks, through which microbatches pass", lambda plan: plan.pipeline > 1),
    Technique("context parallelism", "each sequence is split", lambda plan: plan.context > 1),
    Technique("HSDP", "the state has several copies, each sharded over nearby ranks", lambda plan: plan.replicate > 1, spares=False),
    Technique("interleaving", "a pipeline rank holds several short stages and idles less", lambda plan: plan.chunks > 1, spares=False),
)  # fmt: skip
"""Techniques in the order of trial, the simplest first."""

ELSEWHERE = Technique(
    "state in host memory", "the optimizer's state is kept in the hosts' memory", lambda plan: plan.state.away > 0
)
"""The technique that is tried if nothing else fits."""

RELEASED = Technique(
    "released gradients", "each part is updated in the backward, and each step is computed twice", lambda plan: plan.state.release
)
"""The last technique of a search that may offload, if gradients are what does not fit."""

SCHEDULES_TOO = Technique(
    "other schedules", "another order of forwards and backwards fills the pipeline's bubble", lambda plan: False, spares=False
)
"""Schedules whose idle time has no closed form; only the full search tries them."""


@dataclass(frozen=True)
class Row:
    """The best layout with one more technique than the row before. `choice` is None if no such layout exists. `why`: the reason why the
    layout is missing or does not fit, if it is known; else empty."""

    technique: Technique
    choice: Candidate | None
    gain: float = 0.0
    """Relative reduction of the step time compared with the row before."""
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        named = {"technique": self.technique.name, "does": self.technique.does, "gain": self.gain, "why": self.why}
        return named | ({"layout": None} if self.choice is None else {"layout": short(self.choice.plan)} | self.choice.to_json())


@dataclass(frozen=True)
class Walk:
    """The three stages of a walk. `result` is None if nothing fits; `problems` then name changes with which a plan fits."""

    request: ResolvedRequest
    parameters: int
    state: float
    """Bytes of the whole model's weights, gradients and optimizer state."""
    fit: tuple[Row, ...]
    """The smallest layout after each further technique, until one fits."""
    batch: tuple[Candidate, ...]
    """The layout that fits, with each possible microbatch."""
    throughput: tuple[Row, ...]
    """The fastest layout after each further technique."""
    result: PlanResult | None
    problems: tuple[Problem, ...] = ()

    @property
    def first(self) -> Candidate | None:
        """The simplest layout that fits."""
        last = self.fit[-1].choice
        return last if last is not None and last.estimate.fits else None

    def to_json(self) -> dict[str, Any]:
        train = self.request.run.train
        return {
            "model": self.request.run.model.name, "parameters": self.parameters, "state": self.state, "cluster": self.request.run.cluster,
            "devices": self.request.cluster.count, "seq_len": train.seq_len, "global_batch": train.global_batch,
            "tokens_per_step": train.seq_len * train.global_batch, "notes": list(self.request.notes),
            "fit": [row.to_json() for row in self.fit],
            "batch": [{"layout": short(one.plan), "microbatches": rounds(one.plan, self.request)} | one.to_json() for one in self.batch],
            "throughput": [row.to_json() for row in self.throughput],
            "answer": None if self.result is None else self.result.to_json(),
        }  # fmt: skip


def walk(
    request: ResolvedRequest, *, measured: Sequence[Own] = (), tick: Callable[[int, int], None] = lambda done, total: None
) -> Walk:
    """Walk through fit, batch and throughput for a request. `measured` and `tick`: as in `planner.plan_result.best_plans`."""
    parameters = count_model(request.model).total
    state = parameters * _state(request)
    request = replace(request, offload=False)
    found, problems, spread = None, (), _Spread.of(request, scorer_of(request), tick)
    fit = tuple(_fit(spread))
    if fit[-1].technique is ELSEWHERE:
        request = replace(request, offload=True)
    try:
        found = best_plans(request, top=3, measured=measured, tick=tick)
    except SpecErrors as errors:
        problems = tuple(errors.problems)
    first = fit[-1].choice
    if found is None or first is None or not first.estimate.fits:
        return Walk(request, parameters, state, fit, (), (), found, problems)
    spread = replace(spread, scorer=scorer_of(found.request), request=found.request)
    return Walk(found.request, parameters, state, fit, spread.sizes(first), tuple(_throughput(spread, fit, found)), found)


def rounds(plan: Plan, request: ResolvedRequest) -> int:
    """Return the number of microbatches that a data rank computes in a step."""
    return request.run.train.global_batch // (plan.data * plan.microbatch)


def a_parameter(request: ResolvedRequest) -> str:
    """Return the bytes of a parameter's state as text, with the terms of the sum: weights, gradient, moments."""
    return kept_of(request.run.optimizer, _compute(request), gradients=request.run.train.gradients)


def _state(request: ResolvedRequest) -> float:
    """Return the bytes of state per parameter. If compute weights have the format of master weights, they are the same tensor and count
    once."""
    compute = _compute(request)
    optimizer, gradients = request.run.optimizer, request.run.train.gradients
    slots = kept(compute, slots_of(optimizer), master=optimizer.master, gradients=gradients)
    return bytes_each(slot for slot in slots if slot.name != "compute" or compute != MASTER.number)


def _compute(request: ResolvedRequest) -> str:
    return PRECISIONS[request.run.train.precision].compute.name


@dataclass(frozen=True)
class _Spread:
    """All layouts whose step time has a closed form, each with its memory by the quick count."""

    request: ResolvedRequest
    scorer: Scorer
    workloads: tuple[tuple[Workload, Memory], ...]

    @classmethod
    def of(cls, request: ResolvedRequest, scorer: Scorer, tick: Callable[[int, int], None]) -> "_Spread":
        train, space = request.run.train, replace(space_of(request), schedules=(), zero=(0, 1, 2, 3))
        plans = candidates(request.model, request.cluster, seq_len=train.seq_len, global_batch=train.global_batch, space=space)
        workloads = [workload_of(request, plan) for plan in plans]
        scorer.prepare(workloads, tick)
        return cls(request, scorer, tuple((one, scorer.memory(one)) for one in workloads))

    def smallest(self, allowed: Sequence[Technique]) -> Candidate | None:
        """Return the layout with the least memory that only uses allowed techniques."""
        mine = sorted(self._with(allowed), key=lambda one: one[1].total)
        few = [choice_of(self.request, one.plan, self.scorer) for one, _ in mine[:CLOSE]]
        return min(few, key=lambda one: (not one.estimate.fits, one.estimate.memory.total), default=None)

    def elsewhere(self) -> Candidate | None:
        """Return the layout that needs the least memory with the optimizer's state in host memory."""
        mine = min(self.workloads, key=lambda one: one[1].total - one[1].optimizer, default=None)
        return None if mine is None else choice_of(self.request, offloaded(mine[0].plan, 1.0), self.scorer)

    def fastest(self, allowed: Sequence[Technique]) -> Candidate | None:
        """Return the fastest valid layout that fits and only uses allowed techniques."""
        mine = [(self.scorer.estimate(one, held), one) for one, held in self._with(allowed) if self.scorer.fits(one, held)]
        for _, one in sorted(mine, key=lambda pair: pair[0].time.step):
            if self.request.is_valid(one.plan):
                choice = choice_of(self.request, one.plan, self.scorer)
                if choice.estimate.fits:
                    return choice
        return None

    def sizes(self, choice: Candidate) -> tuple[Candidate, ...]:
        """Return a layout with each microbatch that the search tries and that divides the batch evenly."""
        plans = [choice.plan.model_copy(update={"microbatch": size}) for size in MICROBATCHES]
        dealt = [plan for plan in plans if self.request.run.train.global_batch % (plan.data * plan.microbatch) == 0]
        return tuple(choice_of(self.request, plan, self.scorer) for plan in dealt if self.request.is_valid(plan))

    def _with(self, allowed: Sequence[Technique]) -> list[tuple[Workload, Memory]]:
        denied = [one for one in TECHNIQUES if one not in allowed]
        return [pair for pair in self.workloads if not any(one.used(pair[0].plan) for one in denied)]


def _fit(spread: _Spread) -> Iterator[Row]:
    """Yield the smallest layout after each technique that saves memory, until one fits. Techniques that save no memory are left out."""
    allowed: list[Technique] = []
    before: Candidate | None = None
    for technique in (PLAIN, *(one for one in TECHNIQUES if one.spares)):
        allowed.append(technique)
        choice = spread.smallest(allowed)
        if choice is None and technique is PLAIN:
            yield Row(technique, None, why="no layout with the whole model on each device divides the batch evenly")
        if choice is None or (before is not None and choice.plan == before.plan):
            continue
        yield Row(technique, choice)
        if choice.estimate.fits:
            return
        before = choice
    last = spread.elsewhere()
    yield Row(ELSEWHERE, last, why="" if last is None else _host_too_small(last.estimate))


def _host_too_small(found: Estimate) -> str:
    """Return a note if a layout would fit its devices, but not their hosts; otherwise empty."""
    here = found.limit is None or found.memory.total * (1 + headroom()) <= found.limit
    held = found.memory.host / 2**30
    return (
        f"the layout fits the devices, but needs {held:,.0f} GiB of host memory for each device"
        if here and not found.fits
        else ""
    )


def _throughput(spread: _Spread, fit: Sequence[Row], found: PlanResult) -> Iterator[Row]:
    """Yield the fastest layout with the techniques that make it fit, then after each further technique that shortens a step."""
    best = found.found.best
    assert best is not None
    allowed = [
        PLAIN,
        *TECHNIQUES[: 1 + max((TECHNIQUES.index(row.technique) for row in fit if row.technique in TECHNIQUES), default=-1)],
    ]
    before = spread.fastest(allowed)
    if before is not None:
        yield Row(allowed[-1], before)
    for technique in TECHNIQUES:
        if technique in allowed:
            continue
        allowed.append(technique)
        choice = spread.fastest(allowed)
        if choice is None or (before is not None and choice.plan == before.plan):
            continue
        yield Row(technique, choice, _gain(before, choice))
        before = choice
    last = RELEASED if best.plan.state.release and not best.plan.state.away else ELSEWHERE if best.moves else SCHEDULES_TOO
    if before is None or before.estimate.time.step > best.estimate.time.step:
        yield Row(last, best, _gain(before, best))


def _gain(before: Candidate | None, choice: Candidate) -> float:
    return 0.0 if before is None else 1 - _step(choice.estimate) / _step(before.estimate)


def _step(estimate: Estimate) -> float:
    return estimate.time.step
