"""Small checks of a machine's fitness for training, which need neither torch nor a GPU. Each check measures something, and a pure
function judges the measurement.

`megalith doctor` runs these checks; `admission.py` chooses which of them run before a start and before a quarantined node
returns. Checks of GPUs are in `gpus.py`. Checks that need torch (a burn-in of matrix products, a collective over the ranks) are
in `prove/doctor.py`. All checks return findings.
"""

import contextlib
import ctypes
import errno
import os
import resource
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from megalith.machine.capacity import memory_left_in_groups

Verdict = Literal["ok", "warn", "fail"]
MIB, GIB = 2.0**20, 2.0**30
_ORDER: dict[Verdict, int] = {"ok": 0, "warn": 1, "fail": 2}


@dataclass(frozen=True)
class Finding:
    """Result of one check. `value` and `limit` are texts with units; `way_out` is empty if the verdict is "ok"."""

    check: str
    verdict: Verdict
    value: str
    limit: str
    way_out: str = ""

    def __str__(self) -> str:
        tail = f". {self.way_out}" if self.way_out else ""
        return f"{self.verdict:4} {self.check}: {self.value} (limit: {self.limit}){tail}"

    def as_json(self) -> dict[str, Any]:
        """Return the finding as a JSON object."""
        return asdict(self)


@dataclass(frozen=True)
class Needs:
    """A run's requirements on a machine, in bytes, bytes per second, numbers and seconds. The defaults are the recommended
    minimum for any run."""

    memory: float = 2 * GIB
    disk: float = 2 * GIB
    disk_speed: float = 20 * MIB
    shared_memory: float = 64 * MIB
    loopback: float = 100 * MIB
    descriptors: int = 1024
    clock: float = 0.5


def doctor(folder: Path, *, needs: Needs | None = None) -> list[Finding]:
    """Run all checks of this machine; `folder` is where the run will write (`disk_speed` includes `writable`). Takes about a second."""
    asked = needs or Needs()
    return [
        memory(asked.memory),
        disk_space(folder, asked.disk),
        disk_speed(folder, asked.disk_speed),
        shared_memory(asked.shared_memory),
        descriptors(asked.descriptors),
        clock(asked.clock),
        clock_synchronised(),
        loopback(asked.loopback),
    ]


def worst(findings: Iterable[Finding]) -> Verdict:
    """Return the worst verdict, or "ok" if there are no findings."""
    gravest: Verdict = "ok"
    for finding in findings:
        if _ORDER[finding.verdict] > _ORDER[gravest]:
            gravest = finding.verdict
    return gravest


def at_least(
    check: str, value: float, limit: float, *, form: Callable[[float], str], way_out: str, margin: float = 1.5
) -> Finding:
    """Judge a value that should be large: it fails below `limit`, and it is a warning below `margin` times `limit`."""
    verdict: Verdict = "fail" if value < limit else "warn" if value < limit * margin else "ok"
    return Finding(check, verdict, form(value), f"at least {form(limit)}", "" if verdict == "ok" else way_out)


def show_size(value: float) -> str:
    """Return a number of bytes as a text."""
    return f"{value / GIB:.3g} GiB" if value >= GIB else f"{value / MIB:.3g} MiB"


def show_rate(value: float) -> str:
    """Return a number of bytes a second as a text."""
    return f"{show_size(value)}/s"


def memory(limit: float) -> Finding:
    """Check the memory that is available without swapping on this machine and in the control groups of this process."""
    way_out = "Stop other programs on this machine, or train with fewer ranks, a smaller microbatch or more recomputation"
    return at_least("memory", min(_available(), memory_left_in_groups()), limit, form=show_size, way_out=way_out)


