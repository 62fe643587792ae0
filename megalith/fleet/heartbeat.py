"""Signs of life: each rank writes its phase and step into its own slot of one shared file, and the supervisor reads all slots.

The file is mapped into memory on both sides, so a beat costs microseconds, needs no system call, no lock and no torch, and what a
rank wrote last can still be read after it was killed.
"""

import mmap
import os
import struct
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "MEGALITH_HEARTBEATS"
READY = "ready"
SLOT_BYTES = 128  # fixed and padded: a slot may gain fields without moving the others
_PHASE_BYTES = 32
_LAYOUT = struct.Struct(f"<Qdqd?{_PHASE_BYTES}s")  # count, wall-clock seconds, step, compute seconds, ready, phase
_CHECKSUM = struct.Struct("<I")
_USED = _LAYOUT.size + _CHECKSUM.size


@dataclass(frozen=True)
class Beat:
    """What a rank last said. `count` beats so far (0: none), `time` seconds since the epoch, `step` -1 before the first step.

    `ready` is whether the rank ever reached phase `ready`, whatever its phase is now. `compute`: seconds of its own work in the step
    before, without any waiting for others; 0: not known.
    """

    count: int = 0
    time: float = 0.0
    step: int = -1
    ready: bool = False
    phase: str = ""
    compute: float = 0.0


def _pack(beat: Beat) -> bytes:
    phase = beat.phase.encode()[:_PHASE_BYTES]
    fields = _LAYOUT.pack(beat.count, beat.time, beat.step, beat.compute, beat.ready, phase)
    return fields + _CHECKSUM.pack(zlib.crc32(fields))


def _unpack(slot: bytes) -> Beat | None:
    fields, checksum = slot[: _LAYOUT.size], slot[_LAYOUT.size :]
    count, at, step, compute, ready, phase = _LAYOUT.unpack(fields)
    if count == 0:
        return Beat()
    if _CHECKSUM.unpack(checksum)[0] != zlib.crc32(fields):
        return None
    return Beat(count, at, step, ready, phase.rstrip(b"\0").decode(errors="replace"), compute)


class Heartbeat:
    """A rank's own slot. Only that rank writes to it."""

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self._memory = memory
        self._offset = offset

    @classmethod
    def open(cls, path: Path, rank: int) -> "Heartbeat":
        """The slot of `rank` in a file made by `Heartbeats.create`. Raises ValueError when the file has no such slot."""
        with path.open("r+b") as file:
            slots = os.fstat(file.fileno()).st_size // SLOT_BYTES
            if not 0 <= rank < slots:
                raise ValueError(f"rank {rank} has no heartbeat slot: {path} has {slots} (ranks 0 to {slots - 1})")
            return cls(mmap.mmap(file.fileno(), slots * SLOT_BYTES), rank * SLOT_BYTES)

    @classmethod
    def find(cls, environment: Mapping[str, str] = os.environ) -> "Heartbeat":
        """This rank's slot as our supervisor put it in the environment; elsewhere a private slot that nobody reads."""
        if VARIABLE not in environment:
            return cls(mmap.mmap(-1, SLOT_BYTES), 0)
        return cls.open(Path(environment[VARIABLE]), int(environment["RANK"]))

    def read(self) -> Beat:
        """What this rank last wrote."""
        return _unpack(self._memory[self._offset : self._offset + _USED]) or Beat()

    def beat(self, phase: str, step: int = -1, *, compute: float = 0.0) -> None:
        """Say "alive, in this phase of this step". The phase `ready` ends the start-up; at most 32 bytes of a name are kept."""
        last = self.read()
        now = Beat(last.count + 1, time.time(), step, last.ready or phase == READY, phase, compute)
        self._memory[self._offset : self._offset + _USED] = _pack(now)


class Heartbeats:
    """All slots, read by the supervisor."""

    def __init__(self, path: Path, memory: mmap.mmap, ranks: int) -> None:
        self.path = path
        self._memory = memory
        self._last = [Beat()] * ranks

    @classmethod
    def create(cls, path: Path, ranks: int) -> "Heartbeats":
        """A new file of empty slots. It replaces an older one by rename: a process that still holds that one disturbs nobody."""
        fresh = path.with_name(path.name + ".new")
        descriptor = os.open(
            fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600
        )  # nobody else may speak for a rank
        with os.fdopen(descriptor, "wb") as file:
            file.write(bytes(ranks * SLOT_BYTES))
        fresh.rename(path)
        with path.open("r+b") as file:
            return cls(path, mmap.mmap(file.fileno(), ranks * SLOT_BYTES), ranks)

    def read(self) -> list[Beat]:
        """The last beat of each rank, in rank order. A slot that is being written just now gives the beat before."""
        for rank in range(len(self._last)):
            offset = rank * SLOT_BYTES
            beat = _unpack(self._memory[offset : offset + _USED])
            if beat is not None:
                self._last[rank] = beat
        return list(self._last)

    def close(self) -> None:
        """Unmap the file; it stays, as evidence of what each rank did last."""
        self._memory.close()
