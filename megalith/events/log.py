"""A run's log of events: one JSON object a line, appended only."""

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from megalith import disk, epochs
from megalith.events.kinds import Event, Holding, Problem, RunStarted, Step
from megalith.events.text import dump, parse

FILE = "events.jsonl"
MAX_WAITING = 10_000  # events that wait for a disk with room, or a store; the oldest are lost beyond that

Kind = TypeVar("Kind", bound=Event)


class EventLog:
    """Appends events to a run folder's log. Each event is one write, so readers rarely see a partial line, and several processes
    may write to one log. If the disk is full or unavailable, events wait in memory. If the log is deleted during the run, a new
    log begins with a warning and with the newest `RunStarted` event, without which reports could not read later events."""

    def __init__(self, run_dir: Path, *, epoch: int | None = None, existed: bool = False) -> None:
        """`epoch`: the epoch of the log's owner (`megalith.epochs`); None: the newest. `existed`: the folder existed before, so
        it must not be made if it is missing."""
        if not existed:
            run_dir.mkdir(parents=True, exist_ok=True)
        path = epochs.newest(run_dir, FILE) if epoch is None else run_dir / epochs.name(FILE, epoch)
        self._opening: list[Event] = []  # the newest start, and its placement
        self._step = 0  # the newest step that was written
        self._journal = disk.Journal(path, most=MAX_WAITING, renewed=self._begin_anew, existed=existed)

    def write(self, event: Event) -> None:
        """Append one event. An event that cannot be written now waits in memory."""
        match event:
            case RunStarted():
                self._opening, self._step = list[Event]([event]), event.resumed_step
            case Holding():
                self._opening.append(event)
        self._journal.write(_line(event))
        if isinstance(event, Step):
            self._step = event.step

    def _begin_anew(self, made: bool) -> Iterator[bytes]:
        """Yield the first lines of the new log after the old one was removed or emptied. `made`: this writer created the new
        file or found it empty, and therefore adds a warning."""
        if made:
            words = f"{FILE} was removed or emptied during the run: earlier events are lost, and this is a new file"
            yield _line(Problem("warning", words))
        for event in self._opening:
            fresh = replace(event, time=time.time())
            yield _line(replace(fresh, resumed_step=self._step) if isinstance(fresh, RunStarted) else fresh)

    def close(self) -> None:
        """Write the waiting events, and print the number of events that cannot be written."""
        self._journal.close()


def _line(event: Event) -> bytes:
    return json.dumps(dump(event), separators=(",", ":")).encode() + b"\n"


class Reader:
    """The events of a run, oldest first; each iteration reads the log of the newest epoch from its beginning. Lines that are
    incomplete (because of a killed writer or a full disk) or contain no event are skipped. `skipped`: the number of these lines
    in the last iteration.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self.skipped = 0

    def __iter__(self) -> Iterator[Event]:
        self.skipped = 0
        for line in disk.lines(epochs.newest(self._run_dir, FILE)):
            event = parse(line)
            if event is None:
                self.skipped += 1
            else:
                yield event


def read(run_dir: Path) -> Reader:
    """Return a reader of the events in a run folder. The reader yields no events if there is no log. Iteration raises OSError if
    the log exists but cannot be read."""
    return Reader(run_dir)


def read_kind(run_dir: Path, kind: type[Kind]) -> list[Kind]:
    """Return the events of one class in a run folder. Lines of other events are not parsed, which saves most of the time that `read`
    takes."""
    lines = (line for line in disk.lines(epochs.newest(run_dir, FILE)) if f'"type":"{kind.kind}"' in line)
    return of_kind([event for event in map(parse, lines) if event is not None], kind)


def of_kind(events: Iterable[Event], kind: type[Kind]) -> list[Kind]:
    """Return the events of one class, in their order."""
    return [event for event in events if isinstance(event, kind)]
