"""Times of faults in a simulated run: Poisson arrivals of faults of single nodes, of outages of racks and switches, and of
planned stops."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megalith.rehearse.scenario import DAY, HOUR, Scenario
from megalith.spec.faults import FaultCause


@dataclass(frozen=True)
class Fault:
    """A possible fault at `time` (seconds) on `nodes` (by number), with the broken part unavailable for `hours`. `hardware`: the
    machine is at fault, not the program. `idle`: the fault also hits idle nodes."""

    shows: str
    name: str
    nodes: tuple[int, ...]
    hours: float
    hardware: bool
    idle: bool
    time: float


def arrivals(plan: Scenario, random: np.random.Generator, *, nodes: int) -> list[Fault]:
    """Return all faults of a run on this many nodes, as if all nodes computed all the time: only the simulation knows whether a node is
    idle when its fault occurs. The faults are listed as they were drawn, which decides the order of faults at the same time."""
    own = plan.reliability
    weights = np.ones(nodes)
    lemons = random.random(nodes) < own.lemon_share
    weights[lemons] = own.lemon_factor
    counts = np.array([cause.count for cause in plan.causes], dtype=float)
    times = _poisson(plan, random, plan.faults * nodes / HOUR)
    befallen = random.choice(nodes, size=len(times), p=weights / weights.sum()) if len(times) else []
    kinds = random.choice(len(counts), size=len(times), p=counts / counts.sum()) if len(times) else []
    found = [
        _of_node(plan, random, plan.causes[int(kind)], node=int(node), time=float(time))
        for time, node, kind in zip(times, befallen, kinds, strict=True)
    ]
    for outage in plan.outages:
        found += _outages(plan, random, outage.name, nodes=nodes, size=outage.nodes, rate=outage.rate, hours=outage.hours)
    return found


def _of_node(plan: Scenario, random: np.random.Generator, cause: FaultCause, *, node: int, time: float) -> Fault:
    """Return a fault of a single node. Maintenance also hits idle nodes; their hardware fails less often than that of busy nodes,
    by the factor `idle_factor`."""
    own, mean = plan.reliability, plan.reliability.hours(cause.repair)
    maintenance = cause.repair == "maintenance"
    hours = mean if maintenance else random.exponential(mean)
    idle = maintenance or bool(random.random() < own.idle_factor)
    hardware = cause.repair != "none"
    return Fault(cause.shows, cause.name, (node,), hours, hardware, idle and hardware, time)


def _outages(
    plan: Scenario, random: np.random.Generator, what: str, *, nodes: int, size: int, rate: float, hours: float
) -> Iterator[Fault]:
    """Yield outages of groups of `size` neighbouring nodes. Each group has `rate` outages per second, of `hours` on average."""
    groups = -(-nodes // size)
    for time in _poisson(plan, random, rate * groups):
        group = int(random.integers(groups))
        members = tuple(range(group * size, min((group + 1) * size, nodes)))
        yield Fault("node lost", what, members, random.exponential(hours), True, True, float(time))


def planned_stops(plan: Scenario, random: np.random.Generator) -> list[float]:
    """Return the seconds at which a user stops the run on purpose."""
    return _poisson(plan, random, plan.planned / DAY).tolist()


def _poisson(plan: Scenario, random: np.random.Generator, rate: float) -> np.ndarray:
    horizon = plan.days * DAY
    count = random.poisson(rate * horizon) if rate else 0
    return np.sort(random.random(count) * horizon)
