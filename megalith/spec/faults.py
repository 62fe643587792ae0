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
"""Symptom of a fault in a run. "crash": a rank's process dies; "bug": its program raises; "hang": no rank makes progress."""

Repair = Literal["none", "reboot", "part", "node", "maintenance"]
"""Repair of a node: none, a reset or reboot, replacement of a part, replacement of the whole node, or the end of its
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
        default=0.0, description="planned interruptions in that time; the causes do not include them"
    )
    source: str
    causes: tuple[FaultCause, ...]

    @property
    def count(self) -> float:
        """Unexpected interruptions in all."""
        return sum(cause.count for cause in self.causes)

    @property
    def rate(self) -> float:
        """Unexpected interruptions a device-hour."""
        return self.count / (self.devices * self.days * 24)


class Reliability(Spec):
    """Fault rates of a cluster's nodes, single and in groups, and repair times. A default of 0 means that no figure is
    published."""

    faults: str = Field(default="llama3", description="table whose mix of causes is used (spec/faults.toml)")
    reboot_hours: PositiveFloat = Field(
        default=0.5, description="mean time until a node that a reset or reboot cures is back; assumed"
    )
    part_hours: PositiveFloat = Field(default=24.0, description="mean time until a node with a replaced part is back; assumed")
    node_hours: PositiveFloat = Field(
        default=72.0, description="mean time until a node that is replaced as a whole is back; assumed"
    )
    maintenance_hours: PositiveFloat = Field(default=4.0, description="time until a node taken for maintenance is back; assumed")
    idle_factor: NonNegativeFloat = Field(
        default=0.25, le=1.0, description="hardware failure rate of an idle node, divided by that of a busy node; assumed"
    )
    slow_factor: PositiveFloat = Field(
        default=1.3, ge=1.0, description="time of a step with a straggler, divided by that of a normal step"
    )
    rack_nodes: PositiveInt = Field(
        default=2, description="nodes of a rack; Llama 3: two servers of eight (arXiv:2407.21783, 3.3.1)"
    )
    rack_outages: NonNegativeFloat = Field(default=0.0, description="outages of a rack in a year")
    rack_hours: PositiveFloat = Field(default=4.0, description="mean time until a failed rack is back; assumed")
    switch_racks: PositiveInt = Field(
        default=192, description="racks under one switch; Llama 3: pods of 192 racks (same section)"
    )
    switch_outages: NonNegativeFloat = Field(default=0.0, description="outages of a switch in a year")
    switch_hours: PositiveFloat = Field(
        default=0.5, description="mean time until the racks behind a failed switch are back; assumed"
    )
    lemon_share: NonNegativeFloat = Field(default=0.0, lt=1.0, description="share of nodes that fail much more often")
    lemon_factor: PositiveFloat = Field(
        default=1.0,
        ge=1.0,
        description="failure rate of these nodes, divided by that of the others; the mean over all nodes stays the same",
    )
    person_hours: PositiveFloat = Field(default=0.5, description="time until a person has dealt with a run that stopped; assumed")

    def hours(self, repair: Repair) -> float:
        """Return the mean hours of this repair."""
        if repair == "none":
            return 0.0
        return float(getattr(self, f"{repair}_hours"))


@cache
def tables() -> dict[str, FaultTable]:
    """Every known table by name."""
    rows = tomllib.loads(files("megalith.spec").joinpath("faults.toml").read_text(encoding="utf-8"))
    return {name: FaultTable.model_validate({"name": name, **row}) for name, row in rows.items()}
