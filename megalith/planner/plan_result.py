"""The best plans for a request: the data behind tables, JSON and run files. Imports torch only to trace parts."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from megalith.cost.constants import calibration
from megalith.cost.memory import Memory
from megalith.cost.software import SOFTWARE
from megalith.planner.candidates import candidates
from megalith.planner.confidence import Confidence, confidence_of
from megalith.planner.described import roomy
from megalith.planner.explain import Neighbour, explain
from megalith.planner.find import choice_of, find, find_form, scorer_of, space_of, workload_of
from megalith.planner.formats import Gains, is_rehearsed, state_of
from megalith.planner.linked import LinkChoice, linked, whole_batch
from megalith.planner.measured import Own
from megalith.planner.phases import InPhase, in_phases, whole_training
from megalith.planner.problems import REMEDIES, remedies_for, unpublished
from megalith.planner.request import ResolvedRequest
from megalith.planner.search import Candidate, Scorer, SearchResult
from megalith.planner.site_plans import SitesResult, plan_sites, single_site
from megalith.planner.training import Training
from megalith.schedule.table import kind
from megalith.spec.cluster import ClusterSpec
from megalith.spec.plan import Plan
from megalith.spec.problem import Problem, SpecErrors

PREFILL = "FLOPs of forward, without attention scores that the causal mask hides, over the bf16 peak"

CONVENTION = "model FLOPs, with attention counted in full and recomputation not counted, over the bf16 peak"
"""Megalith's definition of MFU, which is PaLM's (Chowdhery et al. 2022, appendix B)."""

ERRORS_PAGE = "errors of predictions: docs/planner.md"


@dataclass(frozen=True)
class PlanResult:
    """Result of a search. `own`: prediction for the run file's plan; `trainings`: cost of a whole training with each of `found.choices`,
    if the length is known."""

    request: ResolvedRequest
    found: SearchResult
    trainings: tuple[Training, ...]
    own: Candidate | None
    neighbours: tuple[Neighbour, ...]
    frontier: "tuple[Point, ...]" = ()
    what_ifs: "tuple[WhatIf, ...]" = ()
    phases: tuple[InPhase, ...] = ()
    """The best plan in each phase of the run, if the run has several phases."""
    measured: tuple[Own, ...] = ()
    """The user's measured rows. Predicted times move toward the measured times, depending on the uncertainty of both."""
    linked: LinkChoice | None = None
    """Prediction of the run's sites; None without a link between sites."""
    site_plans: SitesResult | None = None
    """Result for each site; None if sites have no clusters of their own."""
    gains: Gains | None = None
    """Time that 8-bit products save in each layer under the best plan; None if the trainer does not use 8-bit products."""

    @cached_property
    def confidence(self) -> Confidence:
        """The uncertainty of the figures."""
        return confidence_of(self.request, self.measured)

    @property
    def convention(self) -> str:
        """The FLOPs that MFU counts, and the peak that it divides them by."""
        return (PREFILL if self.request.forward_only else CONVENTION).replace("bf16", self.request.cluster.accelerator.half)

    @property
    def assumption(self) -> str:
        """The software that predictions assume."""
        request = self.request
        return assumption(request.software, compiled=request.compiles) + (
            f"; {request.format} is emulated" if request.ours and is_rehearsed(request.run, request.cluster) else ""
        )

    def to_json(self) -> dict[str, Any]:
        """Return all figures by name, with each plan also in short form."""
        request, cluster = self.request, self.request.cluster
        found, best = self.found.to_json(), self.found.runnable
        found["runnable"] = None if best is None else best.to_json() | self._said(best)
        for key in ("choices", "pareto"):
            for row, choice in zip(found[key], getattr(self.found, key), strict=True):
                row.update(self._said(choice))
        for row, one in zip(found["choices"], self.trainings, strict=False):
            row["training"] = vars(one)
        return {
            "model": request.run.model.name,
            "cluster": {
                "name": request.run.cluster, "accelerator": cluster.accelerator.name, "count": cluster.count, "nodes": cluster.nodes,
                "per_node": cluster.per_node, "price_per_hour": cluster.price_per_hour, "watts": cluster.accelerator.power,
                "peak": cluster.accelerator.wide, "memory": cluster.accelerator.memory,
            },
            "seq_len": request.run.train.seq_len,
            "global_batch": request.run.train.global_batch,
            "format": request.format,
            "forward_only": request.forward_only,
            "convention": self.convention,
            "software": request.software,
            "assumption": self.assumption,
            "sure": self.confidence.to_json(),
            "spare": headroom(),
            "host_memory": cluster.host_room,
            "notes": list(request.notes),
            **found,
            "own": None if self.own is None else self.own.to_json() | self._said(self.own),
            "neighbours": [one.to_json() for one in self.neighbours],
            "frontier": [one.to_json() | self._said(one.choice) for one in self.frontier],
            "what_ifs": [one.to_json() | self._said(one.choice) for one in self.what_ifs],
            "phases": [one.to_json() for one in self.phases],
            **(dict.fromkeys(("across", "proposed", "gain", "together", "merging")) if self.linked is None else self.linked.to_json()),
            "sites": [] if self.site_plans is None else self.site_plans.to_json(),
            "gains": None if self.gains is None else self.gains.to_json(),
        }  # fmt: skip

    def _said(self, choice: Candidate | None) -> dict[str, Any]:
        """Return a choice in short form; `predicted_only` is True if the trainer cannot run it."""
        if choice is None:
            return {"layout": None, "predicted_only": None}
        only = self.request.forward_only or not self.request.ours
        return {"layout": short(choice.plan), "predicted_only": only}


