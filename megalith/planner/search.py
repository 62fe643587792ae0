"""Search for the best plans for a model on a cluster. Memory is checked first; then time is computed in closed form. A schedule without a
closed form is simulated if the plan could be among the best. Imports torch only to trace parts."""

from bisect import insort
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from operator import itemgetter
from typing import Any, NamedTuple

from megalith.cost import host, predicted, released
from megalith.cost.constants import Calibration, calibration
from megalith.cost.estimate import Estimate, PartTimes, busy_seconds, estimate, part_times, step_time
from megalith.cost.memory import Memory, fits, memory
from megalith.cost.parts import Parts, parts, prepare
from megalith.cost.prefill import prefill, prefill_memory
from megalith.cost.software import OURS, assumed
from megalith.cost.time import Setting
from megalith.cost.workload import Narrow, Workload
from megalith.planner.candidates import (
    NESTED,
    SEGMENTS,
    Space,
    but_microbatch,
    candidates,
    finer,
    is_ring,
    lightened,
    lighter_states,
    retained,
    segmented,
    with_state,
)
from megalith.schedule.table import interleaving, kind
from megalith.spec.cluster import ClusterSpec
from megalith.spec.model import ModelSpec
from megalith.spec.plan import Plan
from megalith.spec.state import WIDE, Moments, Slot


@dataclass(frozen=True)
class Candidate:
    """One plan with its predicted time and memory."""

    plan: Plan
    estimate: Estimate

    @property
    def offload(self) -> float:
        """The share of the optimizer's state that is not on the device."""
        return self.plan.state.away

    @property
    def moves(self) -> bool:
        """True if some of the optimizer's state or of the activations is not on the device, or if gradients are released."""
        return bool(self.plan.state.away or self.plan.retain.away or self.plan.state.release)

    def to_json(self) -> dict[str, Any]:
        return {"plan": self.plan.model_dump(), "offload": self.offload, "estimate": self.estimate.to_json()}


@dataclass(frozen=True)
class SearchResult:
    """Result of a search; `choices` are sorted by step time."""

    choices: tuple[Candidate, ...]
    pareto: tuple[Candidate, ...]
    """Pareto frontier of step time and free memory."""
    looked_at: int
    too_large: int
    """Number of plans that do not fit, except plans whose context exchange is too slow to be shown."""
    closest: Candidate | None
    """The plan that needs the least memory, if nothing fits."""
    refused: int = 0
    """Number of plans that `valid` refused although they are at least as fast as the slowest shown plan."""
    offloaded: int = 0
    """Number of plans that only fit with some of the optimizer's state or of the activations in host memory or on disk, or with released
    gradients. Plans that fit only in this way are not in `too_large`."""
    runnable: Candidate | None = None
    """The best plan that keeps all state, gradients and activations on the devices."""
    recomputed: int = 0
    """Number of plans that only fit with recomputation in segments. Plans that fit only in segments are not in `too_large`."""

    @property
    def best(self) -> Candidate | None:
        return self.choices[0] if self.choices else None

    def to_json(self) -> dict[str, Any]:
        def of(value: Any) -> Any:
            some = [one.to_json() for one in value] if isinstance(value, tuple) else value
            return some.to_json() if isinstance(some, Candidate) else some

        return {field.name: of(getattr(self, field.name)) for field in fields(self)}


