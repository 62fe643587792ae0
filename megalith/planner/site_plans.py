"""Plans for sites on clusters of their own: shares of samples with which no site waits long for another, and the best plan
for each site. No torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from math import gcd
from typing import Any

from megalith.planner.candidates import splits
from megalith.planner.described import unpredictable
from megalith.planner.problems import problem
from megalith.planner.request import ResolvedRequest
from megalith.planner.search import SearchResult
from megalith.spec import cluster as clusters
from megalith.spec.cluster import ClusterSpec
from megalith.spec.plan import Plan
from megalith.spec.problem import Problem, SpecErrors
from megalith.spec.run import RunSpec
from megalith.spec.sites import SitesSpec

PARTS = 64
"""Largest number of parts into which a step's samples are divided."""
CLOSE = 1.02
"""A division into fewer parts is chosen if its step takes at most this factor times as long as the shortest step."""
TRIES = 4
"""Largest number of divisions for which plans are searched. Each division after the first follows from the step times of the plans found
for the division before it."""


@dataclass(frozen=True)
class SiteRequest(ResolvedRequest):
    """The request for one site. `part`: samples in one part of a step, which the site's data ranks must divide evenly."""

    part: int = 1

    def problems(self, plan: Plan) -> list[Problem]:
        """See `ResolvedRequest.problems`."""
        if self.part % (plan.data * plan.microbatch):
            reason = (
                f"plan.data x plan.microbatch = {plan.data * plan.microbatch} does not divide {self.part}, the samples in one part of "
                f"a step"
            )
            return [problem("plan.data", plan.data, reason, "Use another global batch.")]
        return super().problems(plan)


@dataclass(frozen=True)
class SitesResult:
    """Results of all sites, in the order of their numbers."""

    asks: tuple[SiteRequest, ...]
    found: tuple[SearchResult, ...]

    @property
    def steps(self) -> tuple[float, ...]:
        """Seconds of a step of each site with its best plan."""
        return tuple(one.choices[0].estimate.time.step for one in self.found)

    @property
    def sites(self) -> SitesSpec:
        """The table `[sites]` with the found plans and shares."""
        sites = self.asks[0].sites
        assert sites is not None
        plans = (one.choices[0].plan for one in self.found)
        each = (one.model_copy(update={"plan": plan}) for one, plan in zip(sites.each, plans, strict=True))
        return sites.model_copy(update={"each": tuple(each)})

    def to_json(self) -> list[dict[str, Any]]:
        """Return a row for each site."""
        longest = max(self.steps)
        return [
            {
                "site": self.sites.named(site),
                "cluster": ask.run.cluster,
                "share": share,
                "samples": ask.run.train.global_batch,
                "step": step,
                "idle": 1 - step / longest,
                "plan": found.choices[0].plan.model_dump(),
                "memory": found.choices[0].estimate.memory.total,
            }
            for site, (ask, share, step, found) in enumerate(
                zip(self.asks, _shares(self.sites), self.steps, self.found, strict=True)
            )
        ]


def plan_sites(request: ResolvedRequest, search: Callable[[ResolvedRequest], SearchResult]) -> SitesResult | None:
    """Divide a step's samples among sites on clusters of their own, so that the slowest site takes the least time; None if
    the run file names no such clusters. `search` finds the best plan of a request. Raises SpecErrors if a site has no
    plan."""
    sites, resolved = request.sites, request.resolved
    if sites is None or resolved is None or not sites.each or sites.each[0].cluster is None:
        return None
    batch, there = resolved.spec.train.global_batch, _clusters(request, sites)
    rates: list[float] = [one.count * (one.accelerator.peak.get(one.accelerator.half) or 1.0) for one in there]
    best, known = None, dict[tuple[int, ...], SitesResult]()
    for _ in range(TRIES):
        shares = share_out(rates, batch, lambda part: all(_deals_out(request, one, part) for one in there))
        if shares is None:
            reason = (
                f"this batch cannot be divided among the {sites.count} sites, in up to {PARTS} parts, so that each cluster "
                f"distributes its share evenly"
            )
            raise SpecErrors([problem("train.global_batch", batch, reason, "Powers of two allow the most layouts.")])
        if shares in known:
            break
        try:
            known[shares] = found = _planned(request, shares, there, search)
        except SpecErrors:
            if best is None:
                raise
            break  # these shares leave a site without a plan; the ones before did not
        best = found if best is None or max(found.steps) < max(best.steps) else best
        rates = [share / step for share, step in zip(shares, found.steps, strict=True)]
    return best


