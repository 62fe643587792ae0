"""Progress of long work on data, printed to stderr so that results can be piped."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.text import Text

from megalith.data.manifest import SkippedFiles


class Bars:
    """One bar for each piece of work: done and total bytes, bytes a second, time left. Prints nothing if `progress` is None. In a pipe or a
    file, each piece is one line, written when it is done."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress

    def start(self, what: str, *, total: int | None) -> TaskID:
        """Start a bar over `total` bytes. `total` None: the length is unknown, and the bar only moves and counts seconds."""
        return TaskID(0) if self._progress is None else self._progress.add_task(what, total=total)

    def advance(self, bar: TaskID, count: int) -> None:
        """Record `count` more bytes as done."""
        if self._progress is not None:
            self._progress.advance(bar, count)

    def finish(self, bar: TaskID) -> None:
        """Mark the work as done, whatever the count (a source may have grown, or its length was unknown)."""
        if self._progress is not None:
            task = self._progress.tasks[bar]
            sized = task.total is not None
            self._progress.update(bar, total=task.total or 1, completed=task.total or 1, sized=sized)
            if not self._progress.console.is_terminal:
                self.print_line(f"{task.description}: {amount(task)}")

    def print_line(self, line: str) -> None:
        """Print a line above the bars."""
        if self._progress is not None:
            self._progress.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def print_left_out(self, source: str, left_out: Iterable[SkippedFiles]) -> None:
        """Print a line for each reason for which files of a source were left out."""
        for one in left_out:
            self.print_line(f"{source}: left out {one}")


class _Amount(ProgressColumn):
    """Column with the amount done, the speed and the time left; at the end, the total amount and time."""

    def render(self, task: Task) -> Text:
        return Text(amount(task))


def amount(task: Task) -> str:
    """Describe the progress of a piece of work over bytes."""
    seconds = task.finished_time if task.finished else task.elapsed
    passed = _clock(seconds or 0.0)
    if task.finished:
        return f"{decimal(int(task.completed))} in {passed}" if task.fields.get("sized", True) else f"done in {passed}"
    if task.total is None:
        return passed
    speed = f", {decimal(int(task.speed))}/s" if task.speed else ""
    left = f", {_clock(task.time_remaining)} left" if task.time_remaining is not None else ""
    return f"{decimal(int(task.completed))} of {decimal(int(task.total))}{speed}{left}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@contextmanager
def bars(shown: bool) -> Iterator[Bars]:
    """Show progress bars while the block runs."""
    if not shown:
        yield Bars(None)
        return
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(24), _Amount())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        yield Bars(progress)
