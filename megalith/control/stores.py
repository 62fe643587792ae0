"""Waiting for storage: the folders and files that a run has used must be available before its ranks are restarted."""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from megalith import disk
from megalith.fleet.heartbeat import SAVES_AGAIN, Beat
from megalith.fleet.tiers import Copy


class StoresAwayError(RuntimeError):
    """Storage that the run has used was unavailable for longer than `fleet.wait_limit`."""


class _Wait:
    """A wait for storage. Its beginning is printed in one line, with how long it may last, and its end is passed to `notify`."""

    def __init__(self, limit: float, notify: Callable[[str], None]) -> None:
        self._limit, self._notify = limit, notify
        self._since: float | None = None

    def goes_on(self, what: str, why: str, *, until: str) -> bool:
        """Note that the storage is still unavailable. Return False if the wait has lasted for its limit."""
        if self._since is None:
            self._since = time.monotonic()
            words = f"{what} ({why}): waiting until {until}, for at most {self._limit:g} s (fleet.wait_limit)"
            print(words, file=sys.stderr, flush=True)
        return time.monotonic() - self._since < self._limit

    def end(self, words: str) -> None:
        """Note that the storage is available. Nothing is said if there was no wait."""
        if self._since is not None:
            self._notify(f"{words} again, after {time.monotonic() - self._since:.0f} s")


class Stores:
    """Paths that must be available at a start: the run folder, and every path that was unavailable before."""

    def __init__(self, run_dir: Path) -> None:
        self._run = disk.Place(run_dir)
        self._others: list[Path] = []

    def add(self, path: str) -> None:
        """Add a path that must be available at every later start."""
        if Path(path) not in self._others:
            self._others.append(Path(path))

    @property
    def run_folder_away(self) -> str:
        """The reason why the run folder cannot be used now; empty if it can."""
        return self._run.away()

    def start(self, start: Callable[[], None], *, limit: float, notify: Callable[[str], None], pause: Callable[[], bool]) -> bool:
        """Call `start` once all paths are available, and again if `start` itself finds storage unavailable. `pause` waits between
        two attempts; if it returns False, there is no further attempt, and the result is False. The beginning of a wait is
        printed, and its end is passed to `notify`. Raises StoresAwayError after `limit` seconds.
        """
        wait, first = _Wait(limit, notify), ""
        while (away := self._try(start)) is not None:
            path, why = away
            first = first or path
            if not wait.goes_on(f"{path} cannot be used", why, until="it can"):
                raise StoresAwayError(
                    f"{path} could not be used for fleet.wait_limit = {limit:g} s: {why}. The same command resumes the run "
                    f"once this path can be used"
                )
            if not pause():
                return False
        wait.end(f"{first} can be used")
        return True

    def _try(self, start: Callable[[], None]) -> tuple[str, str] | None:
        if why := self._run.away():
            return str(self._run.folder), why
        try:
            for path in self._others:
                if not path.is_dir():
                    with path.open("rb") as file:
                        file.read(1)
            start()
        except OSError as error:
            if not disk.is_away(error):
                raise
            return str(error.filename or self._run.folder), error.strerror or str(error)
        return None


def await_list(
    store: Callable[[], tuple[Copy, ...]], *, limit: float, notify: Callable[[str], None], pause: Callable[[], bool]
) -> tuple[Copy, ...] | None:
    """Return the run's checkpoints as soon as they can be listed, because the run would otherwise start over; None if `pause` (see
    `Stores.start`) returns False. Raises OSError after `limit` seconds."""
    wait = _Wait(limit, notify)
    while True:
        try:
            found = store()
        except OSError as error:
            if not wait.goes_on("the checkpoints cannot be listed", str(error), until="they can"):
                raise
            if not pause():
                return None
        else:
            wait.end("the checkpoints can be listed")
            return found


def unlogged_retry(beats: Sequence[Beat], folder: disk.Place) -> str:
    """Return a line if ranks wait to save the last checkpoint in a run folder that is unavailable, because their log cannot say so; else
    an empty text."""
    limit = next((beat.phase.removeprefix(SAVES_AGAIN) for beat in beats if beat.phase.startswith(SAVES_AGAIN)), "")
    why = folder.away() if limit else ""
    return f"{folder.folder} cannot be used ({why}): saving the last checkpoint is retried for up to {limit} s" if why else ""
