"""Injects a campaign's faults into the files with a rank's state. The faults hit this process alone: its files have no names."""

import os
import time
from collections.abc import Callable
from contextlib import closing

from torch import Tensor

from megalith.fleet.injection import Injection
from megalith.train.offload.home import Disk
from megalith.train.offload.slots import Slots
from megalith.train.state import State

SLOWER, AT_MOST = 0.02, 0.25
"""Seconds by which a slow disk prolongs each read and each write of a chunk, and all of them together: less than a hang's silence."""


def hurt(state: State, one: Injection) -> None:
    """Inject a fault into the files of a rank's state, when no update reads or writes them."""
    state.complete()
    if not isinstance(state.home, Disk):
        print(f"fault {one.number}: no {one.kind} after step {one.step}, because this rank has no state on disk", flush=True)
        return
    slots = state.home.slots
    chunk = int(one.place * len(slots.layout.rooms))
    FAULTS[one.kind](slots, chunk, one)
    print(f"fault {one.number}: {one.kind} after step {one.step}, chunk {chunk} ({slots.layout.names[chunk]})", flush=True)


def _tear(slots: Slots, chunk: int, one: Injection) -> None:
    """Lose the end of a chunk, as if only its beginning had been written. The lost bytes contain half of its last tensor at least: between
    small tensors there is only padding. Other bytes than zeros take their place, because moments may be zeros."""
    layout = slots.layout
    last, size = layout.spans(chunk)[-1], layout.segments[chunk][-1]
    begin, end = min(layout.rooms[chunk] // 2, last.start + size // 2), last.start + size
    _overwrite(slots, chunk, begin, b"\xff" * (end - begin))


def _alter(slots: Slots, chunk: int, one: Injection) -> None:
    """Flip a bit of a chunk in use."""
    size = slots.layout.segments[chunk][0]
    at = int(one.place * size)
    with closing(_Bytes(slots, chunk)) as file:
        file.write(at, bytes([file.read(at) ^ 1]))


def _overwrite(slots: Slots, chunk: int, start: int, octets: bytes) -> None:
    with closing(_Bytes(slots, chunk)) as file:
        file.write(start, octets)


class _Bytes:
    """The bytes of a chunk's slot in use, through a descriptor whose reads and writes need not be aligned."""

    def __init__(self, slots: Slots, chunk: int) -> None:
        self._start = slots.layout.starts[chunk]
        self._file = os.open(f"/proc/self/fd/{slots.file_of(chunk).descriptor}", os.O_RDWR)

    def read(self, at: int) -> int:
        return os.pread(self._file, 1, self._start + at)[0]

    def write(self, at: int, octets: bytes) -> None:
        os.pwrite(self._file, octets, self._start + at)
        os.fsync(self._file)  # reads of the rank bypass the page cache

    def close(self) -> None:
        os.close(self._file)


def _fill(slots: Slots, chunk: int, one: Injection) -> None:
    """Put a device that is always full in the place of the file that the next update writes."""
    full = os.open("/dev/full", os.O_RDWR)
    os.dup2(full, slots.unused(chunk).descriptor)
    os.close(full)


def _slow_down(slots: Slots, chunk: int, one: Injection) -> None:
    """Prolong the next reads and writes of chunks."""
    read, write, left = slots.read, slots.write, [int(AT_MOST / SLOWER)]

    def wait() -> None:
        if left[0] > 0:
            left[0] -= 1
            time.sleep(SLOWER)

    def slow_read(chunk: int, into: Tensor, segment: int | None = None) -> None:
        wait()
        read(chunk, into, segment)

    def slow_write(chunk: int, body: Tensor, *, counts: bool = False) -> None:
        wait()
        write(chunk, body, counts=counts)

    slots.read, slots.write = slow_read, slow_write


FAULTS: dict[str, Callable[[Slots, int, Injection], None]] = {
    "torn-chunk": _tear,
    "altered-chunk": _alter,
    "state-disk-full": _fill,
    "slow-disk": _slow_down,
}
