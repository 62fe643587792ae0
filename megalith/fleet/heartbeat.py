"""Heartbeats: each rank writes its phase and step into its own slot of one shared file, and the supervisor reads all slots.

The supervisor and the ranks map the file into memory, so a heartbeat takes microseconds and needs no system call, lock or torch.
The last heartbeat of a killed rank can still be read.
"""

import mmap
import os
import struct
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

VARIABLE = "MEGALITH_HEARTBEATS"
READY = "ready"
SAVES_AGAIN = "saves again within "  # beginning of the phase of a rank that waits to save the last checkpoint; the seconds follow
SLOT_BYTES = 128  # fixed and padded: a slot may gain fields without moving the others
_PHASE_BYTES = 32

KINDS = ("own", "forward", "backward", "communication", "bubble", "data", "optimizer", "other")
"""Kinds of time in a rank's step. "own" is the rank's work without waiting for other ranks; the remaining kinds add up to the
step's time."""

_BASE = f"<Qdqd?{_PHASE_BYTES}s"  # count, wall-clock seconds, step, compute seconds, ready, phase
_LAYOUT = struct.Struct(f"{_BASE}qf{len(KINDS)}f")  # and of the last step that was measured: its number, bytes, seconds by kind
_EARLIER = struct.Struct(_BASE)  # of versions that did not write these
_CHECKSUM = struct.Struct("<I")
_USED = _LAYOUT.size + _CHECKSUM.size


@dataclass(frozen=True)
class Beat:
    """Newest heartbeat of a rank. `count`: number of heartbeats so far. `time`: seconds since the epoch. `step`: -1 before the
    first step. `ready`: whether the rank has reached phase `ready`, even if it is now in another phase. `compute`: seconds that
    the rank worked in the previous step, without waiting for other ranks; 0: not known. `measured`: number of the newest step for
    which `seconds` by kind (KINDS) and `memory` (the rank's peak bytes) are known; -1: none.
    """

    count: int = 0
    time: float = 0.0
    step: int = -1
    ready: bool = False
    phase: str = ""
    compute: float = 0.0
    measured: int = -1
    memory: float = 0.0
    seconds: tuple[float, ...] = ()

    @classmethod
    def of(cls, row: Sequence[Any]) -> "Beat":
        """Decode a heartbeat from a list of its fields, as read from JSON. Lists written by earlier versions have fewer
        fields."""
        return cls(*row[:8], *(tuple(one) for one in row[8:9]))


@dataclass(frozen=True)
class StepMeasurement:
    """Measurements of one step on a rank: its number, the rank's peak bytes, and the step's seconds by kind (KINDS)."""

    step: int
    memory: float
    seconds: Mapping[str, float]


def _pack(beat: Beat) -> bytes:
    phase = beat.phase.encode()[:_PHASE_BYTES]
    seconds = beat.seconds or (0.0,) * len(KINDS)
    fields = _LAYOUT.pack(beat.count, beat.time, beat.step, beat.compute, beat.ready, phase, beat.measured, beat.memory, *seconds)
    return fields + _CHECKSUM.pack(zlib.crc32(fields))


def _unpack(slot: bytes) -> Beat | None:
    """Return the heartbeat in a slot, even if an earlier version wrote it; None while it is being written."""
    for layout in (_LAYOUT, _EARLIER):
        fields, checksum = slot[: layout.size], slot[layout.size : layout.size + _CHECKSUM.size]
        count, at, step, compute, ready, phase, *rest = layout.unpack(fields)
        if count == 0:
            return Beat()
        if _CHECKSUM.unpack(checksum)[0] == zlib.crc32(fields):
            words = phase.rstrip(b"\0").decode(errors="replace")
            measured, memory, *seconds = rest or (-1, 0.0)
            return Beat(count, at, step, ready, words, compute, measured, memory, tuple(seconds) if measured >= 0 else ())
    return None


class Heartbeat:
    """A rank's own slot. Only the rank that owns the slot writes to it."""

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self._memory = memory
        self._offset = offset

    @classmethod
    def open(cls, path: Path, rank: int) -> "Heartbeat":
        """Open the slot of `rank` in a file made by `Heartbeats.create`. Raises ValueError if the file has no such slot."""
        with path.open("r+b") as file:
            slots = os.fstat(file.fileno()).st_size // SLOT_BYTES
            if not 0 <= rank < slots:
                raise ValueError(f"rank {rank} has no heartbeat slot: {path} has {slots} (ranks 0 to {slots - 1})")
            return cls(mmap.mmap(file.fileno(), slots * SLOT_BYTES), rank * SLOT_BYTES)

    @classmethod
    def find(cls, environment: Mapping[str, str] = os.environ) -> "Heartbeat":
        """Return this rank's slot from the environment; without a supervisor, a private slot that no process reads."""
        if VARIABLE not in environment:
            return cls(mmap.mmap(-1, SLOT_BYTES), 0)
        return cls.open(Path(environment[VARIABLE]), int(environment["RANK"]))

    def read(self) -> Beat:
        """Return this rank's newest beat."""
        return _unpack(self._memory[self._offset : self._offset + _USED]) or Beat()

    def beat(self, phase: str, step: int = -1, *, compute: float = 0.0, measured: StepMeasurement | None = None) -> None:
        """Write a heartbeat with the rank's phase and step, and with the figures of the newest `measured` step. The phase `ready`
        ends the start-up. Only 32 bytes of a phase's name are kept."""
        last = self.read()
        now = Beat(last.count + 1, time.time(), step, last.ready or phase == READY, phase, compute)
        if measured is not None:
            seconds = tuple(measured.seconds.get(kind, 0.0) for kind in KINDS)
            now = replace(now, measured=measured.step, memory=measured.memory, seconds=seconds)
        self._memory[self._offset : self._offset + _USED] = _pack(now)

    def again(self) -> None:
        """Write the newest heartbeat again, to show that the rank is alive."""
        last = self.read()
        self._memory[self._offset : self._offset + _USED] = _pack(replace(last, count=last.count + 1, time=time.time()))


class Heartbeats:
    """Heartbeats of all ranks, which the supervisor reads."""

    def __init__(self, path: Path, memory: mmap.mmap, ranks: int) -> None:
        self.path = path
        self._memory = memory
        self._last = [Beat()] * ranks

    @classmethod
    def create(cls, path: Path, ranks: int) -> "Heartbeats":
        """Create a file of empty slots. The new file replaces an older one by rename, so processes that still have the older file
        mapped cannot write to the new one."""
        fresh = path.with_name(path.name + ".new")
        descriptor = os.open(
            fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600
        )  # nobody else may write a rank's heartbeat
        with os.fdopen(descriptor, "wb") as file:
            file.write(bytes(ranks * SLOT_BYTES))
        fresh.rename(path)
        with path.open("r+b") as file:
            return cls(path, mmap.mmap(file.fileno(), ranks * SLOT_BYTES), ranks)

    def read(self) -> list[Beat]:
        """Return the last heartbeat of each rank, in rank order; while one is being written, return the rank's previous one."""
        for rank in range(len(self._last)):
            offset = rank * SLOT_BYTES
            beat = _unpack(self._memory[offset : offset + _USED])
            if beat is not None:
                self._last[rank] = beat
        return list(self._last)

    def close(self) -> None:
        """Unmap the file, but keep it as evidence of each rank's last action."""
        self._memory.close()
