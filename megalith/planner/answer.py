"""The best plans for a request, as a value: for a table, for programs, and for a run file. No torch unless a part must be
traced."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from typing import Any

from megalith.check.software import COMPILES
from megalith.cost import host
from megalith.cost.constants import calibration
from megalith.cost.estimate import Estimate
from megalith.cost.memory import Memory
from megalith.cost.segments import decided
from megalith.cost.software import SOFTWARE
from megalith.cost.workload import Workload
from megalith.planner.apart import Apart, alone, apart
from megalith.planner.candidates import Space, candidates
from megalith.planner.explain import Neighbour, explain
from megalith.planner.formats import Gains, follows_others, is_rehearsed
from megalith.planner.linked import LinkChoice, linked, outer, whole_batch
from megalith.planner.measured import Own
from megalith.planner.phases import InPhase, fits_all, in_phases, whole_training
from megalith.planner.request import ResolvedRequest
from megalith.planner.search import Candidate, Scorer, SearchResult, Training, assumed, search
from megalith.planner.sure import Sure, sure
from megalith.schedule.table import kind
from megalith.spec.cluster import ClusterSpec, catalogue
from megalith.spec.plan import Plan
from megalith.spec.problem import Problem, SpecErrors

PREFILL = "FLOPs of forward, attention without what the causal mask hides, over the bf16 peak"

CONVENTION = "model FLOPs with attention counted in full, none twice for recomputation, over the bf16 peak"
"""Definition of MFU here (PaLM's, Chowdhery et al. 2022, appendix B)."""

OFF = "errors of predictions: docs/planner.md"


@dataclass(frozen=True)
class PlanResult:
    """Result of a search. `own` is the run file's plan, predicted in the same way; `trainings` belong to `found.choices`, if a
    length is known."""

    asked: ResolvedRequest
    found: SearchResult
    trainings: tuple[Training, ...]
    own: Candidate | None
    neighbours: tuple[Neighbour, ...]
    frontier: "tuple[Point, ...]" = ()
    what_ifs: "tuple[WhatIf, ...]" = ()
    phases: tuple[InPhase, ...] = ()
    """The best plan in each phase of the run, if it has several."""
    measured: tuple[Own, ...] = ()
    """The user's own rows; predicted times move toward them as far as they can be trusted."""
    linked: LinkChoice | None = None
    """Prediction of the run's sites; None without a link between them."""
    apart: Apart | None = None
    """Result for each site; None where sites have no clusters of their own."""
    gains: Gains | None = None
    """Gain of products in 8 bits for each layer under the best plan, where the trainer multiplies so."""

    @cached_property
    def sure(self) -> Sure:
        """How far off the figures may be."""
        return sure(self.asked, self.measured)

    @property
    def convention(self) -> str:
        """The FLOPs that MFU counts, and the peak it divides by."""
        return (PREFILL if self.asked.forward_only else CONVENTION).replace("bf16", self.asked.cluster.accelerator.half)

    @property
    def assumption(self) -> str:
        """The software that predictions assume."""
        asked = self.asked
        return assumption(asked.software, compiled=asked.compiles) + (
            f"; {asked.format} is rehearsed" if asked.ours and is_rehearsed(asked.run, asked.cluster) else ""
        )

    def to_json(self) -> dict[str, Any]:
        """Return everything by name, with each plan also in short form."""
        asked, cluster = self.asked, self.asked.cluster
        found, best = self.found.to_json(), self.found.runnable
        found["runnable"] = None if best is None else best.to_json() | self._said(best)
        for key in ("choices", "pareto"):
            for row, choice in zip(found[key], getattr(self.found, key), strict=True):
                row.update(self._said(choice))
        for row, one in zip(found["choices"], self.trainings, strict=False):
            row["training"] = vars(one)
        return {
            "model": asked.run.model.name,
            "cluster": {
                "name": asked.run.cluster, "accelerator": cluster.accelerator.name, "count": cluster.count, "nodes": cluster.nodes,
                "per_node": cluster.per_node, "price_per_hour": cluster.price_per_hour, "watts": cluster.accelerator.power,
                "peak": cluster.accelerator.wide, "memory": cluster.accelerator.memory,
            },
            "seq_len": asked.run.train.seq_len,
            "global_batch": asked.run.train.global_batch,
            "format": asked.format,
            "forward_only": asked.forward_only,
            "convention": self.convention,
            "software": asked.software,
            "assumption": self.assumption,
            "sure": self.sure.to_json(),
            "spare": headroom(),
            "host_memory": host.room(cluster),
            "notes": list(asked.notes),
            **found,
            "own": None if self.own is None else self.own.to_json() | self._said(self.own),
            "neighbours": [one.to_json() for one in self.neighbours],
            "frontier": [one.to_json() | self._said(one.choice) for one in self.frontier],
            "what_ifs": [one.to_json() | self._said(one.choice) for one in self.what_ifs],
            "phases": [one.to_json() for one in self.phases],
            **(dict.fromkeys(("across", "proposed", "gain", "together")) if self.linked is None else self.linked.to_json()),
            "sites": [] if self.apart is None else self.apart.to_json(),
            "gains": None if self.gains is None else self.gains.to_json(),
        }  # fmt: skip

    def _said(self, choice: Candidate | None) -> dict[str, Any]:
        """Return a choice in short form, and whether the trainer cannot run it."""
        if choice is None:
            return {"layout": None, "predicted_only": None}
        only = self.asked.forward_only or not self.asked.ours
        return {"layout": short(choice.plan), "predicted_only": only}


def answer(
    asked: ResolvedRequest,
    *,
    top: int = 10,
    why: bool = False,
    pareto: bool = False,
    what_ifs: Sequence[tuple[str, ResolvedRequest]] = (),
    measured: Sequence[Own] = (),
    tick: Callable[[int, int], None] = lambda done, total: None,
) -> PlanResult:
    """Search; with `why` also compute the cost of each neighbour of the best plan; with `pareto` also search fewer devices; and
    find the best plan for each of `what_ifs` (words, the changed question). `tick` gets the number of new parts that the search
    has traced, and of all new parts. `measured` are the user's own rows. Raises SpecErrors where nothing fits."""
    asked = replace(asked, factor=sure(asked, measured).factor)

    def must(question: ResolvedRequest) -> SearchResult:
        some = find(question, top=top, tick=tick)
        if some.best is None:
            raise SpecErrors(_nothing(question, some, scorer_of(question)))
        return some

    def whole() -> float | None:
        others, batch = (asked,) if each is None else each.asks, whole_batch(asked).train.global_batch
        bests = (find(alone(one, batch), top=1, tick=tick).best for one in others)
        return min((one.estimate.time.step for one in bests if one is not None), default=None)

    if (each := apart(asked, must)) is None:
        found = must(asked)
        while (wider := asked.widened(found.choices[0].plan)) is not None:
            asked, found = wider, must(wider)
    else:
        number = (asked.sites and asked.sites.site) or 0
        asked, found = replace(each.asks[number], sites=each.sites), each.found[number]
    scorer, step = scorer_of(asked), found.choices[0].estimate.time.step
    tokens = asked.tokens
    trainings = () if tokens is None else tuple(whole_training(one, asked, scorer) for one in found.choices)
    own = asked.own
    mine = None if own is None or not asked.is_valid(own) else choice_of(asked, own, scorer)
    near = explain(workload_of(asked, found.choices[0].plan), scorer) if why and not asked.forward_only else ()
    return PlanResult(
        asked, found, trainings, mine, tuple(one for one in near if asked.is_valid(one.plan)),
        frontier(asked, found) if pareto else (), tuple(_what_if(words, replace(other, factor=asked.factor)) for words, other in what_ifs),
        in_phases(asked, found.choices[0].plan, scorer), tuple(measured),
        linked(asked, step if each is None else max(each.steps), whole), each, asked.gains(found.choices[0].plan),
    )  # fmt: skip


def find(asked: ResolvedRequest, *, top: int, tick: Callable[[int, int], None] = lambda done, total: None) -> SearchResult:
    """The search that was asked for."""
    train, scorer = asked.run.train, scorer_of(asked)

    known: dict[Plan, Memory] = {}

    def held(plan: Plan) -> Memory:
        if plan not in known:
            known[plan] = scorer.held(workload_of(asked, plan))
        return known[plan]

    def valid(plan: Plan) -> bool:
        return asked.is_valid(plan) and scorer.fits(workload_of(asked, plan), held(plan)) and fits_all(asked, plan, scorer)

    format, narrow = asked.computes
    found = search(
        asked.model, asked.cluster, seq_len=train.seq_len, global_batch=train.global_batch, format=format, narrow=narrow,
        optimizer=asked.run.optimizer.kind, moments=asked.run.optimizer.small, master=asked.run.optimizer.master,
        gradients=train.gradients, outer=outer(asked.sites), software=asked.software,
        top=top, valid=valid, scorer=scorer, space=space_of(asked), tick=tick, differ=skeleton,
    )  # fmt: skip

    def weighed(choice: Candidate) -> Candidate:
        return _held(asked, choice.plan, scorer, choice.estimate, held(choice.plan))

    runnable = None if found.runnable is None else weighed(found.runnable)
    choices, thrifty = tuple(map(weighed, found.choices)), tuple(map(weighed, found.pareto))
    return replace(found, choices=choices, pareto=thrifty, runnable=runnable)


def choice_of(asked: ResolvedRequest, plan: Plan, scorer: Scorer) -> Candidate:
    """Return a plan with its prediction, its memory as the trainer's own program takes it."""
    workload = workload_of(asked, plan)
    return _held(asked, plan, scorer, scorer.estimate(workload), scorer.held(workload))


def _held(asked: ResolvedRequest, plan: Plan, scorer: Scorer, estimate: Estimate, memory: Memory) -> Candidate:
    return Candidate(plan, replace(estimate, memory=memory, fits=scorer.fits(workload_of(asked, plan), memory)))


def skeleton(plan: Plan) -> tuple[Any, ...]:
    """Return the essential properties of a layout. Microbatch, chunks, order, copies of the state and the segments of full
    recomputation are not among them."""
    split = plan.tensor, plan.context, plan.pipeline, plan.expert, plan.expert_tensor
    whole = plan.recompute.startswith(("full", *Space().again))
    return *split, plan.zero == 3, "full" if whole else plan.recompute


def space_of(asked: ResolvedRequest) -> Space:
    """Return the search space."""
    if asked.forward_only:
        return Space.of_prefill()
    shares = Space().offload if asked.offload else ()
    installed = tuple(map(int, version("torch").split(".")[:2]))  # read from disk
    again = Space().again if asked.ours else ()
    split = installed >= COMPILES and not (asked.ours and follows_others(asked.run))
    return Space(again=again, offload=shares, compile=asked.compiles, compile_split=split)


def scorer_of(asked: ResolvedRequest) -> Scorer:
    """Return the scorer of the requested plans."""
    return Scorer(calibration(), forward_only=asked.forward_only, factor=asked.factor)


@dataclass(frozen=True)
class Point:
    """A layout on the Pareto frontier of time, cost and free memory; it may use only some of the devices."""

    devices: int
    choice: Candidate
    dollars: float | None
    """Cost of a billion tokens; None if no price is known."""

    @property
    def device_hours(self) -> float:
        """Device hours of a billion tokens."""
        return self.devices * self.choice.estimate.time.step / self.choice.estimate.tokens * 1e9 / 3600

    def to_json(self) -> dict[str, Any]:
        named = {"devices": self.devices, "dollars": self.dollars, "device_hours": self.device_hours}
        return named | self.choice.to_json()


def frontier(asked: ResolvedRequest, found: SearchResult) -> tuple[Point, ...]:
    """The fastest first: on all devices, and on a half, a quarter and an eighth of them, unless a processor was measured with all of
    them at work. Fewer take longer and waste less."""
    points = [_point(asked.cluster, choice) for choice in found.pareto]
    for share in (2, 4, 8):
        if asked.cluster.count % share:
            break
        if (smaller := asked.cluster.resized(asked.cluster.count // share)) is None:
            break
        fewer = replace(asked, cluster=smaller)
        points += [_point(fewer.cluster, choice) for choice in find(fewer, top=1).pareto]
    best = [one for one in points if not any(_beats(other, one) for other in points)]
    return tuple(sorted(best, key=lambda one: one.choice.estimate.time.step))


def _point(cluster: ClusterSpec, choice: Candidate) -> Point:
    point = Point(cluster.count, choice, None)
    price = cluster.price_per_hour
    return point if price is None else replace(point, dollars=price * point.device_hours)


def _beats(one: Point, other: Point) -> bool:
    """True if `one` is nowhere worse than `other`, and somewhere better."""
    pairs = [(key(one), key(other)) for key in (_seconds, lambda p: p.device_hours, lambda p: p.choice.estimate.memory.total)]
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


def _seconds(point: Point) -> float:
    return point.choice.estimate.time.step


@dataclass(frozen=True)
class WhatIf:
    """The best layout after one change of the request; None if nothing fits then."""

    change: str
    choice: Candidate | None
    training: Training | None

    def to_json(self) -> dict[str, Any]:
        whole = None if self.training is None else vars(self.training)
        return {"change": self.change, "training": whole} | (
            self.choice.to_json() if self.choice else {"plan": None, "estimate": None}
        )


def _what_if(words: str, asked: ResolvedRequest) -> WhatIf:
    best = find(asked, top=1).best
    known = best is not None and asked.tokens is not None
    return WhatIf(words, best, whole_training(best, asked, scorer_of(asked)) if known and best else None)


def workload_of(asked: ResolvedRequest, plan: Plan) -> Workload:
    """A step of the question's training under a plan."""
    train, optimizer, (format, narrow) = asked.run.train, asked.run.optimizer, asked.computes
    return decided(
        Workload(
            asked.model,
            plan,
            asked.cluster,
            train.seq_len,
            train.global_batch,
            format,
            assumed(plan, asked.software),
            optimizer.kind,
            optimizer.small,
            optimizer.master,
            train.gradients,
            narrow=narrow,
            outer=outer(asked.sites),
        )
    )


def assumption(software: str, *, compiled: bool = False) -> str:
    """Return the software that is planned for, and where to read how far off predictions are."""
    return f"runs as {SOFTWARE[software].title} does{', compiled' if compiled else ''}; {OFF}"


def headroom() -> float:
    """Return the share of a device's memory that plans leave free."""
    return calibration().generations["fused"].slack


def short(plan: Plan) -> str:
    """A layout in a few letters: t8 c2 p16x4 e64 d128 z1 m1; values of 1 are left out, except for data, ZeRO and microbatch. A
    schedule other than (interleaved) 1F1B is named behind the pipeline, copies of the state (HSDP) behind ZeRO's stage, parts of
    each expert behind the ranks that share them out: p16x2 zb-v d8 z1 m1, d64 z3 r8 m1, t4 e8x4 d16 z1 m1. Context ranks that
    exchange heads (Ulysses) stand behind all of them, and then a gather of keys and values: c16u4 d8 z1 m1, c16 gather d8 z1 m1.
    Behind all, percents of the optimizer's state that are offloaded to host memory: d8 z1 m1 o50; or to disk: d8 z1 m1 disk100; with
    gradients released: d8 z1 m1 disk100 released; with weights made from it there: d8 z3 m1 disk100 weights. Last, percents of the
    blocks whose activations wait in host memory: d8 z1 m1 a50; or on disk: d8 z1 m1 a-disk100.
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
    more = " weights" * (plan.state.weights != "device") + " released" * plan.state.release
    away = f" {place}{100 * plan.state.away:.0f}{more}" if plan.state.away else ""
    retain = "a-disk" if plan.retain.blocks == "disk" else "a"
    away += f" {retain}{100 * plan.retain.away:.0f}" if plan.retain.away else ""
    return f"{tensor}{context}{pipeline}{expert}d{plan.data} z{plan.zero}{copies} m{plan.microbatch}{away}"


def _exchange(plan: Plan) -> str:
    heads = f"u{plan.ulysses}" if plan.ulysses > 1 else ""
    return heads + (" gather" if plan.context_method == "gather" and plan.ulysses < plan.context else "")


def _nothing(asked: ResolvedRequest, found: SearchResult, scorer: Scorer) -> list[Problem]:
    """Return the reasons why there is no plan."""
    name = asked.run.cluster
    if found.closest is None:  # plans fit, and all were denied
        reasons = asked.problems(next(_plans(asked, asked.cluster)))
        return reasons or [
            _problem(name, "no plan that fits passes megalith check", "Use more devices, or another global batch.")
        ]
    memory, limit = found.closest.estimate.memory, found.closest.estimate.limit or 0.0
    kinds = {key: value for key, value in vars(memory).items() if key not in ("rank", "host", "disk")}
    largest = max(kinds, key=lambda key: kinds[key])
    parts = ", ".join(
        f"{key} {value / 2**30:.1f}" for key, value in sorted(kinds.items(), key=lambda item: -item[1]) if value > 2**26
    )
    room = f"{host.room(asked.cluster) / 2**30:.0f} GiB a device"
    away = f", nor with state and activations in host memory ({room}) or on disk" if space_of(asked).offload else ""
    reason = (
        f"nothing fits{away}: of {found.looked_at:,} plans the smallest ({short(found.closest.plan)}, recompute "
        f"{found.closest.plan.recompute}) "
        f"needs {memory.total / 2**30:.1f} of {limit / 2**30:.1f} GiB on its worst rank, most of it {largest} ({parts} GiB)"
    )
    return [_problem(name, reason, _ways_out(asked, memory, largest, scorer))]


def _ways_out(asked: ResolvedRequest, memory: Memory, largest: str, scorer: Scorer) -> str:
    """List changes that would make it fit: a cheap one on the same devices; more devices, larger ones, less to keep."""
    remedy = cheapest_remedy(asked) if asked.ours and not asked.forward_only else ""
    ways = [f"{remedy} would fit on these devices"] if remedy else []
    cluster, batch = asked.cluster, asked.run.train.global_batch
    for times in (2, 4, 8, 16, 32, 64):
        if (larger := cluster.resized(cluster.count * times)) is None:
            break
        if any(_fits(asked, larger, plan, scorer) for plan in _plans(asked, larger)):
            ways.append(f"{larger.count:,} {cluster.accelerator.name} would be enough, at {batch:,} sequences a step")
            break
    need = memory.total * (1 + headroom())
    roomy = [name for name, device in catalogue().items() if device.memory is not None and device.memory >= need]
    if roomy:
        ways.append(f"the same number of {' or '.join(roomy)} would be enough")
    if largest in ("activations", "working", "logits"):
        ways.append(f"so may shorter sequences than {asked.run.train.seq_len:,}")
    else:
        ways.append("so would a smaller model")
    text = "; ".join(ways)
    return f"{text if remedy else text[0].upper() + text[1:]}."


def cheapest_remedy(asked: ResolvedRequest) -> str:
    """Return the first of a few changes, the cheapest in time first, with which a valid plan fits; empty if none helps."""
    small, away = asked.run.optimizer.moments != "fp8", not asked.offload
    few = "--small-state, which rounds moments,"
    remedies = [(few, asked.changed(small=True))] if small else []
    remedies += [("--offload", asked.changed(offload=True))] if away else []
    remedies += [(f"{few} with --offload", asked.changed(small=True, offload=True))] if small and away else []
    return next((words for words, changed in remedies if find(changed, top=1).best is not None), "")


def _plans(asked: ResolvedRequest, cluster: ClusterSpec) -> Any:
    train = asked.run.train
    return candidates(asked.model, cluster, seq_len=train.seq_len, global_batch=train.global_batch, space=space_of(asked))


def _fits(asked: ResolvedRequest, cluster: ClusterSpec, plan: Plan, scorer: Scorer) -> bool:
    workload = replace(workload_of(asked, plan), cluster=cluster)
    return scorer.fits(workload, scorer.memory(workload))


def _problem(name: str, reason: str, way_out: str) -> Problem:
    return Problem("error", "--cluster", name, reason, way_out)
