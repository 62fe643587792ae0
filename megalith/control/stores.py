"""Waiting for storage: the folders and files that a run has used must be available before its ranks are restarted."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

from megalith import disk


class StoresAwayError(RuntimeError):
    """Storage that the run has used was unavailable for longer than `fleet.wait_limit`."""


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
        since: float | None = None
        first = ""
        while (away := self._try(start)) is not None:
            path, why = away
            if since is None:
                since, first = time.monotonic(), path
                words = f"{path} cannot be used ({why}): waiting until it can, for at most {limit:g} s (fleet.wait_limit)"
                print(words, file=sys.stderr, flush=True)
            if time.monotonic() - since >= limit:
                raise StoresAwayError(
                    f"{path} could not be used for fleet.wait_limit = {limit:g} s: {why}. The same command resumes the run "
                    f"once this path can be used"
                )
            if not pause():
                return False
        if since is not None:
            notify(f"{first} can be used again, after {time.monotonic() - since:.0f} s")
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