def search(
    model: ModelSpec,
    cluster: ClusterSpec,
    *,
    seq_len: int,
    global_batch: int,
    format: str = "bf16",
    optimizer: str = "adamw",
    tables: tuple[str, ...] = (),
    moments: Moments = WIDE,
    master: str = "fp32",
    gradients: str = "fp32",
    outer: tuple[Slot, ...] = (),
    narrow: Narrow | None = None,
    vocab_tile: int = 0,
    copied: bool = False,
    software: str = OURS,
    space: Space | None = None,
    top: int = 10,
    valid: Callable[[Plan], bool] | None = None,
    differ: Callable[[Plan], Hashable] | None = None,
    scorer: "Scorer | None" = None,
    tick: Callable[[int, int], None] = lambda done, total: None,
) -> SearchResult:
    """Return the `top` fastest plans that fit, for the software of this name in `cost.software`. `global_batch` counts sequences. The
    result leaves out plans that `valid` refuses, and plans for which `differ` returns the same value as for a faster plan. `tick` gets
    the number of model parts traced so far, and the number of parts to trace."""
    scorer, space = scorer or Scorer(calibration()), space or Space()
    plans = candidates(model, cluster, seq_len=seq_len, global_batch=global_batch, space=space)
    how = {"optimizer": optimizer, "moments": moments, "master": master, "gradients": gradients, "narrow": narrow}
    how |= {"tables": tables, "outer": outer, "vocab_tile": vocab_tile, "copied": copied}
    workloads = [Workload(model, plan, cluster, seq_len, global_batch, format, assumed(plan, software), **how) for plan in plans]
    scorer.prepare(workloads, tick)
    rings, exchanges = ([one for one in workloads if is_ring(one.plan) == ring] for ring in (True, False))
    sorter, most = _Sorter(scorer, space), 4 * top
    for workload in rings:
        sorter.add(workload)
    here = _simulated(sorter.waiting, sorter.fitting, scorer, space, most=most)
    sorter.fitting, sorter.waiting = here, []
    for bound, workload in sorted(((scorer.busy(one), one) for one in exchanges), key=itemgetter(0)):
        if len(sorter.fitting) >= most and bound >= _step(sorter.fitting[most - 1]):
            break
        sorter.add(workload)
    here = _simulated(sorter.waiting, sorter.fitting, scorer, space, most=most)
    parts = bool(workloads) and workloads[0].software_profile.ours and "selective" in dict(space.policies)
    if parts:
        here = _finer(here, workloads[0], scorer, top)
    ranked = _simulated(sorter.offloaded, here, scorer, space, most=most)
    if parts and len(ranked) > len(here):
        ranked = _finer(ranked, workloads[0], scorer, top)
    best, refused = _first_valid(ranked, top, valid, differ)
    runnable = next(iter(_first_valid(here, 1, valid)[0]), None)
    closest = None if ranked or sorter.least is None else _choice(*sorter.least, scorer)
    thrifty = _first_valid(pareto(ranked), None, valid)[0]
    counts = {"looked_at": len(workloads), "too_large": sorter.too_large, "offloaded": sorter.away}
    return SearchResult(
        best, thrifty, closest=closest, refused=refused, runnable=runnable, recomputed=sorter.recomputed, **counts
    )


class BoundedCandidate(NamedTuple):
    """A plan that is only estimated if it could be among the best. `bound`: lower bound of its step's seconds; `close`: True
    if the bound is tight; `lighter`: True if the variants that need less memory than this plan are meant, and not the plan itself."""

    bound: float
    workload: Workload
    held: Memory
    close: bool = False
    lighter: bool = False