def _available() -> float:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        return next(float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


UNSEEN = "Check that the file system of this folder is mounted and responds, or use another folder"


def disk_space(folder: Path, limit: float) -> Finding:
    """Check the free space where the run will write. The check fails if the folder cannot be accessed."""
    try:
        free = shutil.disk_usage(_existing(folder)).free
    except OSError as error:
        return Finding(
            "disk space", "fail", f"{folder} cannot be accessed: {error.strerror}", f"at least {show_size(limit)}", UNSEEN
        )
    way_out = f"Free space in {folder}, use another run folder, or keep fewer checkpoints (checkpoint.keep)"
    return at_least("disk space", free, limit, form=show_size, way_out=way_out)


def _existing(folder: Path) -> Path:
    found = folder.resolve()
    while not found.exists():
        found = found.parent
    return found


def writable(folder: Path) -> Finding:
    """Check that a file can be made where the run will write."""
    try:
        path = _existing(folder) / f".doctor-{os.getpid()}"
        path.write_bytes(b"here")
        path.unlink()
    except OSError as error:
        return Finding(
            "run folder", "fail", f"{folder} cannot be written: {error.strerror}", "can be written", "Use another folder"
        )
    return Finding("run folder", "ok", "can be written", "can be written")


def disk_speed(folder: Path, limit: float, *, size: int = 32 << 20) -> Finding:
    """Check the speed at which a file is written and flushed. The check fails if the folder is not writable."""
    try:
        seconds = _write(_existing(folder) / f".doctor-{os.getpid()}", size)
    except OSError as error:
        return Finding(
            "disk speed", "fail", f"cannot be written: {error.strerror}", f"at least {show_rate(limit)}", "Use another folder"
        )
    way_out = f"{folder} is slow, so saving will take long. Use a local disk or a faster store, or save less often"
    return at_least("disk speed", size / seconds, limit, form=show_rate, way_out=way_out)


def _write(path: Path, size: int) -> float:
    """Return the seconds to write and flush `size` bytes to a file, which is then removed. Raises OSError."""
    block = os.urandom(1 << 20)  # no file system can compress it away
    try:
        began = time.perf_counter()
        with path.open("wb", buffering=0) as file:
            for _ in range(size >> 20):
                file.write(block)
            os.fsync(file.fileno())
        return time.perf_counter() - began
    finally:
        path.unlink(missing_ok=True)


def shared_memory(limit: float, folder: Path = Path("/dev/shm")) -> Finding:
    """Check the free space of /dev/shm, for copies of the state and for files of NCCL and gloo."""
    if not folder.is_dir():
        return Finding(
            "shared memory", "warn", f"there is no {folder}", f"at least {show_size(limit)}", "Set fleet.memory_every = 0"
        )
    way_out = f"Make {folder} larger (`mount -o remount,size=...`; in a container, --shm-size or an emptyDir of medium Memory)"
    return at_least("shared memory", shutil.disk_usage(folder).free, limit, form=show_size, way_out=way_out)


def descriptors(limit: int) -> Finding:
    """Check the number of files and sockets that a process may open; every rank needs one socket for each peer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (sys.maxsize if value == resource.RLIM_INFINITY else value for value in (soft, hard))
    way_out = f"`ulimit -n {limit}`" if hard >= limit else f"Raise the hard limit ({hard:,}) in limits.conf or the service's unit"
    return at_least("file descriptors", soft, limit, form=lambda value: f"{value:,.0f}", way_out=way_out, margin=1.0)


def clock(limit: float, *, seconds: float = 0.2, now: Callable[[], float] = time.time) -> Finding:
    """Check that the wall clock advances like the monotonic clock, because a clock that jumps makes timelines wrong."""
    wall, steady = now(), time.monotonic()
    time.sleep(seconds)
    off = abs((now() - wall) - (time.monotonic() - steady))
    verdict: Verdict = "fail" if off > limit else "warn" if off > limit / 10 else "ok"
    way_out = "" if verdict == "ok" else "Something sets the clock in steps. Configure chrony or ntpd to slew it"
    return Finding(
        "clock", verdict, f"wall clock {off * 1e3:.2g} ms off after {seconds:g} s", f"at most {limit * 1e3:g} ms", way_out
    )


def clock_synchronised() -> Finding:
    """Check that the kernel reports a synchronised clock, because times of several nodes are compared."""
    name, limit = "clock synchronised", "kept by NTP or PTP"
    status = _clock_status()
    if status is None:
        return Finding(name, "ok", "the kernel does not report whether the clock is synchronised", limit)
    if status == 5:  # TIME_ERROR of adjtimex(2)
        return Finding(
            name,
            "warn",
            "no",
            limit,
            "Start chrony or ntpd, because times of nodes with unsynchronised clocks cannot be compared",
        )
    return Finding(name, "ok", "yes", limit)


def _clock_status() -> int | None:
    """Return the status of adjtimex(2), called without changes; None if it does not exist or is forbidden."""
    if sys.platform != "linux":
        return None
    buffer = ctypes.create_string_buffer(512)  # more than struct timex takes on any machine; zero modes only read
    status = ctypes.CDLL(None, use_errno=True).adjtimex(buffer)
    return None if status < 0 else status


def loopback(limit: float, *, size: int = 64 << 20, patience: float = 10.0, timed: bool = True) -> Finding:
    """Check the speed between two sockets through this machine's network stack, which gloo uses on one machine. With
    `timed=False`, a loopback that is slow, or does not answer for `patience` seconds, is only a warning; a loopback that does not
    work still fails.
    """
    way_out = "The machine is busy, or its loopback is filtered: look for other processes and firewall rules"
    slow: Verdict = "fail" if timed else "warn"
    try:
        speed = _send_to_yourself(size, patience)
    except TimeoutError:
        return Finding("loopback", slow, f"nothing arrived within {patience:g} s", f"at least {show_rate(limit)}", way_out)
    except OSError as error:
        return Finding("loopback", "fail", f"{error.strerror}", f"at least {show_rate(limit)}", "Bring the loopback interface up")
    found = at_least("loopback", speed, limit, form=show_rate, way_out=way_out)
    return replace(found, verdict=slow) if found.verdict == "fail" else found


def _send_to_yourself(size: int, patience: float) -> float:
    """Return the bytes a second over TCP on 127.0.0.1. Raises OSError; TimeoutError if nothing arrives for `patience` seconds."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(patience)
        client = socket.create_connection(server.getsockname(), timeout=patience)
        with client, server.accept()[0] as other:
            other.settimeout(patience)
            sender = threading.Thread(target=_send, args=(client, size), daemon=True)
            began = time.perf_counter()
            sender.start()
            left, buffer = size, bytearray(1 << 20)
            while left > 0 and (got := other.recv_into(buffer)):
                left -= got
            seconds = time.perf_counter() - began
            sender.join(timeout=patience)
    if left > 0:
        raise ConnectionAbortedError(errno.ECONNABORTED, "the connection ended before all bytes had arrived")
    return size / seconds


def _send(client: socket.socket, size: int) -> None:
    block = bytes(1 << 20)
    with contextlib.suppress(OSError):  # the receiver sees that less arrives
        for _ in range(size >> 20):
            client.sendall(block)
        client.shutdown(socket.SHUT_WR)
