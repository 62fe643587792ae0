"""Records the time breakdown of each rank and step, from the heartbeats, as a pyramid file in the run folder, for `megalith watch`.

A value is one byte: the logarithm of a rank's seconds divided by the median of all ranks' working times in that step, with an
error below 2 %. Memory is stored in the same way, divided by the median of all ranks' memory.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megalith import disk, epochs, pyramid
from megalith.fleet.heartbeat import KINDS, Beat

FOLDER = "ranks/times"
ROWS = (*KINDS, "memory")
"""Rows of the record of a step, each with one value per rank."""

MINIMUM, MAXIMUM = 2.0**-9, 2.0**3
"""Multiples of the median for which the smallest and the largest code stand; values outside this range are clamped."""

CODES, OCTAVES = 254, 12.0  # codes, and the powers of two that they are spread over


def encode(shares: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Encode multiples of the median as codes from 1 to 255, and unknown values (NaN) as 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = (np.log2(np.clip(shares, MINIMUM, MAXIMUM)) + 9) * CODES / OCTAVES + 1
    return np.where(np.isfinite(shares), np.rint(np.nan_to_num(scaled)), 0).astype(np.uint8)


def decode(codes: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Decode codes to multiples of the median; NaN for unknown values."""
    return np.where(codes > 0, 2.0 ** ((codes.astype(np.float64) - 1) * OCTAVES / CODES - 9), np.nan)


def block(row: str, ranks: int) -> slice:
    """Return the slice of a record that a row of ROWS occupies."""
    at = ROWS.index(row)
    return slice(at * ranks, (at + 1) * ranks)


class Times:
    """Writes the record of step n, after those of earlier steps, once all ranks have reported step n or a rank has reported step n + 2,
    because polling misses some heartbeats. If the disk is full or unavailable, only the record is lost."""

    def __init__(self, run_dir: Path, ranks: int, *, epoch: int = 0) -> None:
        """`epoch`: the number in the file names of the run folder's owner (`megalith.epochs`)."""
        self._run_dir, self._folder, self._ranks = run_dir, run_dir / epochs.name(FOLDER, epoch), ranks
        self._writer: pyramid.Writer | None = None
        self._counts = [0] * ranks
        self._open: dict[int, NDArray[np.float64]] = {}  # step -> rows by ranks; NaN: not told yet
        self._written = -1

    def note(self, beats: Sequence[Beat]) -> None:
        """Record the newest beats of the ranks."""
        news = False
        for rank, beat in enumerate(beats):
            if beat.count != self._counts[rank]:
                self._counts[rank] = beat.count
                if beat.measured > self._written and len(beat.seconds) == len(KINDS):
                    news = True
                    self._of(beat.measured)[:, rank] = (*beat.seconds, beat.memory)
        if not news:
            return
        newest = max(self._open)
        for step in sorted(self._open):
            if step >= newest - 1 and np.isnan(self._open[step][0]).any():
                break  # a later step waits for it: records are read in the order of their steps
            self._write(step)

    def _of(self, step: int) -> NDArray[np.float64]:
        return self._open.setdefault(step, np.full((len(ROWS), self._ranks), np.nan))

    def _write(self, step: int) -> None:
        rows = self._open.pop(step)
        self._written = max(self._written, step)
        own, memory = np.nanmedian(rows[0]), np.nanmedian(rows[-1])
        if not own > 0:
            return
        shares = rows / own
        shares[-1] = rows[-1] / memory if memory > 0 else np.nan
        with disk.if_available(self._folder):
            if self._writer is None:
                disk.make_within(self._run_dir, self._folder)
                self._writer = pyramid.Writer(self._folder, kind="codes", width=len(ROWS) * self._ranks)
            self._writer.append(step + 1, encode(shares).reshape(-1), bases=(float(own), float(memory)))

    def close(self) -> None:
        """Write incomplete records too."""
        for step in sorted(self._open):
            self._write(step)
        if self._writer is not None:
            self._writer.close()
