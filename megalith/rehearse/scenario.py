"""A scenario: the machines of a simulated run, its faults, and the duration of each part of a recovery."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from megalith.rehearse.latencies import Latencies
from megalith.spec.cluster import ClusterSpec
from megalith.spec.faults import FaultCause, Reliability, tables
from megalith.spec.fleet import FleetSpec

DAY, HOUR, YEAR = 86_400.0, 3_600.0, 365.25 * 86_400.0


class TimeUse(StrEnum):
    """One use of a simulated run's time. The seconds of all uses add up to the wall time."""

    USEFUL = "useful"
    CHECKPOINT = "checkpoint"
    LOST = "lost steps"
    DETECTION = "detection"
    RECOVERY = "recovery"
    WAITING = "waiting for nodes"
    STRAGGLING = "straggling"
    SHRUNK = "fewer nodes"
    PLANNED = "planned"
    PERSON = "waiting for a person"
    SYNC = "between sites"


@dataclass(frozen=True)
class Outage:
    """Outages that hit `nodes` neighbouring nodes at once. Each group of `nodes` neighbouring nodes has `rate` outages per second, of
    `hours` on average."""

    name: str
    nodes: int
    rate: float
    hours: float


@dataclass(frozen=True)
class Scenario:
    """The simulated run and its machines. `nodes`: the nodes in the mesh of each site, without `fleet.spares`. Rates are per node
    and hour, times are in seconds.

    `store_every`: seconds of work between checkpoints in the shared store. `planned`: planned stops a day. The run has `sites`
    sites. All sites merge after every `merge_every` seconds of work, and each merge stops a site for `merge_seconds`. A merge
    waits for a late site for `grace` seconds, and sites wait for a quorum for `patience` seconds (if `decides` names a site, this
    site alone is a quorum). A site may miss `staleness` merges before a merge waits for it. A site that was away gets the other
    sites' weights `return_seconds` after its start.
    """

    name: str
    nodes: int
    devices_per_node: int
    days: float
    faults: float
    causes: tuple[FaultCause, ...]
    latencies: Latencies
    fleet: FleetSpec = field(default_factory=FleetSpec)
    reliability: Reliability = field(default_factory=Reliability)
    step_seconds: float = 10.0
    store_every: float = 1800.0
    planned: float = 0.0
    sites: int = 1
    merge_every: float = 300.0
    merge_seconds: float = 0.0
    grace: float = 300.0
    patience: float = 4200.0
    return_seconds: float = 0.0
    decides: int | None = None
    staleness: int = 0

    @property
    def outages(self) -> tuple[Outage, ...]:
        """The outages of racks and of switches."""
        own = self.reliability
        return (
            Outage("rack", own.rack_nodes, own.rack_outages / YEAR, own.rack_hours),
            Outage("switch", own.rack_nodes * own.switch_racks, own.switch_outages / YEAR, own.switch_hours),
        )

    @property
    def mtbf(self) -> float:
        """Mean seconds between faults of one site's nodes, racks and switches; infinite if nothing breaks."""
        rate = self.faults * self.nodes / HOUR + sum(outage.rate * -(-self.nodes // outage.nodes) for outage in self.outages)
        return 1 / rate if rate else float("inf")


def scenario(
    cluster: ClusterSpec,
    *,
    days: float,
    latencies: Latencies,
    fleet: FleetSpec | None = None,
    store_every: float = 1800.0,
    step_seconds: float = 10.0,
    planned: bool = False,
    sites: int = 1,
    **rest: Any,
) -> Scenario:
    """Turn a cluster and its fault rates into a scenario; its devices are divided among the sites. `planned`: include the planned stops of
    the cluster's fault table. Raises ValueError with everything that is wrong.
    """
    known = tables()
    problems = []
    if cluster.reliability.faults not in known:
        problems.append(f"reliability.faults = {cluster.reliability.faults!r} is unknown. Use one of {', '.join(known)}")
    for name, value in {"days": days, "store_every": store_every, "step_seconds": step_seconds}.items():
        if not value > 0:
            problems.append(f"{name} = {value} is not a positive time. Give a number above 0")
    if not 1 <= sites <= cluster.nodes:
        problems.append(
            f"sites = {sites}, but the cluster has {cluster.nodes} nodes to divide among sites. Use 1 to {cluster.nodes}"
        )
    if problems:
        raise ValueError("\n".join(problems))
    table = known[cluster.reliability.faults]
    return Scenario(
        name=f"{cluster.count:,} x {cluster.accelerator.title}",
        nodes=cluster.nodes // sites,
        devices_per_node=cluster.per_node,
        days=days,
        faults=cluster.interruptions * cluster.per_node,
        causes=table.causes,
        latencies=latencies,
        fleet=fleet or FleetSpec(),
        reliability=cluster.reliability,
        step_seconds=step_seconds,
        store_every=store_every,
        planned=table.planned / table.days if planned else 0.0,
        sites=sites,
        **rest,
    )
