"""Simulates a long run on a large cluster within seconds: sampled faults, the policy of real runs, and the use of time."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import sqrt
from typing import Any

import numpy as np

from megalith.rehearse.merges import MergeOutcome, alone, merged
from megalith.rehearse.scenario import DAY, Scenario, TimeUse
from megalith.rehearse.site import Site


@dataclass(frozen=True)
class Life:
    """The result of the simulation for one seed.

    `seconds` are listed by use of time, `faults` by cause, `fates` by effect of the fault, `restarts` by reason. `stops`: how
    often the run waited for a person. `ended`: how often the command ended because nodes were missing, and was started again
    later. With several sites, `merges`, `left` and `anew` count merges, sites that left, and new starts of all sites. `curve`:
    pairs of a time in seconds and the goodput until then.
    """

    seed: int
    goodput: float
    seconds: Mapping[TimeUse, float]
    faults: Mapping[str, int] = field(default_factory=dict)
    fates: Mapping[str, int] = field(default_factory=dict)
    restarts: Mapping[str, int] = field(default_factory=dict)
    restored: Mapping[str, int] = field(default_factory=dict)
    stops: int = 0
    ended: int = 0
    merges: int = 0
    left: int = 0
    anew: int = 0
    least_spares: int = 0
    curve: tuple[tuple[float, float], ...] = ()


SETTING = (
    "name", "nodes", "devices_per_node", "days", "faults", "step_seconds", "store_every", "planned", "sites", "merge_every",
    "merge_seconds", "grace", "patience", "return_seconds", "decides", "staleness",
)  # fmt: skip
"""The plain values of a scenario that the JSON output contains."""


@dataclass(frozen=True)
class SimulationResult:
    """Result over all seeds. `band`: 5th and 95th percentile over the seeds; `error`: standard error of the mean."""

    scenario: Scenario
    lives: tuple[Life, ...]
    goodput: float
    band: tuple[float, float]
    error: float
    seconds: Mapping[TimeUse, float] = field(default_factory=dict)

    @property
    def per_device(self) -> float:
        """Goodput per paid device, spares included."""
        return self.goodput * self.scenario.nodes / (self.scenario.nodes + self.scenario.fleet.spares)

    def mean(self, count: Callable[[Life], float]) -> float:
        """Mean over the seeds of the number that `count` returns."""
        return float(np.mean([count(life) for life in self.lives]))

    def means(self, counts: Callable[[Life], Mapping[str, int]]) -> dict[str, float]:
        """Mean over the seeds of counts by name, with the most frequent name first."""
        total: Counter[str] = Counter()
        for life in self.lives:
            total.update(counts(life))
        found = {name: number / len(self.lives) for name, number in total.items()}
        return dict(sorted(found.items(), key=lambda row: (-row[1], row[0])))

    def rows(self) -> list[tuple[str, float, float]]:
        """(use, mean seconds, share of the wall time) of each use of time, largest first."""
        wall = sum(self.seconds.values()) or 1.0
        used = sorted(((what, value) for what, value in self.seconds.items() if value > 0), key=lambda row: -row[1])
        return [(what.value, value, value / wall) for what, value in used]

    def as_json(self) -> dict[str, Any]:
        """Return the values for programs, as a JSON object."""
        plan = self.scenario
        setting = {name: getattr(plan, name) for name in SETTING}
        tables = {name: getattr(plan, name).model_dump(mode="json") for name in ("fleet", "reliability")}
        return {
            "scenario": {**setting, **tables, "latencies": asdict(plan.latencies)},
            "goodput": self.goodput, "band": self.band, "error": self.error, "per_device": self.per_device,
            "seconds": {what.value: value for what, value in self.seconds.items()},
            "faults": self.mean(lambda life: sum(life.faults.values())), "causes": self.means(lambda life: life.faults),
            "fates": self.means(lambda life: life.fates),
            "restarts": self.mean(lambda life: sum(life.restarts.values())), "reasons": self.means(lambda life: life.restarts),
            "stops": self.mean(lambda life: life.stops), "ended": self.mean(lambda life: life.ended),
            "merges": self.mean(lambda life: life.merges), "left": self.mean(lambda life: life.left),
            "anew": self.mean(lambda life: life.anew),
            "curves": [life.curve for life in self.lives], "seeds": [life.goodput for life in self.lives],
        }  # fmt: skip


def simulate(plan: Scenario, *, seeds: int = 20, first: int = 0, tick: Callable[[], None] = lambda: None) -> SimulationResult:
    """Simulate the run once for each seed, and call `tick` after each. The same seed gives the same faults under every policy, so settings
    can be compared without sampling noise."""
    if seeds < 1:
        raise ValueError(f"seeds = {seeds}: at least one run must be simulated. Use 1 or more")
    lives: list[Life] = []
    for seed in range(first, first + seeds):
        lives.append(_life(plan, seed))
        tick()
    shares = np.array([life.goodput for life in lives])
    low, high = np.percentile(shares, [5, 95])
    return SimulationResult(
        scenario=plan,
        lives=tuple(lives),
        goodput=float(shares.mean()),
        band=(float(low), float(high)),
        error=float(shares.std(ddof=1) / sqrt(seeds)) if seeds > 1 else 0.0,
        seconds={what: float(np.mean([life.seconds[what] for life in lives])) for what in TimeUse},
    )


@dataclass(frozen=True)
class SweepPoint:
    """The result for one value of a setting."""

    value: float
    goodput: float
    band: tuple[float, float]
    per_device: float


def try_intervals(
    plan: Scenario, intervals: Sequence[float], *, seeds: int = 20, tick: Callable[[], None] = lambda: None
) -> list[SweepPoint]:
    """Return the goodput for each of `intervals`, which are seconds of work between checkpoints in the store. The best interval
    is `max(tried, key=lambda t: t.goodput)`."""
    return [_tried(value, simulate(replace(plan, store_every=value), seeds=seeds, tick=tick)) for value in intervals]


def try_spares(
    plan: Scenario, counts: Sequence[int], *, seeds: int = 20, tick: Callable[[], None] = lambda: None
) -> list[SweepPoint]:
    """Return the goodput for each number of spare nodes. In the results, `per_device` includes the cost of the spares."""
    fleets = [(count, plan.fleet.model_copy(update={"spares": count})) for count in counts]
    return [_tried(count, simulate(replace(plan, fleet=fleet), seeds=seeds, tick=tick)) for count, fleet in fleets]


def _tried(value: float, result: SimulationResult) -> SweepPoint:
    return SweepPoint(float(value), result.goodput, result.band, result.per_device)


def _life(plan: Scenario, seed: int) -> Life:
    streams = np.random.SeedSequence(seed).spawn(plan.sites)
    sites = [Site(alone(plan), np.random.default_rng(stream)).live() for stream in streams]
    horizon = plan.days * DAY
    seconds = {what: sum(site.seconds[what] for site in sites) / len(sites) for what in TimeUse}
    made = merged(plan, sites) if plan.sites > 1 else MergeOutcome(seconds=seconds)
    seconds = made.seconds
    return Life(
        seed=seed,
        goodput=float(seconds[TimeUse.USEFUL]) / horizon,
        seconds={what: float(spent) for what, spent in seconds.items()},
        faults=_added(site.tally.causes for site in sites),
        fates=_added(site.tally.outcomes for site in sites),
        restarts=_added(site.tally.reasons for site in sites),
        restored=_added(site.tally.restored for site in sites),
        stops=sum(site.tally.stops for site in sites),
        ended=sum(site.tally.ended for site in sites),
        merges=made.merges,
        left=made.left,
        anew=made.anew,
        least_spares=min(site.least_spares for site in sites),
        curve=_thin(sites[0].curve if len(sites) == 1 else _mean_curve(sites, horizon)),
    )


def _added(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return dict(total)


def _mean_curve(sites: Sequence["Site"], horizon: float) -> list[tuple[float, float]]:
    times = np.linspace(horizon / 200, horizon, 200)
    curves = [np.array(site.curve) for site in sites]
    shares = np.mean([np.interp(times, curve[:, 0], curve[:, 1]) for curve in curves], axis=0)
    return list(zip(times.tolist(), shares.tolist(), strict=True))


def _thin(curve: Sequence[tuple[float, float]], most: int = 200) -> tuple[tuple[float, float], ...]:
    step = max(1, len(curve) // most)
    return (*curve[::step], *(curve[-1:] if (len(curve) - 1) % step else ()))