def _clusters(request: ResolvedRequest, sites: SitesSpec) -> list[ClusterSpec]:
    """Return the clusters of the sites. Raises SpecErrors for clusters on which steps cannot be predicted."""
    there, problems = list[ClusterSpec](), list[Problem]()
    for number, name in enumerate(str(one.cluster) for one in sites.each):
        try:
            there.append(clusters.load(name))
            found = unpredictable(name, there[-1], request.format, ours=request.ours)
        except SpecErrors as errors:
            found = errors.problems
        problems += [replace(one, key=f"sites.each.{number}.cluster", value=name) for one in found]
    if problems:
        raise SpecErrors(problems)
    return there


def single_site(request: ResolvedRequest, batch: int) -> ResolvedRequest:
    """Return the request for a site that trains the whole batch alone."""
    return ResolvedRequest(**_fields(request) | {"run": _with_batch(request.run, batch), "sites": None})


def share_out(rates: Sequence[float], batch: int, able: Callable[[int], bool]) -> tuple[int, ...] | None:
    """Return shares of a batch, as numbers of equal parts, for sites that train at the given rates in samples/s. Of all divisions whose
    step is nearly the shortest, the division with the fewest parts is chosen. `able`: True if all sites can divide a part of this number
    of samples. Return None if no division works."""
    found = list[tuple[float, tuple[int, ...]]]()
    for parts in range(len(rates), PARTS + 1):
        if batch % parts or not able(batch // parts):
            continue
        shares = [max(1, int(parts * rate / sum(rates))) for rate in rates]
        while sum(shares) != parts:  # the site that is least slow with one more, or stays least slow with one less
            change = 1 if sum(shares) < parts else -1
            able_ones = [n for n, share in enumerate(shares) if share + change > 0]
            number = min(able_ones, key=lambda n: (shares[n] + change) / rates[n] if change > 0 else -shares[n] / rates[n])
            shares[number] += change
        slowest = max(share / parts / rate for share, rate in zip(shares, rates, strict=True))
        found.append((slowest, tuple(share // gcd(*shares) for share in shares)))
    least = min(found, default=(0.0, None))[0]
    return next((shares for slowest, shares in found if slowest <= CLOSE * least), None)


def _deals_out(request: ResolvedRequest, cluster: ClusterSpec, part: int) -> bool:
    """True if the model can be split on a cluster so that the number of data ranks divides this number of samples."""
    return any(
        part % (cluster.count // (tensor * context * pipeline)) == 0
        for tensor, context, pipeline in splits(request.model, cluster, request.run.train.seq_len)
    )


def _planned(
    request: ResolvedRequest,
    shares: Sequence[int],
    there: Sequence[ClusterSpec],
    search: Callable[[ResolvedRequest], SearchResult],
) -> SitesResult:
    assert request.sites is not None and request.resolved is not None
    each = tuple(one.model_copy(update={"share": share}) for one, share in zip(request.sites.each, shares, strict=True))
    sites = request.sites.model_copy(update={"each": each})
    part = request.resolved.spec.train.global_batch // sites.parts
    tokens = None if request.tokens is None else request.tokens * part / request.run.train.global_batch
    asks = list[SiteRequest]()
    for one, share, cluster in zip(each, _shares(sites), there, strict=True):
        run = _with_batch(request.run.model_copy(update={"cluster": one.cluster}), share * part)
        here = {"run": run, "cluster": cluster, "sites": sites, "tokens": tokens and share * tokens}
        asks.append(SiteRequest(**_fields(request) | here, part=part))
    found, problems = list[SearchResult](), list[Problem]()
    for number, ask in enumerate(asks):
        try:
            found.append(search(ask))
        except SpecErrors as errors:
            problems += [replace(one, key=f"sites.each.{number}.cluster") for one in errors.problems]
    if problems:
        raise SpecErrors(problems)
    return SitesResult(tuple(asks), tuple(found))


def _shares(sites: SitesSpec) -> tuple[int, ...]:
    return sites.shares or (1,) * sites.count


def _fields(request: ResolvedRequest) -> dict[str, Any]:
    return {one.name: getattr(request, one.name) for one in fields(ResolvedRequest)}


def _with_batch(run: RunSpec, batch: int) -> RunSpec:
    return run.model_copy(update={"train": run.train.model_copy(update={"global_batch": batch})})