def best_plans(
    request: ResolvedRequest,
    *,
    top: int = 10,
    why: bool = False,
    pareto: bool = False,
    what_ifs: Sequence[tuple[str, ResolvedRequest]] = (),
    measured: Sequence[Own] = (),
    tick: Callable[[int, int], None] = lambda done, total: None,
) -> PlanResult:
    """Search for the best plans. `why`: also compute the cost of each neighbour of the best plan. `pareto`: also search on
    fewer devices. `what_ifs`: pairs of a text and a changed request, which is searched too. `measured`: the user's rows.
    `tick` gets the number of new parts that the search has traced, and the number of all new parts. Raises SpecErrors if
    nothing fits."""
    request = replace(request, factor=confidence_of(request, measured).factor)

    def must(other: ResolvedRequest) -> tuple[ResolvedRequest, SearchResult]:
        form, some = find_form(other, top=top, tick=tick)
        if some.best is None:  # the ways out are those from what was asked: other forms of the state would rule some out
            raise SpecErrors(_nothing(other, some, scorer_of(other)))
        return form, some

    def whole() -> float | None:
        others, batch = (request,) if each is None else each.asks, whole_batch(request).train.global_batch
        bests = (find(single_site(one, batch), top=1, tick=tick).best for one in others)
        return min((one.estimate.time.step for one in bests if one is not None), default=None)

    asked = request
    if (each := plan_sites(request, lambda one: must(one)[1])) is None:
        request, found = must(request)
        while (wider := asked.widened(found.choices[0].plan)) is not None:
            asked = wider  # not `request`: its form of the state was chosen, and others must be tried again
            request, found = must(asked)
    else:
        number = (request.sites and request.sites.site) or 0
        request, found = replace(each.asks[number], sites=each.sites), each.found[number]
    scorer, step = scorer_of(request), found.choices[0].estimate.time.step
    tokens = request.tokens
    trainings = () if tokens is None else tuple(whole_training(one, request, scorer) for one in found.choices)
    file, own = request.with_values(state_of(asked.run)), request.own
    mine = None if own is None or not file.is_valid(own) else choice_of(file, own, scorer)
    near = explain(workload_of(request, found.choices[0].plan), scorer) if why and not request.forward_only else ()
    return PlanResult(
        request, found, trainings, mine, tuple(one for one in near if request.is_valid(one.plan)),
        frontier(request, found) if pareto else (),
        tuple(_what_if(words, replace(other, factor=request.factor)) for words, other in what_ifs),
        in_phases(request, found.choices[0].plan, scorer), tuple(measured),
        linked(request, step if each is None else max(each.steps), whole), each, request.gains(found.choices[0].plan),
    )  # fmt: skip


@dataclass(frozen=True)
class Point:
    """A layout on the Pareto frontier of time, cost and free memory; it may use only some of the devices."""

    devices: int
    choice: Candidate
    dollars: float | None
    """US dollars for a billion tokens; None if no price is known."""

    @property
    def device_hours(self) -> float:
        """Device hours of training on a billion tokens."""
        return self.devices * self.choice.estimate.time.step / self.choice.estimate.tokens * 1e9 / 3600

    def to_json(self) -> dict[str, Any]:
        named = {"devices": self.devices, "dollars": self.dollars, "device_hours": self.device_hours}
        return named | self.choice.to_json()


