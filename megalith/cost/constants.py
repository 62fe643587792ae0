"""The calibration: a few physical figures per device and kind of software, read from calibration.toml. No torch.

They are fitted on published measurements by `cost/calibrate.py`; none belongs to a model or to a row.
"""

import tomllib
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.resources import files
from typing import Any

from megalith.spec.cluster import Accelerator, ClusterSpec


@dataclass(frozen=True)
class Device:
    """Achieved share of a device generation's printed figures."""

    units: int
    """Processors that compute tiles of a matrix product side by side (streaming multiprocessors)."""
    wide: float
    """Share of peak a large product reaches in bf16, fp16."""
    narrow: float
    """The same in 8 bits, and
    in 4 (`quarter`)."""
    quarter: float
    idle: float
    """Processors left idle by the last wave of tiles, as a share of all of them."""
    ramp: float
    """Inner size at which a product reaches half its speed: filling and draining the pipeline of a tile."""
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
        """Return the device if this number of its processors computes nothing. The others still reach its whole memory bandwidth."""
        if not units:
            return self
        left = 1 - units / self.units
        rates = ("wide", "narrow", "quarter", "attention_forward", "attention_backward")
        return replace(self, units=self.units - units, **{name: left * getattr(self, name) for name in rates})


@dataclass(frozen=True)
class SoftwareOverheads:
    """Overheads of the software that runs a step."""

    host: float
    """Seconds an x86 host takes to start an operation; it works ahead of the device, so the slower of the two counts."""
    launch: float
    """Seconds that the host takes for each further kernel, if an operation starts several."""
    routing: float
    """Seconds a layer of experts waits in each direction for the host to learn where tokens go."""
    passes: float
    """Element-wise bytes moved, as a share of those of the traced modules: below 1 where kernels are fused further."""
    tensor_exposed: float
    """Share of the tensor axis's collectives that is not hidden behind products."""
    expert_exposed: float
    """Share of the experts' all-to-all that is not hidden."""
    data_exposed: float
    """Share that is not hidden of the data axis's collectives that computation could hide."""
    contention: float
    """Share by which collectives slow down the computation they hide behind."""
    step: float
    """Seconds of a step outside the model: reading data, logging, checks."""
    optimizer: float
    """Bytes the optimizer moves for a parameter it updates."""
    straggle: float
    """Share by which a step grows with each doubling of the nodes: the slowest sets the pace."""
    message_exposed: float
    """Share of the messages between pipeline ranks that is not hidden."""
    working: float
    """Temporary memory of a block's backward, as a share of the traced peak."""
    reserve: float
    """Bytes of buffers that grow with nothing traced: workspaces, communication buckets."""
    slack: float
    """Share of memory an allocator loses to fragments."""


@dataclass(frozen=True)
class Host:
    """The host that launches the devices' operations, if it is not an x86 server."""

    slower: float
    """Its launch time relative to an x86 server."""


@dataclass(frozen=True)
class Calibration:
    """Every fitted figure, and how they were found."""

    devices: dict[str, Device]
    overheads: dict[str, SoftwareOverheads]
    hosts: dict[str, Host]
    families: dict[str, str]
    """Accelerator -> its generation of devices."""
    beside: dict[str, str]
    """Accelerator -> its host, if that is not an x86 server."""
    fitted: dict[str, Any]

    def device(self, accelerator: Accelerator) -> Device:
        """The figures of an accelerator; of its vendor's newest generation if it has no entry of its own."""
        return self.devices[self.families.get(accelerator.name, "hopper")]

    def device_of(self, cluster: ClusterSpec) -> Device:
        """Return the figures of a cluster's devices: measured ones if available, else fitted ones."""
        known, measured = self.device(cluster.accelerator), cluster.measured
        if measured is None:
            return known
        own = measured.model_dump(include={field.name for field in fields(Device)}, exclude_none=True)
        # a processor that starts its own operations has no idle parts, and no operation has a least time besides its start
        alone = {"units": 1, "idle": 0.0, "gap": 0.0} if measured.in_turn else {}
        return replace(known, **own, **alone)

    def overheads_of(self, name: str, cluster: ClusterSpec, *, ours: bool) -> SoftwareOverheads:
        """Return the overheads of some software on a cluster. `ours`: figures for this project's trainer, whose start of an
        operation was measured on that machine; other software keeps the fitted one."""
        known, measured = self.overheads[name], cluster.measured
        if measured is None:
            return known
        # the processor that computes also moves the data, so no communication is hidden
        alone = ("passes", "tensor_exposed", "expert_exposed", "data_exposed", "message_exposed") if measured.in_turn else ()
        host = measured.launch if ours else known.host
        return replace(known, host=host, **dict.fromkeys(alone, 1.0), **({"contention": 0.0} if measured.in_turn else {}))

    def slower(self, accelerator: Accelerator) -> float:
        """Time that an accelerator's host takes to launch an operation, relative to an x86 server."""
        return self.hosts[self.beside[accelerator.name]].slower if accelerator.name in self.beside else 1.0

    def changed(self, values: dict[str, float]) -> "Calibration":
        """Return a calibration with some figures replaced: {"hopper.wide": 0.7}."""
        tables: dict[str, dict[str, Any]] = {name: dict(getattr(self, name)) for name in ("devices", "overheads", "hosts")}
        for name, value in values.items():
            owner, _, key = name.partition(".")
            table = next(table for table in tables.values() if owner in table)
            table[owner] = replace(table[owner], **{key: value})
        return replace(self, **tables)

    def flat(self) -> dict[str, float]:
        """{"hopper.wide": 0.7, ...}: the inverse of `changed`."""
        return {
            f"{owner}.{field.name}": getattr(figures, field.name)
            for table in (self.devices, self.overheads, self.hosts)
            for owner, figures in table.items()
            for field in fields(figures)
        }


@cache
def calibration() -> Calibration:
    """The bundled one."""
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