class _Sorter:
    """Workloads that fit, in three groups: the step time has a closed form, it has no closed form, or state or activations are
    offloaded."""

    def __init__(self, scorer: "Scorer", space: Space) -> None:
        self.scorer, self.space = scorer, space
        self.fitting: list[Candidate] = []
        self.waiting: list[BoundedCandidate] = []
        self.offloaded: list[BoundedCandidate] = []
        self.least: Sized | None = None
        """The workload with the least memory among the workloads that do not fit."""
        self.too_large = self.recomputed = self.away = 0
        self._smallest: dict[tuple[Any, ...], int] = {}
        """For each combination of all other choices, the smallest microbatch that does not fit; larger microbatches do not fit either."""

    def add(self, workload: Workload) -> None:
        """Add a workload to its group if it fits, else variants of it that fit. Workloads that only differ in the microbatch must come in
        ascending order."""
        scorer, space = self.scorer, self.space
        size, others = workload.plan.microbatch, but_microbatch(workload.plan)
        if self._smallest.get(others, size) < size and not (space.offload and released.can_be(workload)):
            self.too_large += 1
            return
        held = scorer.memory(workload)
        if scorer.fits(workload, held):
            self._keep(workload, held)
            return
        again = _again(workload, held, scorer, space.again)
        near = next((one for one in again if scorer.fits(*one)), None)
        if near is not None:
            self.recomputed += 1
            self.waiting.append(BoundedCandidate(scorer.busy(near[0]), *near))
        found = _elsewhere(again, near, _retained(workload, held, scorer, space.offload), scorer, space.offload)
        self.away += bool(found) and near is None
        self.offloaded += [BoundedCandidate(scorer.busy(one), one, needed) for one, needed in found]
        if near is None and not found:
            self.too_large += 1
            self._smallest[others] = size
            if self.least is None or again[-1][1].total < self.least[1].total:
                self.least = again[-1]

    def _keep(self, workload: Workload, held: Memory) -> None:
        """Keep a workload that fits. If the workload leaves little memory free, also keep variants that need less memory, because the
        exact memory may be higher."""
        scorer = self.scorer
        bounded = BoundedCandidate(scorer.busy(workload), workload, held)
        if kind(workload.plan.schedule).fills_and_drains:
            insort(self.fitting, _choice(workload, held, scorer), key=_step)
        else:
            self.waiting.append(bounded)
        if self.space.again and workload.plan.recompute == "full" and not scorer.fits(workload, held, more=CLOSE * held.total):
            self.waiting.append(bounded._replace(lighter=True))  # these recompute more, so they take at least as long


def _choice(workload: Workload, held: Memory, scorer: "Scorer") -> Candidate:
    return Candidate(workload.plan, scorer.estimate(workload, held))


CLOSE = 0.25
"""Largest relative error of the quick memory count."""

Sized = tuple[Workload, Memory]
"""A workload and its memory."""


def _again(workload: Workload, held: Memory, scorer: "Scorer", policies: Sequence[str]) -> list[Sized]:
    """Return forms of a workload that need less memory: first the workload itself, or, if the workload recomputes all blocks, the
    segments with the least memory; then nested segments, which compute more, if they need less memory."""
    plan, found = workload.plan, [(workload, held)]
    if plan.recompute != "full" or not scorer.fits(workload, held, more=-held.activations - held.optimizer):
        return found

    def smallest(plans: Sequence[Plan]) -> list[Sized]:
        others = (replace(workload, plan=one) for one in plans)
        return [min((*found, *((other, scorer.memory(other)) for other in others)), key=lambda one: one[1].total)]

    if SEGMENTS in policies:
        found = smallest(segmented(plan, len(workload.model.blocks)))
    if NESTED in policies:
        found += smallest([plan.model_copy(update={"recompute": NESTED})])
    return found


def _elsewhere(
    again: Sequence[Sized], near: Sized | None, moved: Sequence[Sized], scorer: "Scorer", shares: Sequence[float]
) -> list[Sized]:
    """Return the forms of a workload that fit with offloaded state or activations, or, if neither is enough, with both.
    `near`: the form that fits without offloading; `moved`: forms with offloaded activations."""
    # nested segments compute more than others: with these, and state elsewhere, a step may be shorter
    lighter = None if near and near[0].plan.recompute != NESTED else _lighter(again, scorer, shares)
    fitting = [one for one in (lighter, *moved) if one is not None and scorer.fits(*one)]
    if fitting or near is not None or (both := _lighter(moved, scorer, shares)) is None:
        return fitting
    return [both]


def _lighter(bases: Sequence[Sized], scorer: "Scorer", shares: Sequence[float]) -> Sized | None:
    """Return the first of some workloads that fits after some of its state is offloaded or its gradients are released (`lighter_states`),
    and its memory. Return None if no workload fits."""
    for states in lighter_states(shares):
        for one, held in bases:
            for state in states:
                other = replace(one, plan=with_state(one.plan, state))
                released_too = not state.release or released.can_be(other)
                allowed = released_too and (state.weights == "device" or host.has_weights(other))
                least = sum(getattr(held, category) for category in lightened(state))
                if allowed and scorer.fits(one, held, more=-least) and scorer.fits(*(found := (other, scorer.memory(other)))):
                    return found
    return None


