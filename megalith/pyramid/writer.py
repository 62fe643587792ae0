"""Writer of a pyramid."""

import contextlib
import os
import time as clock
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megalith.pyramid.format import FAN, FILE, HEAD, MAGIC, SUM, TYPES, Kind, name_of, record_bytes, segments

LEVELS = 13  # FAN ** 12 is 16 million steps: the coarsest record covers so many
KEEP = 64 << 20  # bytes of a level, all pieces together
MINIMUM = 512  # records of a level that are kept in any case
SEGMENTS = 8  # files into which the kept bytes of a level are cut: the oldest one goes


@dataclass
class _Sum:
    """A record of a coarser level that does not have all its steps yet."""

    first: int
    last: int
    steps: int
    records: int
    time: float
    bases: NDArray[np.float64]
    low: NDArray
    high: NDArray
    total: NDArray[np.float64] | None
    known: NDArray[np.int64] | None


class Writer:
    """Adds one new piece to the table in a folder; each call of `append` adds the values of one training step to the piece. Only one
    process may write at a time."""

    def __init__(self, folder: Path, *, kind: Kind, width: int, keep: int = KEEP) -> None:
        """`width`: the number of values of a step. `keep`: bytes of each level that are kept, all pieces together. Raises OSError if
        the folder cannot be created or read; its parent folders must exist."""
        folder.mkdir(exist_ok=True)
        self._folder, self._kind, self._width, self._keep = folder, kind, width, keep
        self._type = TYPES[kind]
        before = segments(folder)
        self._piece = 1 + max((segment.piece for segment in before), default=-1)
        self._done: dict[int, list[tuple[str, int]]] = {level: [] for level in range(LEVELS)}
        """Level -> paths and sizes of its complete files, oldest first. Runs that restarted often have thousands of files, so they are
        listed once."""
        for segment in before:
            self._done.setdefault(segment.level, []).append((segment.path, segment.size))
        self._files: dict[int, tuple[int, int, str]] = {}  # level -> descriptor, records in it, path
        self._open: dict[int, _Sum] = {}

    def append(self, step: int, values: NDArray, *, time: float | None = None, bases: tuple[float, float] = (0.0, 0.0)) -> None:
        """Append the values of a step, which must be later than the step before. `bases`: reference numbers of the values; coarser
        records have the average of their steps' bases. If the write fails, OSError is raised: this step is lost, but later steps
        can be appended.
        """
        row = np.ascontiguousarray(values, dtype=self._type)
        assert row.shape == (self._width,), (row.shape, self._width)
        at = clock.time() if time is None else time
        self._write(0, step, step, 1, at, bases, [row])
        self._feed(1, step, step, 1, at, np.array(bases), row, row, None, None)

    def _feed(
        self,
        level: int,
        first: int,
        last: int,
        steps: int,
        time: float,
        bases: NDArray[np.float64],
        low: NDArray,
        high: NDArray,
        total: NDArray[np.float64] | None,
        known: NDArray[np.int64] | None,
    ) -> None:
        if level >= LEVELS:
            return
        if self._kind == "numbers" and total is None:
            known = np.isfinite(low).astype(np.int64)
            total = np.where(known > 0, low, 0.0).astype(np.float64)
        held = self._open.get(level)
        if held is None:
            held = self._open[level] = _Sum(first, last, 0, 0, time, np.zeros(2), low.copy(), high.copy(), None, None)
            held.total, held.known = (None, None) if total is None or known is None else (total.copy(), known.copy())
        else:
            held.low, held.high = self._least(held.low, low), np.fmax(held.high, high)
            if total is not None and known is not None and held.total is not None and held.known is not None:
                held.total, held.known = held.total + total, held.known + known
        held.last, held.time = last, time
        held.steps, held.records, held.bases = held.steps + steps, held.records + 1, held.bases + bases * steps
        if held.records == FAN:
            self._end(level)

    def _least(self, one: NDArray, other: NDArray) -> NDArray:
        if self._kind == "numbers":
            return np.fmin(one, other)
        return np.minimum(one - np.uint8(1), other - np.uint8(1)) + np.uint8(1)  # 0, a missing value, counts as the most

    def _end(self, level: int, *, repeats: bool = True) -> None:
        """End the open record of a level, and add it to the next level's. `repeats`: write it even if it has one finer record only."""
        held = self._open.pop(level)
        arrays, bases = [held.low, held.high], held.bases / held.steps
        if held.total is not None and held.known is not None:
            with np.errstate(invalid="ignore"):
                arrays.append((held.total / held.known).astype(self._type))
        if repeats or held.records > 1:
            self._write(level, held.first, held.last, held.steps, held.time, (float(bases[0]), float(bases[1])), arrays)
        self._feed(level + 1, held.first, held.last, held.steps, held.time, bases, held.low, held.high, held.total, held.known)

    def _write(
        self, level: int, first: int, last: int, steps: int, time: float, bases: tuple[float, float], arrays: Sequence[NDArray]
    ) -> None:
        head = HEAD.pack(first, last, steps, time, *bases)
        record = head + SUM.pack(zlib.crc32(head)) + b"".join(array.tobytes() for array in arrays)
        if level in self._files and self._files[level][1] >= self._most(level):
            self._end_file(level)
        if level not in self._files:
            self._files[level] = self._begin(level, first)
        file, records, path = self._files[level]
        try:
            if os.write(file, record) < len(record):
                raise OSError(28, os.strerror(28))
        except OSError:
            self._end_file(level)  # later records go to another file
            raise
        self._files[level] = file, records + 1, path

    def _end_file(self, level: int) -> None:
        file, _, path = self._files.pop(level)
        self._done[level].append((path, os.fstat(file).st_size))
        os.close(file)

    def _most(self, level: int) -> int:
        return max(self._keep // SEGMENTS // record_bytes(self._kind, self._width, level), MINIMUM // SEGMENTS)

    def _begin(self, level: int, first: int) -> tuple[int, int, str]:
        """Begin a file, and remove the level's oldest files if the level has more bytes than it may keep. Return the descriptor, the number
        of records, and the path."""
        room = max(self._keep, MINIMUM * record_bytes(self._kind, self._width, level))
        files, kept = self._done[level], list[tuple[str, int]]()
        while files and room >= files[-1][1]:
            room -= files[-1][1]
            kept.insert(0, files.pop())
        for path, _ in files:
            Path(path).unlink(missing_ok=True)
        self._done[level] = kept
        path = str(self._folder / name_of(self._piece, level, first))
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC, 0o644)
        os.write(file, FILE.pack(MAGIC, list(TYPES).index(self._kind), level, self._width))
        return file, 0, path

    def close(self) -> None:
        """Write the incomplete records, which then cover fewer steps, and close the files. An incomplete record that would repeat a
        single finer one is only written at the coarsest level, whose records outlast all others. No OSError is raised."""
        with contextlib.suppress(OSError):
            for level in range(1, LEVELS):
                if level in self._open:
                    self._end(level, repeats=level == LEVELS - 1)
        for file, *_ in self._files.values():
            os.close(file)
        self._files.clear()
