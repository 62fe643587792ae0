"""Published tables of the faults in long runs, and the fault rates that a cluster file states."""

import tomllib
from functools import cache
from importlib.resources import files
from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from megalith.spec.base import Spec

Shows = Literal[
    "crash", "bug", "hang", "node lost", "preemption", "straggler", "corrupt state", "not finite", "wrong gradient", "full disk"
]
"""Symptom of a fault in a run. "crash" means that a rank's process dies, "bug" that its program raises, and "hang" that no rank
makes progress."""

Repair = Literal["none", "reboot", "part", "node", "maintenance"]
"""Repair that a node needs: none, a reset or reboot, a new part, replacement of the whole node, or the end of planned
maintenance."""


class FaultCause(Spec):
    """One row of a fault table."""

    name: str
    count: NonNegativeFloat
    shows: Shows
    repair: Repair = Field(description="repair that the node needs before it can be used again")


class FaultTable(Spec):
    """Counts of interruptions by cause, over a number of devices and days."""

    name: str
    title: str
    devices: PositiveInt
    days: PositiveFloat
    planned: NonNegativeFloat = Field(
        default=0.0, description="number of planned interruptions in `days`, which are in addition to those in `causes`"
    )
    source: str
    causes: tuple[FaultCause, ...]

    @property
    def count(self) -> float:
        """Unexpected interruptions in all."""
        return sum(cause.count for cause in self.causes)

    @property
    def rate(self) -> float:
        """Unexpected interruptions per device-hour."""
        return self.count / (self.devices * self.days * 24)


class Reliability(Spec):
    """Fault rates of a cluster's nodes, racks and switches, and repair times. A rate whose default is 0 has no published
    figure."""

    faults: str = Field(
        default="llama3", description="name of the table in spec/faults.toml that gives the relative frequencies of the causes"
    )
    reboot_hours: PositiveFloat = Field(
        default=0.5,
        description="mean hours from a fault until the node is back, if a reset or reboot repairs it; an assumed default",
    )
    part_hours: PositiveFloat = Field(
        default=24.0, description="mean hours until a node is back, if a part of it is replaced; an assumed default"
    )
    node_hours: PositiveFloat = Field(
        default=72.0, description="mean hours until a node is back, if all of it is replaced; an assumed default"
    )
    maintenance_hours: PositiveFloat = Field(
        default=4.0, description="hours until a node is back from maintenance; an assumed default"
    )
    idle_factor: NonNegativeFloat = Field(
        default=0.25,
        le=1.0,
        description="hardware failure rate of an idle node, divided by that of a busy node; an assumed default",
    )
    slow_factor: PositiveFloat = Field(
        default=1.3, ge=1.0, description="time of a step with a straggler, divided by that of a normal step"
    )
    rack_nodes: PositiveInt = Field(
        default=2,
        description="nodes per rack; default: as for Llama 3, whose racks held two servers of eight GPUs (arXiv:2407.21783, 3.3.1)",
    )
    rack_outages: NonNegativeFloat = Field(default=0.0, description="outages per rack and year")
    rack_hours: PositiveFloat = Field(default=4.0, description="mean hours until a failed rack is back; an assumed default")
    switch_racks: PositiveInt = Field(
        default=192,
        description="racks under one switch; default: as for Llama 3, whose pods had 192 racks (arXiv:2407.21783, 3.3.1)",
    )
    switch_outages: NonNegativeFloat = Field(default=0.0, description="outages per switch and year")
    switch_hours: PositiveFloat = Field(
        default=0.5, description="mean hours until the racks behind a failed switch are back; an assumed default"
    )
    lemon_share: NonNegativeFloat = Field(
        default=0.0, lt=1.0, description="share of nodes that fail much more often than the others"
    )
    lemon_factor: PositiveFloat = Field(
        default=1.0,
        ge=1.0,
        description="failure rate of the nodes in lemon_share, divided by that of the other nodes; the mean rate of all nodes "
        "does not change",
    )
    person_hours: PositiveFloat = Field(
        default=0.5, description="hours until a person has restarted a run that stopped; an assumed default"
    )

    def hours(self, repair: Repair) -> float:
        """Return the mean hours that a kind of repair takes."""
        if repair == "none":
            return 0.0
        return float(getattr(self, f"{repair}_hours"))


@cache
def tables() -> dict[str, FaultTable]:
    """Every known table by name."""
    rows = tomllib.loads(files("megalith.spec").joinpath("faults.toml").read_text(encoding="utf-8"))
    return {name: FaultTable.model_validate({"name": name, **row}) for name, row in rows.items()}
