"""When faults come to a simulated run: Poisson arrivals of single nodes, of racks and of switches, and planned stops."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megalith.rehearse.scenario import DAY, HOUR, YEAR, Scenario


@dataclass(frozen=True)
class Fault:
    """A fault on its way. `hours`: how long what it breaks is away; `nodes` by number."""

    shows: str
    name: str
    nodes: tuple[int, ...]
    hours: float
    hardware: bool


def arrivals(plan: Scenario, random: np.random.Generator, *, nodes: int) -> list[tuple[float, Fault | None]]:
    """Return all faults of a run on so many nodes with the seconds at which they come; None is a planned stop. The list is in the order in
    which they were drawn, which decides between those that come at one time."""
    own = plan.reliability
    weights = np.ones(nodes)
    lemons = random.random(nodes) < own.lemon_share
    weights[lemons] = own.lemon_factor
    counts = np.array([cause.count for cause in plan.causes], dtype=float)
    times = _poisson(plan, random, plan.faults * nodes / HOUR)
    befallen = random.choice(nodes, size=len(times), p=weights / weights.sum()) if len(times) else []
    kinds = random.choice(len(counts), size=len(times), p=counts / counts.sum()) if len(times) else []
    found: list[tuple[float, Fault | None]] = []
    for time, node, kind in zip(times, befallen, kinds, strict=True):
        cause = plan.causes[int(kind)]
        hours = own.maintenance_hours if cause.shows == "preemption" else random.exponential(own.repair_hours)
        found.append((time, Fault(cause.shows, cause.name, (int(node),), hours, cause.repair)))
    for what, size, per_year, hours in (
        ("rack", own.rack_nodes, own.rack_outages, own.rack_hours),
        ("switch", own.rack_nodes * own.switch_racks, own.switch_outages, own.switch_hours),
    ):
        found += _outages(plan, random, what, nodes=nodes, size=size, per_year=per_year, hours=hours)
    return [*found, *((time, None) for time in _poisson(plan, random, plan.planned / DAY))]


def _outages(
    plan: Scenario, random: np.random.Generator, what: str, *, nodes: int, size: int, per_year: float, hours: float
) -> Iterator[tuple[float, Fault]]:
    """Outages of groups of `size` neighbouring nodes, each of so many `hours` in the mean."""
    groups = -(-nodes // size)
    for time in _poisson(plan, random, per_year * groups / YEAR):
        group = int(random.integers(groups))
        members = tuple(range(group * size, min((group + 1) * size, nodes)))
        yield time, Fault("node lost", what, members, random.exponential(hours), True)


def _poisson(plan: Scenario, random: np.random.Generator, rate: float) -> np.ndarray:
    """Seconds at which something of this rate a second comes within the run, in order."""
    horizon = plan.days * DAY
    count = random.poisson(rate * horizon) if rate else 0
    return np.sort(random.random(count) * horizon)
