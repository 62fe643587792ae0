"""Description of this machine: processor, memory, GPUs, and the software that trains on them. Uses no torch, and measures nothing."""

import os
import platform
import shutil
import subprocess
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from megalith import __version__
from megalith.machine import capacity

GIB = 2.0**30
BF16_FLAGS = ("amx_bf16", "avx512_bf16", "bf16", "svebf16")
"""Flags in /proc/cpuinfo for bf16 multiplication: first those of Intel and AMD, then those of ARM.
"""
AMPERE = 8.0
"""The lowest compute capability whose tensor cores support bf16."""
QUERY = "name,memory.total,compute_cap,driver_version"


@dataclass(frozen=True)
class GpuModel:
    """One GPU, as nvidia-smi describes it. `memory` is in bytes; `bf16`: True if its tensor cores support bf16."""

    name: str
    memory: float
    bf16: bool
    driver: str


@dataclass(frozen=True)
class Description:
    """A machine. Sizes are bytes; None means unknown. `memory_of` names what limits the memory."""

    system: str
    python: str
    megalith: str
    torch: str | None
    """The installed version; the part after the plus sign is the CUDA version for which it was built."""
    processor: str
    processors: int
    """Number of processors on which this process may run."""
    processor_bf16: bool | None
    memory: float | None
    memory_of: str
    shared_memory: float | None
    gpu_count: int | None
    """Number of GPUs that a process started now could use; None if only a GPU runtime can determine it."""
    gpus: tuple[GpuModel, ...]
    """All GPUs that nvidia-smi lists, whatever CUDA_VISIBLE_DEVICES says."""

    def as_json(self) -> dict[str, Any]:
        """Return the description as a JSON object."""
        return asdict(self)

    def rows(self) -> list[tuple[str, str]]:
        """Return the description as names and text."""
        bf16 = {True: "has bf16 instructions", False: "no bf16 instructions: precision fp32 is faster here", None: "bf16 unknown"}
        rows = [
            ("system", self.system),
            ("Python", self.python),
            ("Megalith", self.megalith),
            ("torch", self.torch or "not installed"),
            ("processor", f"{self.processor}, {self.processors} usable"),
            ("", bf16[self.processor_bf16]),
            ("memory", f"{_size(self.memory)} ({self.memory_of})"),
            ("/dev/shm", _size(self.shared_memory)),
        ]
        return [*rows, *self._gpu_rows()]

    def _gpu_rows(self) -> list[tuple[str, str]]:
        if not self.gpu_count and not self.gpus:
            return [
                ("GPUs", "no GPU found: runs train on the processor" if self.gpu_count == 0 else "unknown without a GPU runtime")
            ]
        kinds = dict.fromkeys(self.gpus)
        count = "?" if self.gpu_count is None else str(self.gpu_count)
        rows = [("GPUs", f"{count} usable")]
        for one in kinds:
            number = self.gpus.count(one)
            rows.append(
                ("", f"{number} x {one.name}, {_size(one.memory)}, {'bf16' if one.bf16 else 'no bf16'}, driver {one.driver}")
            )
        return rows


def describe() -> Description:
    """Describe this machine, which takes as long as nvidia-smi, if nvidia-smi is installed."""
    found = capacity.measure()
    name, bf16 = processor()
    return Description(
        system=f"{platform.system()} {platform.release()} on {platform.machine()}",
        python=platform.python_version(),
        megalith=__version__,
        torch=_version("torch"),
        processor=name,
        processors=found.processors,
        processor_bf16=bf16,
        memory=None if found.memory == float("inf") else found.memory,
        memory_of=found.memory_of,
        shared_memory=_shared_memory(),
        gpu_count=found.gpus,
        gpus=tuple(_gpus()),
    )


def processor(proc: Path = capacity.PROC) -> tuple[str, bool | None]:
    """Return the processor's name, and True if it has bf16 instructions (None if unknown)."""
    try:
        lines = (proc / "cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine(), None
    values = {key.strip().lower(): value.strip() for key, _, value in (line.partition(":") for line in lines) if value}
    flags = set((values.get("flags") or values.get("features") or "").split())
    name = values.get("model name") or values.get("hardware") or platform.machine()
    return name, any(flag in flags for flag in BF16_FLAGS) if flags else None


def read_gpus(text: str) -> list[GpuModel]:
    """Parse the GPUs that `nvidia-smi --query-gpu` printed as CSV without units; other lines are ignored."""
    found = list[GpuModel]()
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        try:
            name, memory, capability, driver = cells
            found.append(GpuModel(name, float(memory) * 2**20, float(capability) >= AMPERE, driver))
        except ValueError:
            continue
    return found


def _gpus() -> list[GpuModel]:
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return read_gpus(done.stdout) if done.returncode == 0 else []


def _shared_memory() -> float | None:
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return None
    return float(found.f_frsize * found.f_blocks)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _size(value: float | None) -> str:
    return "unknown" if value is None else f"{value / GIB:.1f} GiB"