def _retained(workload: Workload, held: Memory, scorer: "Scorer", shares: Sequence[float]) -> list[Sized]:
    """Return the variants of a workload that fit with offloaded activations: one for each share of blocks in host memory that fits (not
    only the smallest share, because the exact memory may be higher), or, if no share fits, one with all blocks on disk. If no variant fits,
    return the variants with all activations offloaded that need less memory than the workload itself."""
    if (
        not shares
        or not workload.software_profile.ours
        or not scorer.fits(workload, held, more=-held.activations - held.optimizer)
    ):
        return []
    alone = scorer.fits(workload, held, more=-held.activations)
    plans = retained(workload.plan, len(workload.model.blocks), shares if alone else shares[-1:])
    sized = [(other, scorer.memory(other)) for other in (replace(workload, plan=plan) for plan in plans)]
    if fitting := [one for one in sized if scorer.fits(*one)]:
        return [one for one in fitting if one[0].plan.retain.places == ("host",)] or fitting
    return [one for one in sized if one[0].plan.retain.share == 1 and one[1].total < held.total]


def _simulated(
    waiting: list[BoundedCandidate], known: Sequence[Candidate], scorer: "Scorer", space: Space, *, most: int
) -> list[Candidate]:
    """Simulate the candidates in `waiting`, and return them and the candidates in `known`, the fastest first. A plan that would not be
    among the first `most` even without idle time is left out."""
    ranked, numbers = sorted(known, key=_step), count()
    queue = [(one.bound, next(numbers), one) for one in waiting]
    heapify(queue)
    while queue:
        bound, number, one = queue[0]
        if len(ranked) >= most and bound >= _step(ranked[most - 1]):
            break
        if one.lighter:
            heappop(queue)
            for other, held in _again(one.workload, one.held, scorer, space.again):
                if other is not one.workload:
                    found = BoundedCandidate(scorer.busy(other), other, held)
                    heappush(queue, (found.bound, next(numbers), found))
        elif one.close:
            heappop(queue)
            insort(ranked, _choice(one.workload, one.held, scorer), key=_step)
        else:
            bound = max(bound, scorer.bound(one.workload))
            heapreplace(queue, (bound, number, one._replace(bound=bound, close=True)))
    return ranked


def _finer(ranked: Sequence[Candidate], like: Workload, scorer: "Scorer", most: int) -> list[Candidate]:
    """Return candidates, the fastest first; for each of the first `most` also its fastest variant that recomputes or offloads smaller
    parts, if this variant fits and is faster."""
    known = [one.plan for one in ranked[:most]]
    forms = {plan: base for base in ranked[:most] for plan in finer(base.plan, like.model) if plan not in known}
    others = [replace(like, plan=plan, software_profile=assumed(plan)) for plan in forms]
    scorer.prepare(others, lambda done, total: None)
    sized = ((other, scorer.memory(other)) for other in others)
    found = (_choice(*one, scorer) for one in sized if scorer.fits(*one))
    return sorted([*ranked, *(one for one in found if _step(one) < _step(forms[one.plan]))], key=_step)


def _step(choice: Candidate) -> float:
    return choice.estimate.time.step


def _first_valid(
    ranked: Sequence[Candidate],
    most: int | None,
    valid: Callable[[Plan], bool] | None,
    differ: Callable[[Plan], Hashable] | None = None,
) -> tuple[tuple[Candidate, ...], int]:
    """Return the first `most` choices (None: all) that are valid and differ, and the number of faster plans that were refused."""
    found: list[Candidate] = []
    seen = set[Hashable]()
    refused = 0
    for choice in ranked:
        if len(found) == most:
            break
        if differ is not None and differ(choice.plan) in seen:
            continue
        if valid is None or valid(choice.plan):
            found.append(choice)
            seen |= {differ(choice.plan)} if differ else set()
        else:
            refused += 1
    return tuple(found), refused


