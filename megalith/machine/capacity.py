"""Resources of this machine for training: processors, memory, GPUs. Uses no torch, and starts nothing (threads, CUDA) that would harm a
later fork."""

import ctypes
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PROC, GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
OTHER_DEVICES = (Path("/dev/kfd"), Path("/dev/dxg"), Path("/dev/nvmap"))
"""Device files of GPUs that NVML does not count: those of AMD, WSL and Jetson."""
DRIVER_NOT_LOADED, NO_PERMISSION = 9, 4  # of nvml.h


@dataclass(frozen=True)
class Machine:
    """Resources of one machine. `memory_of` names what limits the memory: the machine, or a control group."""

    processors: int
    memory: float
    """Bytes; infinite if unknown."""
    memory_of: str = "this machine"
    gpus: int | None = 0
    """Number of GPUs that a process started now could use; None if only a GPU runtime can determine it."""
    gpu_memory: float = float("inf")
    """Memory of the smallest GPU in bytes; infinite if unknown."""


def measure() -> Machine:
    """Return the resources of this machine that child processes of this one may use."""
    memory, memory_of = memory_limit()
    gpus, gpu_memory = find_gpus()
    return Machine(processors(), memory, memory_of, gpus, gpu_memory)


def processors() -> int:
    """Return the number of processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_limit(*, proc: Path = PROC, groups: Path = GROUPS) -> tuple[float, str]:
    """Return the maximum bytes of memory for this process, and the name of what limits them: the machine, or the narrowest of the control
    groups that this process is in (versions 1 and 2)."""
    limits = {"this machine": _physical(proc)}
    limits |= {f"the control group {group}": limit for group, limit, _ in _memory_groups(proc, groups)}
    name = min(limits, key=lambda each: limits[each])
    return limits[name], name


def memory_left_in_groups(*, proc: Path = PROC, groups: Path = GROUPS) -> float:
    """Return how many bytes more this process could use before any of its control groups reaches its limit; infinite without a limit.
    Cached files that were not read for a while count as free, because the kernel drops them first."""
    return min((max(0.0, limit - used) for _, limit, used in _memory_groups(proc, groups)), default=float("inf"))


def _memory_groups(proc: Path, groups: Path) -> Iterator[tuple[Path, float, float]]:
    """Yield each control group of this process that limits memory, with its limit and its used bytes."""
    for line in _read(proc / "self/cgroup").splitlines():
        _, controllers, own = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, names = (groups / "memory", ("limit_in_bytes", "usage_in_bytes")) if controllers else (groups, ("max", "current"))
        inside = Path(own.lstrip("/"))
        for group in (root / inside, *(root / above for above in inside.parents)):
            limit, used = (_read(group / f"memory.{name}") for name in names)
            if limit.isdecimal():
                stat = dict(re.findall(r"^(\w+) (\d+)$", _read(group / "memory.stat"), re.MULTILINE))
                cached = stat.get(
                    "total_inactive_file", stat.get("inactive_file", 0)
                )  # version 1: `total_` counts groups below, too
                yield group, float(limit), float(used or 0) - float(cached)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _physical(proc: Path) -> float:
    for line in _read(proc / "meminfo").splitlines():
        if line.startswith("MemTotal:"):
            return float(line.split()[1]) * 1024
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (ValueError, OSError):
        return float("inf")


def find_gpus(environment: Mapping[str, str] = os.environ) -> tuple[int | None, float]:
    """Return the number of GPUs that a process started now could use (None if unknown), and the bytes of memory of the smallest
    one.

    NVML gives the figures, because unlike CUDA it does not change this process. CUDA_VISIBLE_DEVICES is interpreted as in CUDA.
    """
    memories = _nvml()
    if memories is None or (not memories and any(device.exists() for device in OTHER_DEVICES)):
        return None, float("inf")
    named = environment.get("CUDA_VISIBLE_DEVICES")
    chosen = memories if named is None else _visible(named.split(","), memories)
    return len(chosen), min(chosen, default=float("inf"))


def _visible(names: Iterable[str], memories: list[float]) -> list[float]:
    """Return the memory sizes of the GPUs with these names. As in CUDA, names that follow the first invalid name are ignored. A
    GPU named by its UUID gets an infinite size, because its size is not looked up."""
    chosen: list[float] = []
    for name in map(str.strip, names):
        if name.startswith(("GPU-", "MIG-")) and memories:
            chosen.append(float("inf"))
        elif name.isdecimal() and int(name) < len(memories):
            chosen.append(memories[int(name)])
        else:
            break
    return chosen


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def _nvml() -> list[float] | None:
    """Return the memory of each NVIDIA GPU in bytes, in CUDA's usual order; empty without a driver, None if the driver does not answer."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    if status := nvml.nvmlInit_v2():
        return [] if status in (DRIVER_NOT_LOADED, NO_PERMISSION) else None
    try:
        count = ctypes.c_uint()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return None
        return [_memory(nvml, number) for number in range(count.value)]
    finally:
        nvml.nvmlShutdown()


def _memory(nvml: ctypes.CDLL, number: int) -> float:
    handle, memory = ctypes.c_void_p(), _Memory()
    if nvml.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(handle)):
        return float("inf")
    return float("inf") if nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) else float(memory.total)
