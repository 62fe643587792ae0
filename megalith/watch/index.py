"""Index of a run's log, so that watchers need not read a log of ten million steps: a pyramid of the steps' numbers, and a file with all
other events. The training process keeps the index in the run folder; a watcher indexes newer lines in a temporary folder."""

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalith import disk, epochs, events, pyramid
from megalith.events import Event, Holding, RunStarted, Step

FOLDER = "ranks/steps"
NOTES, HOLDINGS = "notes.jsonl", "holdings.jsonl"

PARTS = ("forward", "backward", "communication", "bubble", "data", "optimizer", "other")
VALUES = (
    "loss", "grad_norm", "lr", "seconds", "tokens_per_second", "mfu", "tokens_seen", *PARTS, "resident", "peak", "max_load", "entropy",
    "dropped",
)  # fmt: skip
"""Names of the numbers of a step that the index keeps."""

AT_ONCE = 4 << 20  # bytes of a log that are read in one go
LONGEST = 64 << 20  # bytes of one line; a longer one is no event


def numbers(step: Step) -> NDArray[np.float32]:
    """Return the numbers of a step in the order of VALUES; NaN for missing ones."""
    known: dict[str, float | None] = {
        **{name: getattr(step, name) for name in VALUES[:7]},
        **{name: step.breakdown.get(name, 0.0) for name in PARTS},
        **{name: step.memory.get(name) for name in ("resident", "peak")},
        **{name: step.experts.get(name) for name in ("max_load", "entropy", "dropped")},
    }
    with np.errstate(over="ignore"):
        return np.array([math.nan if known[name] is None else known[name] for name in VALUES], dtype=np.float32)


class Index:
    """Index of the log of `run_dir` from byte `begin` on, kept in `folder`. Only one process at a time may keep an index in a
    folder. If the disk is full or unavailable, new entries are lost, and no exception is raised.
    """

    def __init__(self, run_dir: Path, folder: Path, *, begin: int | None = None) -> None:
        """`begin`: the first byte of the log to read; None: the byte at which the index in `folder` ends."""
        self._run_dir, self._folder = run_dir, folder
        self.offset = end_of(folder) if begin is None else begin
        self._inode, self._half = 0, 0  # bytes of a line whose end is not written yet
        self._steps: pyramid.Writer | None = None
        self._last = -1
        self._files: dict[str, int] = {}

    def poll(self, most: int = AT_ONCE) -> list[Event]:
        """Read the part of the log that is new since the last call, at most `most` bytes of it, and return its events."""
        found: list[Event] = []
        try:
            with epochs.newest(self._run_dir, events.FILE).open("rb") as log:
                there = os.fstat(log.fileno())
                if there.st_size < self.offset or self._inode not in (0, there.st_ino):
                    self.offset = 0 if there.st_size < self.offset else self.offset  # it was removed, and a new one begins
                self._inode = there.st_ino
                log.seek(self.offset)
                read = log.read(most)
        except OSError:  # away: looked at again with the next call
            return []
        *lines, rest = read.split(b"\n")
        if not lines and len(rest) == most:
            if most < LONGEST:
                return self.poll(most * 4)
            self.offset += len(rest)
        for line in lines:
            self.offset += len(line) + 1
            event = events.parse(line.decode("utf-8", "replace") + "\n")
            if event is not None:
                found.append(event)
                with disk.if_available(self._folder):
                    self._keep(event, line)
        return found

    def _keep(self, event: Event, line: bytes) -> None:
        match event:
            case Step():
                if self._steps is None or event.step <= self._last:
                    self._begin()
                assert self._steps is not None
                self._last = event.step
                self._steps.append(event.step, numbers(event), time=event.time, bases=(float(self.offset), event.time))
            case Holding():
                self._append(HOLDINGS, line)
            case _:
                if isinstance(event, RunStarted):
                    self._begin()
                    self._append(HOLDINGS, b"", anew=True)
                self._append(NOTES, b'{"at":%d,"event":%s}' % (self.offset, line))

    def _begin(self) -> None:
        if self._steps is not None:
            self._steps.close()
        self._make_folder()
        self._steps = pyramid.Writer(self._folder, kind="numbers", width=len(VALUES))
        self._last = -1

    def _append(self, name: str, line: bytes, *, anew: bool = False) -> None:
        if name not in self._files:
            self._make_folder()
            self._files[name] = os.open(self._folder / name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        if anew:
            os.ftruncate(self._files[name], 0)
        if line:
            disk.append(self._files[name], line + b"\n")

    def _make_folder(self) -> None:
        """Make the index's folder, but never the run folder itself, which may be temporarily unavailable."""
        if self._folder.is_relative_to(self._run_dir):
            disk.make_within(self._run_dir, self._folder)
        else:
            self._folder.mkdir(parents=True, exist_ok=True)

    def close(self) -> None:
        """Write incomplete records."""
        if self._steps is not None:
            self._steps.close()
        for file in self._files.values():
            os.close(file)
        self._files.clear()


def notes(folder: Path) -> Iterator[tuple[int, Event]]:
    """Yield all events except steps, oldest first, each with the log offset at which it ends; after them the ranks' `Holding`
    events, with offset 0."""
    for line in disk.lines(folder / NOTES):
        record = disk.parse(line)
        if record is not None and isinstance(record.get("at"), int) and isinstance(record.get("event"), dict):
            event = events.load(record["event"])
            if event is not None:
                yield record["at"], event
    for line in disk.lines(folder / HOLDINGS):
        event = events.parse(line)
        if event is not None:
            yield 0, event


def end_of(folder: Path) -> int:
    """Return the offset in the log at which an index ends. Each event is stored before the next one is read, so no event before
    this offset is missing."""
    newest = pyramid.Reader(folder).newest()
    last = max((at for at, _ in _tail(folder / NOTES)), default=0)
    return max(last, int(newest[2]) if newest else 0)


def _tail(path: Path, size: int = 1 << 20) -> Iterator[tuple[int, Any]]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - size))
            read = file.read()
    except OSError:
        return
    for line in read.split(b"\n"):
        try:
            record = json.loads(line)
            yield int(record["at"]), record
        except (ValueError, KeyError, TypeError):
            continue
