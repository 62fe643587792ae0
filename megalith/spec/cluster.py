"""Hardware of a run: accelerators with sourced figures, and clusters of them."""

import re
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, ValidationError, model_validator

from megalith.spec.base import Spec
from megalith.spec.faults import Reliability
from megalith.spec.numbers import Rate
from megalith.spec.problem import Problem, SpecErrors, near


class Accelerator(Spec):
    """One device. Rates are per second and per device. The rate of a link is that of ONE direction (vendors print the sum of both
    directions).

    A figure that the vendor did not publish is None, or missing from `peak`.
    """

    name: str
    title: str
    vendor: str
    device_names: tuple[str, ...] = Field(default=(), description="full names that torch reports for the device")
    peak: dict[Rate, PositiveFloat] = Field(description="dense FLOP/s by precision, without sparsity")
    memory: PositiveInt | None = Field(default=None, description="bytes")
    memory_bandwidth: PositiveFloat | None = Field(default=None, description="bytes/s")
    scale_up: PositiveFloat | None = Field(default=None, description="bytes/s out of a device over its fast links, one direction")
    scale_up_domain: PositiveInt = Field(default=1, description="number of devices that the fast links connect to each other")
    torus: int = Field(
        default=0,
        ge=0,
        le=6,
        description="number of dimensions, if the fast links form a torus; 0: they form a switch, or connect every pair of "
        "devices",
    )
    per_node: PositiveInt = Field(default=1, description="devices of one host")
    scale_out: PositiveFloat | None = Field(default=None, description="bytes/s out of a device over the network, one direction")
    power: PositiveFloat | None = Field(default=None, description="thermal design power, in watts")
    price_per_hour: NonNegativeFloat | None = Field(
        default=None, description="US dollars per hour of one device; the catalogue's price is an assumption, so set your own"
    )
    compute_capability: PositiveFloat | None = Field(default=None, description="NVIDIA's compute capability, such as 9.0")
    source: dict[str, str] = Field(description="sources of peak, memory, links, power and price")

    @property
    def is_processor(self) -> bool:
        """True if ranks compute on the machine's processor, which torch calls "cpu"."""
        return "cpu" in self.device_names

    @property
    def kind(self) -> Literal["cpu", "cuda"]:
        """The kind of device, by torch's name."""
        return "cpu" if self.is_processor else "cuda"

    @property
    def half(self) -> Rate:
        """The 16-bit format that the device's matrix units compute in: fp16 on a device without bf16 (V100)."""
        return "fp16" if "bf16" not in self.peak and "fp16" in self.peak else "bf16"

    @property
    def wide(self) -> float:
        """Dense FLOP/s in `half`. Raises KeyError if `peak` has no rate for `half`."""
        return self.peak[self.half]


class Measured(Spec):
    """Figures of one machine, as `megalith doctor --calibrate` measured them with all ranks at work.

    Predictions use these figures in place of fitted ones. A share is the measured rate divided by the accelerator's published
    rate.
    """

    device: str = Field(description="the device that was measured, as torch calls it")
    processor: str = Field(description="name of the host's CPU, which is the device itself if the ranks compute on a CPU")
    at: str = Field(description="date and time of the measurement, in UTC")
    torch: str = Field(description="version of PyTorch used in the measurement")
    ranks: PositiveInt = Field(description="ranks that computed at the same time")
    threads: PositiveInt = Field(default=1, description="compute threads of each rank")
    wide: PositiveFloat = Field(description="share of the peak FLOP/s that a large matrix product reaches")
    ramp: NonNegativeFloat = Field(description="inner size at which a matrix product reaches half the rate of a large one")
    attention_forward: PositiveFloat = Field(description="share of the 16-bit peak FLOP/s that attention's forward reaches")
    attention_backward: PositiveFloat = Field(description="share of the 16-bit peak FLOP/s that attention's backward reaches")
    memory: PositiveFloat = Field(description="share of the device's memory bandwidth that element-wise operations reach")
    fast: PositiveFloat | None = Field(
        default=None,
        description="share of the accelerator's scale_up rate that a large collective reaches; unset if one rank was measured",
    )
    latency: PositiveFloat | None = Field(
        default=None, description="seconds that a collective takes to start; unset if one rank was measured"
    )
    launch: PositiveFloat = Field(description="seconds that the host needs to launch an operation")
    in_turn: bool = Field(
        description=(
            "true on a CPU: the processor that launches an operation also computes it, so launch times add to the computation"
        )
    )


