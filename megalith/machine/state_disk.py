"""Checks of a folder in which ranks keep state or activations: is it there, can it be written past the page cache, does it have room, and
how fast is it? No torch."""

import errno
import fcntl
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

from megalith.machine.health import Finding, at_least, show_rate, show_size

SIZE, BLOCK = 64 << 20, 4 << 20
"""Bytes that are read while as many are written, and bytes of each read and write."""
SLOW = 0.9
"""A disk is slow if it reaches less than this share of the cluster file's rate."""


def check_folder(key: str, folder: Path, *, room: float, rate: float | None, size: int = SIZE) -> list[Finding]:
    """Check the folder that `key` of the plan names. `room`: the bytes that the ranks of this machine need there; `rate`: the bytes a
    second that the cluster file promises; None: it promises nothing."""
    try:
        return _checked(key, folder, room=room, rate=rate, size=size)
    except OSError as error:  # such as a stale mount, or a folder inside one that may not be read
        return [_unusable(key, f"{folder} cannot be accessed: {error.strerror}")]


def _checked(key: str, folder: Path, *, room: float, rate: float | None, size: int) -> list[Finding]:
    there = folder.absolute()
    there = next(one for one in (there, *there.parents) if one.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        wrong = "is not writable" if there.is_dir() else "is not a folder"
        return [_unusable(key, f"{there} {wrong}")]
    found = [_exists(key, folder, there), _space(key, there, room)]
    if shutil.disk_usage(there).free < 2 * size:
        return [
            *found,
            Finding(f"{key}, rate", "fail", "not measured: no room for the measurement", f"{show_size(2 * size)} free", FREE),
        ]
    try:
        measured, direct = measure(there, size=size)
    except OSError as error:
        reason = f"cannot be measured: {error.strerror}"
        return [*found, Finding(f"{key}, rate", "fail", reason, "files can be written and read", f"Set {key} to another folder")]
    return [*found, _direct(key, direct), _rate(key, measured, rate)]


FREE = "Free space on this disk, or name a folder on another disk"


def _unusable(key: str, value: str) -> Finding:
    return Finding(key, "fail", value, "a writable folder", f"Set {key} to a folder on this machine's own disk")


def _exists(key: str, folder: Path, there: Path) -> Finding:
    limit = "exists and is writable"
    if there == folder.absolute():
        return Finding(key, "ok", f"{folder} exists and is writable", limit)
    way_out = "Make the folder, or mount its disk: otherwise the files go to the disk of the parent folder"
    return Finding(key, "warn", f"{folder} does not exist, so the run would create it in {there}", limit, way_out)


def _space(key: str, there: Path, room: float) -> Finding:
    return at_least(f"{key}, free space", shutil.disk_usage(there).free, room, form=show_size, way_out=FREE, margin=1.0)


def _direct(key: str, direct: bool) -> Finding:
    name, limit = f"{key}, direct I/O", "reads and writes bypass the page cache"
    if direct:
        return Finding(name, "ok", "works", limit)
    way_out = "Updates of state on disk are slower through the page cache. Name a folder on another file system"
    return Finding(name, "warn", "the file system has none", limit, way_out)


def _rate(key: str, measured: float, rate: float | None) -> Finding:
    name, value = f"{key}, rate", f"{show_rate(measured)} read, and as much written at the same time"
    if rate is None:
        return Finding(name, "ok", value, "no limit: host.disk_bandwidth of a cluster file would be one")
    limit = f"at least {show_rate(SLOW * rate)}: {SLOW:.0%} of host.disk_bandwidth in the cluster file".replace("%", " %")
    if measured >= SLOW * rate:
        return Finding(name, "ok", value, limit)
    way_out = "Predictions are too fast: correct host.disk_bandwidth. Or find out what else uses this disk"
    return Finding(name, "warn", value, limit, way_out)


def measure(folder: Path, *, size: int = SIZE) -> tuple[float, bool]:
    """Return the bytes a second that are read from one file while as many are written to another one, and True if this bypasses the page
    cache. Raises OSError."""
    with tempfile.TemporaryFile(dir=folder, buffering=0) as old, tempfile.TemporaryFile(dir=folder, buffering=0) as new:
        direct = _bypass(old) and _bypass(new)
        for file in (old, new):  # as the trainer does
            os.posix_fallocate(file.fileno(), 0, size)
        _move(os.pwritev, old, size)
        os.fdatasync(old.fileno())
        os.posix_fadvise(old.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        with ThreadPoolExecutor(2) as pool:
            moving = [pool.submit(_move, *what, size) for what in ((os.preadv, old), (os.pwritev, new))]
            for each in moving:
                each.result()
        os.fdatasync(new.fileno())
        return size / (time.perf_counter() - began), direct


def _bypass(file: IO[bytes]) -> bool:
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True


def _move(call: Callable[..., int], file: IO[bytes], size: int) -> None:
    with mmap.mmap(-1, BLOCK) as memory:  # it begins at a page, as direct I/O needs
        memory[:] = os.urandom(1 << 16) * (BLOCK >> 16)
        for start in range(0, size, BLOCK):
            with memoryview(memory) as view, view[: min(BLOCK, size - start)] as part:
                if call(file.fileno(), [part], start) < len(part):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
