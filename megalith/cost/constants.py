"""The calibration: a few physical figures per device and kind of software, read from calibration.toml. No torch.

`cost/calibrate.py` fits the figures on published measurements; no figure is specific to a model or a measurement.
"""

import tomllib
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.resources import files
from typing import Any

from megalith.spec.cluster import Accelerator, ClusterSpec


@dataclass(frozen=True)
class Device:
    """Figures of a device generation: which shares of its published figures software achieves."""

    units: int
    """Number of processors that compute tiles of a matrix product in parallel (SMs)."""
    wide: float
    """Share of peak that a large product reaches in bf16 or fp16."""
    narrow: float
    """Share of peak that a large product reaches in 8 bits; `quarter`: in 4 bits."""
    quarter: float
    idle: float
    """Share of the processors that the last wave of tiles leaves idle."""
    ramp: float
    """Inner size at which a product reaches half its speed, because a tile's pipeline must be filled and drained."""
    attention_forward: float
    """Share of bf16's peak that the forward of fused attention reaches."""
    attention_backward: float
    """Share of bf16's peak that the backward of fused attention reaches."""
    memory: float
    """Share of the memory bandwidth that element-wise kernels reach."""
    fast: float
    """Share of the fast links' bandwidth that a large collective reaches."""
    slow: float
    """Share of the network's bandwidth that a large collective reaches."""
    latency: float
    """Seconds that a collective takes to start."""
    hop: float
    """Seconds that a ring takes for each domain of fast links that it passes through."""
    gap: float
    """Minimum seconds of a kernel on the device."""

    def without(self, units: int) -> "Device":
        """Return the device with `units` fewer processors. The remaining processors still reach the full memory bandwidth."""
        if not units:
            return self
        left = 1 - units / self.units
        rates = ("wide", "narrow", "quarter", "attention_forward", "attention_backward")
        return replace(self, units=self.units - units, **{name: left * getattr(self, name) for name in rates})


@dataclass(frozen=True)
class SoftwareOverheads:
    """Overheads of the software that runs a step."""

    host: float
    """Seconds that an x86 host takes to launch an operation. The host works ahead of the device, so only the slower of host and device
    counts."""
    launch: float
    """Seconds that the host takes for each further kernel of an operation that launches several kernels."""
    routing: float
    """Seconds that a layer of experts waits, in forward and in backward, until the host knows where tokens go."""
    passes: float
    """Bytes that element-wise operations move, divided by the bytes in the trace; below 1 if more kernels are fused."""
    tensor_exposed: float
    """Share of the tensor axis's collectives that is not hidden behind products."""
    expert_exposed: float
    """Share of the experts' all-to-all that is not hidden."""
    data_exposed: float
    """Exposed share of the data axis's collectives that computation could hide."""
    contention: float
    """Relative slowdown of computation that overlaps with collectives."""
    step: float
    """Seconds of a step outside the model: reading data, logging, checks."""
    optimizer: float
    """Bytes that the optimizer moves for each parameter that it updates."""
    straggle: float
    """Relative growth of a step with each doubling of the nodes, because all nodes wait for the slowest."""
    message_exposed: float
    """Share of the messages between pipeline ranks that is not hidden."""
    working: float
    """Temporary memory of a block's backward, divided by the traced peak."""
    reserve: float
    """Bytes of buffers of constant size: workspaces, communication buckets."""
    slack: float
    """Share of memory that the allocator loses to fragmentation."""


@dataclass(frozen=True)
class Host:
    """The host that launches the devices' operations, if it is not an x86 server."""

    slower: float
    """The host's launch time relative to an x86 server."""


@dataclass(frozen=True)
class Calibration:
    """All fitted figures, and the record of their fit."""

    devices: dict[str, Device]
    overheads: dict[str, SoftwareOverheads]
    hosts: dict[str, Host]
    families: dict[str, str]
    """Accelerator -> its device generation."""
    beside: dict[str, str]
    """Accelerator -> its host, if that is not an x86 server."""
    fitted: dict[str, Any]

    def device(self, accelerator: Accelerator) -> Device:
        """Return the figures of an accelerator, or the figures of "hopper" if the accelerator has no entry."""
        return self.devices[self.families.get(accelerator.name, "hopper")]

    def device_of(self, cluster: ClusterSpec) -> Device:
        """Return the figures of a cluster's devices: measured figures if available, otherwise fitted figures."""
        known, measured = self.device(cluster.accelerator), cluster.measured
        if measured is None:
            return known
        own = measured.model_dump(include={field.name for field in fields(Device)}, exclude_none=True)
        # a processor that starts its own operations has no idle parts, and no operation has a least time besides its start
        alone = {"units": 1, "idle": 0.0, "gap": 0.0} if measured.in_turn else {}
        return replace(known, **own, **alone)

    def overheads_of(self, name: str, cluster: ClusterSpec, *, ours: bool) -> SoftwareOverheads:
        """Return the overheads of some software on a cluster. `ours`: figures for Megalith's trainer, whose launch time was measured on
        the cluster's machine; other software keeps the fitted launch time."""
        known, measured = self.overheads[name], cluster.measured
        if measured is None:
            return known
        # the processor that computes also moves the data, so no communication is hidden
        alone = ("passes", "tensor_exposed", "expert_exposed", "data_exposed", "message_exposed") if measured.in_turn else ()
        host = measured.launch if ours else known.host
        return replace(known, host=host, **dict.fromkeys(alone, 1.0), **({"contention": 0.0} if measured.in_turn else {}))

    def slower(self, accelerator: Accelerator) -> float:
        """Launch time of an accelerator's host, relative to an x86 server."""
        return self.hosts[self.beside[accelerator.name]].slower if accelerator.name in self.beside else 1.0

    def changed(self, values: dict[str, float]) -> "Calibration":
        """Return a calibration with some figures replaced, such as {"hopper.wide": 0.7}."""
        tables: dict[str, dict[str, Any]] = {name: dict(getattr(self, name)) for name in ("devices", "overheads", "hosts")}
        for name, value in values.items():
            owner, _, key = name.partition(".")
            table = next(table for table in tables.values() if owner in table)
            table[owner] = replace(table[owner], **{key: value})
        return replace(self, **tables)

    def flat(self) -> dict[str, float]:
        """Return all figures as {"hopper.wide": 0.7, ...}, the argument of `changed`."""
        return {
            f"{owner}.{field.name}": getattr(figures, field.name)
            for table in (self.devices, self.overheads, self.hosts)
            for owner, figures in table.items()
            for field in fields(figures)
        }


@cache
def calibration() -> Calibration:
    """Return the bundled calibration."""
    return parse(files("megalith.cost").joinpath("calibration.toml").read_text(encoding="utf-8"))


def parse(text: str) -> Calibration:
    """A calibration from its TOML."""
    table = tomllib.loads(text)
    return Calibration(
        devices={name: Device(**row) for name, row in table["device"].items()},
        overheads={name: SoftwareOverheads(**row) for name, row in table["generation"].items()},
        hosts={name: Host(**row) for name, row in table["host"].items()},
        families=table["families"],
        beside=table["beside"],
        fitted=table["fitted"],
    )
