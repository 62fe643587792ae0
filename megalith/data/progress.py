"""Progress lines for long work on data, on the error stream so that results can be piped."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from megalith.data.manifest import LeftOut


class Bars:
    """One bar a piece of work: done and total bytes, bytes a second, time left. Silent when not shown."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress

    def start(self, what: str, *, total: int | None) -> TaskID:
        """A new bar over `total` bytes; with None, for work of unknown length, it only moves and counts seconds."""
        return TaskID(0) if self._progress is None else self._progress.add_task(what, total=total)

    def advance(self, bar: TaskID, count: int) -> None:
        """`count` more bytes are done."""
        if self._progress is not None:
            self._progress.advance(bar, count)

    def finish(self, bar: TaskID) -> None:
        """The work is done, even where the count says otherwise (a source that grew, a length that was unknown)."""
        if self._progress is not None:
            task = self._progress.tasks[bar]
            self._progress.update(bar, total=task.total or 1, completed=task.total or 1)

    def say(self, line: str) -> None:
        """A line for the person who watches."""
        if self._progress is not None:
            self._progress.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def say_left_out(self, source: str, left_out: Iterable[LeftOut]) -> None:
        """A line for each reason for which something in a source was left out."""
        for one in left_out:
            self.say(f"{source}: left out {one}")


@contextmanager
def bars(shown: bool) -> Iterator[Bars]:
    """Bars that live as long as the block."""
    if not shown:
        yield Bars(None)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        yield Bars(progress)