USABLE = 0.5
"""Share of a host's memory that training state may take; data, checkpoints and copies of the state need the rest."""

HOST_MEMORY = 256 * 2**30
"""Bytes of host memory for each device, if a cluster file has none: an eighth of the 2 TiB that a DGX A100, H100 or B200 has."""


class HostSpec(Spec):
    """Memory, links and disks of one host of a cluster, which its devices share. If a key is None, `HOST_MEMORY` and `cost.host` are
    the figures assumed for each device."""

    memory: PositiveInt | None = Field(
        default=None, description="bytes of the host's memory; training state may take half of them"
    )
    memory_bandwidth: PositiveFloat | None = Field(
        default=None, description="largest rate at which the host's memory is read and written, in bytes/s"
    )
    link: PositiveFloat | None = Field(
        default=None, description="bytes/s between one device and the host's memory, in one direction"
    )
    disk: PositiveInt | None = Field(default=None, description="bytes on the host's disks that training state may take")
    disk_bandwidth: PositiveFloat | None = Field(
        default=None, description="bytes/s that the host's disks can read while they write at the same rate"
    )


class ClusterSpec(Spec):
    """A cluster of equal accelerators, with their links, faults and prices. In a cluster file, `per_node`, `scale_out` and
    `price_per_hour` have the accelerator's values unless given."""

    accelerator: Accelerator
    count: PositiveInt
    per_node: PositiveInt
    scale_out: PositiveFloat | None = Field(default=None, description="bytes/s out of a device over the network, one direction")
    pod: PositiveInt | None = Field(
        default=None,
        description="number of devices in a pod: within a pod, any two devices communicate at the scale_out rate; unset: all "
        "devices are in one pod",
    )
    oversubscription: float = Field(
        default=1.0,
        ge=1,
        description="summed rate of all devices of a pod, divided by the rate at which data can leave the pod",
    )
    price_per_hour: NonNegativeFloat | None = Field(default=None, description="US dollars a device")
    interruptions: NonNegativeFloat = Field(
        default=419 / (54 * 24 * 16_384),
        description="unexpected interruptions per device-hour; default: the rate of the Llama 3 405B run, 419 in 54 days on "
        "16,384 H100 (arXiv:2407.21783)",
    )
    reliability: Reliability = Field(default=Reliability(), description="how nodes break, and for how long")
    measured: Measured | None = Field(default=None, description="figures that `megalith doctor --calibrate` measured")
    host: HostSpec = Field(default=HostSpec(), description="memory, links and disks of a host")

    @model_validator(mode="after")
    def _pods_are_whole(self) -> Self:
        near = max(self.per_node, self.accelerator.scale_up_domain)
        if self.pod is None and self.oversubscription > 1:
            raise ValueError(f"oversubscription = {self.oversubscription:g} needs a pod size: set pod, in devices")
        if self.pod is not None and self.pod % near:
            raise ValueError(
                f"pod = {self.pod} is not a multiple of the {near} devices that the fast links connect: use a multiple"
            )
        return self

    @property
    def nodes(self) -> int:
        """The number of hosts; the last one may have fewer devices than the others."""
        return -(-self.count // self.per_node)

    @property
    def host_devices(self) -> int:
        """The number of devices of a host, or of the cluster if it is less than one host."""
        return min(self.per_node, self.count)

    @property
    def host_room(self) -> float:
        """Bytes of host memory that the state of one device may take."""
        return USABLE * (HOST_MEMORY if self.host.memory is None else self.host.memory / self.host_devices)

    @property
    def disk_room(self) -> float | None:
        """Bytes of disk that the state of one device may take; None if unknown."""
        return None if self.host.disk is None else self.host.disk / self.host_devices

    def has_room(self, *, memory: float, disk: float) -> bool:
        """True if a device's share of its host has room for these bytes in memory and on disk."""
        most = self.disk_room
        return memory <= self.host_room and (most is None or disk <= most)

    @property
    def machine(self) -> str:
        """Name of the accelerator, or of the CPU if the figures were measured on one."""
        found = self.measured
        return self.accelerator.name if found is None or not found.in_turn else found.processor

    def resized(self, count: int) -> "ClusterSpec | None":
        """Return the cluster with another number of devices. Return None if the cluster's figures were measured on a CPU, because
        they only hold for the number of ranks that shared the CPU."""
        shared = self.measured is not None and self.measured.in_turn
        return None if shared and count != self.count else self.model_copy(update={"count": count})

    @property
    def fast(self) -> int:
        """Devices that tensor parallelism may span without leaving the fast links."""
        return min(self.count, self.accelerator.scale_up_domain)


ALIASES = {
    "v100": "v100-32gb",
    "a100": "a100-80gb",
    "a100-sxm": "a100-80gb",
    "a800": "a800-80gb",
    "h100-80gb": "h100",
    "h100-sxm": "h100",
    "h200-sxm": "h200",
    "gh200-96gb": "gh200",
    "rtx4090": "rtx-4090",
    "4090": "rtx-4090",
    "mi300": "mi300x",
    "gb200": "gb200-nvl72",
    "gb300": "gb300-nvl72",
    "tpuv4": "tpu-v4",
    "tpuv5p": "tpu-v5p",
    "tpuv6e": "tpu-v6e",
    "trillium": "tpu-v6e",
}
"""Short names of accelerators in the catalogue. If an accelerator has several memory sizes, the short name means the most
common one."""

OWN = 'Any other device can be described in a cluster file (cluster = "mine.toml"), as in clusters/own-accelerator.toml of the sources.'


CALIBRATE = "Measure with megalith doctor --calibrate FILE.toml"


COUNTED = re.compile(r"(\d+) ?[x*×] ?(\S+)")
"""Pattern of a number of devices followed by the device's name, such as 8xh100."""


@cache
def catalogue() -> dict[str, Accelerator]:
    """Every known accelerator by name, in the order of accelerators.toml."""
    table = tomllib.loads(files("megalith.spec").joinpath("accelerators.toml").read_text(encoding="utf-8"))
    return {name: _accelerator(name, row) for name, row in table.items()}


def _accelerator(name: str, row: dict[str, Any]) -> Accelerator:
    memory = row.pop("memory_gib", None)
    return Accelerator.model_validate({"name": name, "memory": memory and memory * 2**30, **row})


def find(device_name: str) -> Accelerator | None:
    """Return the accelerator that torch calls `device_name`. Return None if the catalogue has no such device."""
    wanted = device_name.strip().lower()
    for accelerator in catalogue().values():
        if wanted in (name.lower() for name in accelerator.device_names):
            return accelerator
    return None


def load(text: str) -> ClusterSpec:
    """Return the cluster that `text` names: "h100" (one node), "h100:16384" or "16384xh100" (that many devices), or a TOML file
    (`clusters/mine.toml`).

    The file's keys are those of ClusterSpec, where `accelerator` is a name from the catalogue or a table that describes a device.
    Raises SpecErrors for a name that is not in the catalogue; the message suggests the nearest known name.
    """
    if text.endswith(".toml"):
        return _read(Path(text))
    name, colon, count = (said[2], ":", said[1]) if (said := COUNTED.fullmatch(text)) else text.partition(":")
    accelerator = _named(name, key="cluster")
    if colon and not (count.isascii() and count.isdigit() and int(count) > 0):
        raise SpecErrors([_problem("cluster", text, f"{count!r} is not a number of devices", f'Write "{name}:8" for eight.')])
    return _cluster({"count": int(count) if colon else accelerator.per_node}, accelerator)


def counted(text: str) -> bool:
    """True if `text`, an argument of `load`, states the number of devices, as "h100:16" does and "h100" does not."""
    return ":" in text or text.endswith(".toml") or COUNTED.fullmatch(text) is not None


def _cluster(values: dict[str, Any], accelerator: Accelerator) -> ClusterSpec:
    own = {key: getattr(accelerator, key) for key in ("per_node", "scale_out", "price_per_hour")}
    return ClusterSpec.model_validate(own | values | {"accelerator": accelerator})


def _named(name: Any, *, key: str) -> Accelerator:
    known = catalogue()
    found = ALIASES.get(str(name).lower(), str(name).lower())
    if found in known:
        return known[found]
    nearest = near(str(name), known, alike=0.7)
    way_out = f"Did you mean {nearest!r}? " if nearest else ""
    raise SpecErrors([_problem(key, name, f"no accelerator is called {name!r}", f"{way_out}Known: {', '.join(known)}. {OWN}")])


def _read(path: Path) -> ClusterSpec:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SpecErrors([_problem("cluster", str(path), f"cannot be read: {error}", "Give a readable TOML file.")]) from error
    given = values.pop("accelerator", None)
    try:
        own = isinstance(given, dict)
        accelerator = Accelerator.model_validate(given) if own else _named(given, key=f"{path}: accelerator")
        cluster = _cluster(values, accelerator)
    except ValidationError as error:
        raise _invalid(error, f"{path}: ") from error
    if problems := _measured_elsewhere(path, cluster):
        raise SpecErrors(problems)
    return cluster


def changed(cluster: ClusterSpec, values: Mapping[str, Any]) -> ClusterSpec:
    """Return the cluster with other values for some keys of a cluster file; `accelerator` and `host` are tables. Raises
    SpecErrors."""
    try:
        return ClusterSpec.model_validate(_laid(cluster.model_dump(), values))
    except ValidationError as error:
        raise _invalid(error, "cluster.") from error


def _laid(below: Any, above: Mapping[str, Any]) -> dict[str, Any]:
    held = below if isinstance(below, dict) else {}
    return held | {key: _laid(held.get(key), value) if isinstance(value, Mapping) else value for key, value in above.items()}


def _invalid(error: ValidationError, where: str) -> SpecErrors:
    """Convert pydantic's errors about a cluster file to problems; each problem's key is preceded by `where`."""
    found = ((".".join(map(str, each["loc"])), each) for each in error.errors())
    return SpecErrors(
        [
            _problem(f"{where}{key}".rstrip(" .:"), each["input"] if key else None, each["msg"], _correct(key))
            for key, each in found
        ]
    )


def _correct(key: str) -> str:
    nearest = near(key, ClusterSpec.model_fields) if "." not in key else None
    hint = f"Did you mean {nearest!r}? " if nearest and nearest != key else ""
    return f"{hint}Correct the value, or leave the key out."


def _measured_elsewhere(path: Path, cluster: ClusterSpec) -> list[Problem]:
    found, device = cluster.measured, cluster.accelerator
    if found is None:
        return []
    problems = list[Problem]()
    if found.device not in device.device_names:
        known = ", ".join(device.device_names) or "not known"

        reason = f"the figures were not measured on {device.name}, which torch calls {known}"
        way_out = f"{CALIBRATE} on that device, or remove the table [measured] from this file."
        problems.append(_problem(f"{path}: measured.device", found.device, reason, way_out))
    if found.ranks > cluster.count or (found.in_turn and found.ranks != cluster.count):
        shared = ": the measured ranks shared one machine's processors" * found.in_turn
        reason = f"does not suit count = {cluster.count}{shared}"
        way_out = f"{CALIBRATE} --ranks {cluster.count}, or set count = {found.ranks}."
        problems.append(_problem(f"{path}: measured.ranks", found.ranks, reason, way_out))
    return problems


def _problem(key: str, value: Any, reason: str, way_out: str) -> Problem:
    return Problem("error", key, value, reason, way_out)