def frontier(request: ResolvedRequest, found: SearchResult) -> tuple[Point, ...]:
    """Return the Pareto frontier, the fastest layout first, on all devices, and on a half, a quarter and an eighth of the devices (only
    on all devices if figures were measured on a CPU). With fewer devices, a step takes longer, but less device time is wasted."""
    points = [_point(request.cluster, choice) for choice in found.pareto]
    for share in (2, 4, 8):
        if request.cluster.count % share:
            break
        if (smaller := request.cluster.resized(request.cluster.count // share)) is None:
            break
        fewer = replace(request, cluster=smaller)
        points += [_point(fewer.cluster, choice) for choice in find(fewer, top=1).pareto]
    best = [one for one in points if not any(_beats(other, one) for other in points)]
    return tuple(sorted(best, key=lambda one: one.choice.estimate.time.step))


def _point(cluster: ClusterSpec, choice: Candidate) -> Point:
    point = Point(cluster.count, choice, None)
    price = cluster.price_per_hour
    return point if price is None else replace(point, dollars=price * point.device_hours)


def _beats(one: Point, other: Point) -> bool:
    """True if `one` is worse than `other` in nothing, and better in something."""
    pairs = [(key(one), key(other)) for key in (_seconds, lambda p: p.device_hours, lambda p: p.choice.estimate.memory.total)]
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


def _seconds(point: Point) -> float:
    return point.choice.estimate.time.step


@dataclass(frozen=True)
class WhatIf:
    """The best layout after one change of the request; `choice` is None if nothing fits."""

    change: str
    choice: Candidate | None
    training: Training | None

    def to_json(self) -> dict[str, Any]:
        whole = None if self.training is None else vars(self.training)
        return {"change": self.change, "training": whole} | (
            self.choice.to_json() if self.choice else {"plan": None, "estimate": None}
        )


def _what_if(words: str, request: ResolvedRequest) -> WhatIf:
    request, found = find_form(request, top=1)
    best = found.best
    known = best is not None and request.tokens is not None
    return WhatIf(words, best, whole_training(best, request, scorer_of(request)) if known and best else None)


def assumption(software: str, *, compiled: bool = False) -> str:
    """Return the assumed software, and the page about the errors of predictions, as text."""
    return f"as if {SOFTWARE[software].title} ran the model{', compiled' if compiled else ''}; {ERRORS_PAGE}"


def headroom() -> float:
    """Return the share of a device's memory that plans leave free."""
    return calibration().overheads["fused"].slack


def short(plan: Plan) -> str:
    """Return a layout as a short text: t8 c2 p16x4 e64 d128 z1 m1. The text leaves out values of 1, except for data, ZeRO and microbatch. A
    schedule other than (interleaved) 1F1B follows the pipeline: p16x2 zb-v d8 z1 m1. Copies of the state (HSDP) follow the ZeRO stage: d64
    z3 r8 m1. Parts of each expert follow the expert ranks: t4 e8x4 d16 z1 m1. Ulysses ranks, or a gather of keys and values, follow the
    context ranks: c16u4 d8 z1 m1, c16 gather d8 z1 m1. After the microbatch comes the percentage of the optimizer's state in host memory
    (d8 z1 m1 o50) or on disk (d8 z1 m1 disk100), with "weights" if weights are cast from this state and "released" if gradients are
    released. The text ends with the percentage of blocks whose activations are in host memory (d8 z1 m1 a50) or on disk (d8 z1 m1
    a-disk100), or with the parts of blocks whose activations are there (d8 z1 m1 a mlp).
    """
    tensor = f"t{plan.tensor} " if plan.tensor > 1 else ""
    context = f"c{plan.context}{_exchange(plan)} " if plan.context > 1 else ""
    parts = f"x{plan.expert_tensor}" if plan.expert_tensor > 1 else ""
    expert = f"e{plan.expert}{parts} " if plan.expert > 1 or parts else ""
    chunks = f"x{plan.chunks}" if plan.chunks > 1 else ""
    name = "" if kind(plan.schedule).fills_and_drains else f"{plan.schedule} "
    pipeline = f"p{plan.pipeline}{chunks} {name}" if plan.pipeline > 1 else ""
    copies = f" r{plan.replicate}" if plan.replicate > 1 else ""
    place = "disk" if plan.state.optimizer == "disk" else "o"
    away = f" {place}{100 * plan.state.away:.0f}" if plan.state.away else ""
    away += " weights" * (plan.state.weights_away > 0) + " released" * plan.state.release
    retain = "a-disk" if plan.retain.places == ("disk",) else "a"
    of = f" {'+'.join(plan.retain.parts)}" if plan.retain.blocks == "device" else f"{100 * plan.retain.away:.0f}"
    away += f" {retain}{of}" if plan.retain.away else ""
    return f"{tensor}{context}{pipeline}{expert}d{plan.data} z{plan.zero}{copies} m{plan.microbatch}{away}"


def _exchange(plan: Plan) -> str:
    heads = f"u{plan.ulysses}" if plan.ulysses > 1 else ""
    return heads + (" gather" if plan.context_method == "gather" and plan.ulysses < plan.context else "")


def _nothing(request: ResolvedRequest, found: SearchResult, scorer: Scorer) -> list[Problem]:
    """Return the reasons why there is no plan."""
    name = request.run.cluster
    if found.closest is None:  # there is no layout, or those that fit were all denied
        first = next(_plans(request), None)
        reason = "no plan that fits passes megalith check" if first else "no layout divides the model and the batch"
        denied = request.problems(first) if first else []
        return denied or [_problem(name, reason, "Use more devices, or another global batch.")]
    memory, limit = found.closest.estimate.memory, found.closest.estimate.limit or 0.0
    kinds = {key: value for key, value in vars(memory).items() if key not in ("rank", "host", "disk")}
    largest = max(kinds, key=lambda key: kinds[key])
    parts = ", ".join(
        f"{key} {value / 2**30:.1f}" for key, value in sorted(kinds.items(), key=lambda item: -item[1]) if value > 2**26
    )
    room = f"{request.cluster.host_room / 2**30:.0f} GiB a device"
    away = f", nor with state and activations in host memory ({room}) or on disk" if space_of(request).offload else ""
    reason = (
        f"nothing fits{away}: of {found.looked_at:,} plans, the one with the least memory ({short(found.closest.plan)}, recompute "
        f"{found.closest.plan.recompute}) "
        f"needs {memory.total / 2**30:.1f} of {limit / 2**30:.1f} GiB on its worst rank, most of it {largest} ({parts} GiB)"
    )
    return [_problem(name, reason, _ways_out(request, memory, largest, scorer))]


def _ways_out(request: ResolvedRequest, memory: Memory, largest: str, scorer: Scorer) -> str:
    """Return changes with which a plan would fit: cheap ones on the same devices, more devices, larger ones, or a smaller task."""
    activations = largest in ("activations", "working")
    remedy = cheapest_remedy(request, activations=activations) if request.ours and not request.forward_only else ""
    ways = [f"The cheapest change that fits on these devices: {remedy}"] if remedy else []
    cluster, batch = request.cluster, request.run.train.global_batch
    for times in (2, 4, 8, 16, 32, 64):
        larger = cluster.resized(cluster.count * times)
        if larger is None or unpublished(cluster.accelerator.name, larger):
            break
        uncounted = {"cluster": "local"}  # else `check` counts its devices
        whole = request.whole and request.whole.model_copy(update=uncounted)
        there = replace(request, cluster=larger, run=request.run.model_copy(update=uncounted), whole=whole)
        least = [there, *(form for _, form in there.forms())][-1]
        if any(_fits(least, plan, scorer) for plan in _plans(least)) and find_form(there, top=1)[1].best is not None:
            ways.append(f"{larger.count:,} {cluster.accelerator.name} would be enough for {batch:,} sequences a step")
            break
    need = memory.total * (1 + headroom())
    if others := roomy(cluster.count, memory=need, format=request.format, ours=request.ours):
        ways.append(f"{cluster.count:,} {' or '.join(others)} would be enough")
    if activations or largest == "logits":
        ways.append(f"sequences shorter than {request.run.train.seq_len:,} may be enough")
    else:
        ways.append("a smaller model would be enough")
    text = "; ".join(ways)
    return f"{text[0].upper()}{text[1:]}."


def cheapest_remedy(request: ResolvedRequest, *, activations: bool = False) -> str:
    """Return, as text, the first of `remedies_for` a run with which a valid plan fits, found by searching; empty if none helps.
    `activations`: also try to keep activations in fewer bits."""
    can = {"small": not request.small, "kept": activations, "offload": not request.offload}
    for some in remedies_for(request.run):
        if not all(can[name] for name in some):
            continue
        if find_form(request.changed(**dict.fromkeys(some, True)), top=1)[1].best is not None:
            return " with ".join(REMEDIES[name].words for name in some)
    return ""


def _plans(request: ResolvedRequest) -> Iterator[Plan]:
    train = request.run.train
    return candidates(
        request.model, request.cluster, seq_len=train.seq_len, global_batch=train.global_batch, space=space_of(request)
    )


def _fits(request: ResolvedRequest, plan: Plan, scorer: Scorer) -> bool:
    workload = workload_of(request, plan)
    return scorer.fits(workload, scorer.memory(workload))


def _problem(name: str, reason: str, way_out: str) -> Problem:
    return Problem("error", "--cluster", name, reason, way_out)