def pareto(ranked: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Return the choices, in order of time, that need less memory than every faster choice."""
    found: list[Candidate] = []
    least = float("inf")
    for choice in ranked:
        if choice.estimate.memory.total < least:
            least = choice.estimate.memory.total
            found.append(choice)
    return tuple(found)


class Scorer:
    """Estimator for many plans of one model, which computes common quantities once. `forward_only`: the prefill of prompts
    instead of training. `factor`: correction of all predicted times by measured steps."""

    def __init__(self, figures: Calibration, *, forward_only: bool = False, factor: float = 1.0) -> None:
        self.figures, self.forward_only, self.factor = figures, forward_only, factor
        self._parts: dict[tuple[Any, ...], Parts] = {}
        self._times: dict[tuple[Any, ...], PartTimes] = {}

    def prepare(self, workloads: Sequence[Workload], tick: Callable[[int, int], None]) -> None:
        """See `cost.parts.prepare`."""
        prepare({self._key(workload): workload for workload in workloads}.values(), tick)

    def parts(self, workload: Workload) -> Parts:
        """See `cost.parts.parts`."""
        key = self._key(workload)
        if key not in self._parts:
            self._parts[key] = parts(workload)
        return self._parts[key]

    def memory(self, workload: Workload) -> Memory:
        """See `cost.memory.memory`."""
        if self.forward_only:
            return prefill_memory(workload, self.parts(workload), self.figures)
        return memory(workload, self.parts(workload), self.figures.overheads[workload.software_profile.overheads])

    def held(self, workload: Workload, *, briefly: bool = False) -> Memory:
        """Return memory by `cost.predicted.held`, which is slower but nearer to the trainer; for other software, prefills and offloaded
        state, by `memory`. `briefly`: if the plan does not fit, return the memory of the first rank found that does not fit."""
        if self.forward_only or not workload.software_profile.ours or workload.plan.state.away:
            return self.memory(workload)
        some = partial(self.fits, workload) if briefly else lambda memory: True
        return predicted.held(workload, self.figures, fits=some)

    def fits(self, workload: Workload, held: Memory, *, more: float = 0.0) -> bool:
        """See `cost.memory.fits`."""
        return fits(workload, held, self.figures.overheads[workload.software_profile.overheads], more=more)

    def estimate(self, workload: Workload, held: Memory | None = None) -> Estimate:
        """See `cost.estimate.estimate`. `held`: the memory, if it is already known."""
        traced = self.parts(workload)
        if self.forward_only:
            found = prefill(workload, self.figures, traced, self._part_times(workload, traced))
        else:
            found = estimate(workload, self.figures, traced, held or self.memory(workload), self._part_times(workload, traced))
        return found if self.factor == 1 else replace(found, time=found.time * self.factor)

    def busy(self, workload: Workload) -> float:
        """See `cost.estimate.busy_seconds`: quick to compute."""
        traced = self.parts(workload)
        return self.factor * busy_seconds(workload, traced, self._part_times(workload, traced))

    def bound(self, workload: Workload) -> float:
        """Lower bound of the seconds of a training step: the step without idle time."""
        plan, traced = workload.plan, self.parts(workload)
        plain = plan.model_copy(update={"schedule": interleaving(plan.chunks)})
        closed = replace(workload, plan=plain)
        time = step_time(closed, Setting.of(closed, self.figures), traced, self._part_times(workload, traced))
        return self.factor * (time.step - time.bubble - time.other)

    def _part_times(self, workload: Workload, traced: Parts) -> PartTimes:
        sums = workload.plan.zero < 2, workload.microbatches > 1, workload.gradients
        how = workload.format, workload.plan.context_method, workload.frozen, sums
        timed = (*self._key(workload), *how, workload.software_profile, workload.cluster.count)
        if timed not in self._times:
            self._times[timed] = part_times(traced, Setting.of(workload, self.figures))
        return self._times[timed]

    def _key(self, workload: Workload) -> tuple[Any, ...]:
        return id(workload.model), workload.layout, workload.plan.recompute, workload.narrow
