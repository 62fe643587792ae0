"""The search that a request asks for: its space, its workloads, and the form of the state with which a step is shortest. Imports torch only
to trace parts."""

from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from math import inf
from typing import Any

from megalith.check.remedies import as_words
from megalith.check.software import COMPILES
from megalith.cost.constants import calibration
from megalith.cost.estimate import Estimate
from megalith.cost.memory import Memory
from megalith.cost.segments import decided
from megalith.cost.workload import Workload
from megalith.planner.candidates import Space
from megalith.planner.formats import follows_others
from megalith.planner.linked import outer
from megalith.planner.phases import fits_all, workload_in
from megalith.planner.request import ResolvedRequest
from megalith.planner.search import Candidate, Scorer, SearchResult, search
from megalith.spec.plan import Plan
from megalith.spec.treatment import copied_each_step, table_kinds

SHORTER = 0.01
"""Share of a step that another form of the state must save in order to be chosen."""

Tick = Callable[[int, int], None]
"""Gets the number of model parts traced so far, and the number of parts to trace."""


def find_form(
    request: ResolvedRequest, *, top: int, tick: Tick = lambda done, total: None
) -> tuple[ResolvedRequest, SearchResult]:
    """Return a request and the result of its search. The request is the given one, or, if nothing fits or a step is clearly shorter, the
    one with another form of master weights and gradients. Other forms are only tried if memory decides: if some plan does not fit."""
    first = find(request, top=top, tick=tick)
    forms = request.forms() if first.too_large or first.recomputed or first.offloaded else []
    tried = [(request, first)]
    for _, other in reversed(forms):  # the one with the least memory first
        tried.insert(1, (other, find(other, top=1, tick=tick, space=_space_of_form(request, other))))
        if first.best is None and tried[-1][1].best is None and not request.offload:
            break  # with less on the devices, nothing fits; but weights off the devices, and the undo of release, need fp32 master weights
    if all(found.best is None for _, found in tried):
        return min(tried, key=lambda one: _least(one[1]))
    shortest = min(_step(found) for _, found in tried)
    number = next(n for n, (_, found) in enumerate(tried) if _step(found) * (1 - SHORTER) <= shortest)
    if number == 0:
        return tried[0]
    (best, found), values = tried[number], forms[number - 1][0]
    longer = (
        f"with the defaults, a step takes {_step(first) / _step(found) - 1:.0%} longer" if first.best else "else nothing fits"
    )
    best = replace(best, notes=(*best.notes, f"in all layouts, {as_words(values)}: {longer}"))
    return best, find(best, top=top, tick=tick)


def find(
    request: ResolvedRequest, *, top: int, tick: Tick = lambda done, total: None, space: Space | None = None
) -> SearchResult:
    """Return the result of the requested search. `space`: another space than the request's."""
    train, scorer = request.run.train, scorer_of(request)

    known: dict[Plan, Memory] = {}  # of a plan that does not fit, any rank's

    def held(plan: Plan) -> Memory:
        if plan not in known:
            known[plan] = scorer.held(workload_of(request, plan), briefly=True)
        return known[plan]

    def valid(plan: Plan) -> bool:
        return request.is_valid(plan) and scorer.fits(workload_of(request, plan), held(plan)) and fits_all(request, plan, scorer)

    format, narrow = request.computes
    found = search(
        request.model, request.cluster, seq_len=train.seq_len, global_batch=train.global_batch, format=format, narrow=narrow,
        optimizer=request.run.optimizer.kind, tables=table_kinds(request.run.optimizer), moments=request.run.optimizer.small,
        master=request.run.optimizer.master,
        gradients=train.gradients, outer=outer(request.sites), vocab_tile=train.vocab_tile, copied=copied_each_step(request.run),
        software=request.software, top=top, valid=valid, scorer=scorer, space=space or space_of(request), tick=tick, differ=skeleton,
    )  # fmt: skip

    def weighed(choice: Candidate) -> Candidate:
        return _held(request, choice.plan, scorer, choice.estimate, held(choice.plan))

    runnable = None if found.runnable is None else weighed(found.runnable)
    choices, thrifty = tuple(map(weighed, found.choices)), tuple(map(weighed, found.pareto))
    return replace(found, choices=choices, pareto=thrifty, runnable=runnable)


def choice_of(request: ResolvedRequest, plan: Plan, scorer: Scorer) -> Candidate:
    """Return a plan with its prediction. `Scorer.held` counts the memory."""
    workload = workload_of(request, plan)
    return _held(request, plan, scorer, scorer.estimate(workload), scorer.held(workload))


def _held(request: ResolvedRequest, plan: Plan, scorer: Scorer, estimate: Estimate, memory: Memory) -> Candidate:
    return Candidate(plan, replace(estimate, memory=memory, fits=scorer.fits(workload_of(request, plan), memory)))


def skeleton(plan: Plan) -> tuple[Any, ...]:
    """Return the choices by which a search tells layouts apart: sizes of the tensor, context, pipeline and expert axes, parts of an expert,
    ZeRO 3 or not, and recomputation (segments count as full)."""
    split = plan.tensor, plan.context, plan.pipeline, plan.expert, plan.expert_tensor
    whole = plan.recompute.startswith(("full", *Space().again))
    return *split, plan.zero == 3, "full" if whole else plan.recompute


def space_of(request: ResolvedRequest) -> Space:
    """Return the search space."""
    if request.forward_only:
        return Space.of_prefill()
    shares = Space().offload if request.offload else ()
    installed = tuple(map(int, version("torch").split(".")[:2]))  # read from disk
    again = Space().again if request.ours else ()
    split = installed >= COMPILES and not (request.ours and follows_others(request.run))
    return Space(again=again, offload=shares, compile=request.compiles, compile_split=split)


def _space_of_form(request: ResolvedRequest, other: ResolvedRequest) -> Space:
    """Return the search space in which another form of the state can save memory: a change to `split16` saves none where data ranks shard
    all master weights."""
    changed = other.run.optimizer.master != request.run.optimizer.master
    return replace(space_of(other), sharded=not changed or other.run.optimizer.master != "split16")


def scorer_of(request: ResolvedRequest) -> Scorer:
    """Return the scorer for the plans of a request."""
    return Scorer(calibration(), forward_only=request.forward_only, factor=request.factor)


def workload_of(request: ResolvedRequest, plan: Plan) -> Workload:
    """Return the workload of a step of the request's training under a plan."""
    return decided(workload_in(request, plan, request.run.train))


def _step(found: SearchResult) -> float:
    return inf if found.best is None else found.best.estimate.time.step


def _least(found: SearchResult) -> float:
    return inf if found.closest is None else found.closest.estimate.memory.total
