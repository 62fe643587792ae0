"""The live line of a run: follows the event log of a run folder while it is written."""

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.text import Text

from megalith import epochs, events
from megalith.events import (
    EarlyUpdatesPaused,
    Event,
    Incident,
    Lowered,
    PhaseBegan,
    PrecisionWatched,
    Problem,
    Recovery,
    Rewound,
    RunStarted,
    Skipped,
    Spike,
    Step,
    Validation,
)  # fmt: skip
from megalith.report import pace, units


class LiveLine:
    """Shows a run's progress, from the events that are logged after this object was created.

    On a terminal, the display is one line, redrawn at each `poll`, with problems and validations above it. Elsewhere, a plain
    line is printed at the first step, then every `seconds` seconds, and for the last step when the display is closed. `errors`
    tells of which ranks logged errors are shown too: of none suits commands that print the cause of a failure at their end.

    No method raises an exception, because the display must not end the training. `failed`: the first error of the display itself.
    `on_event` is called with each event until it raises an exception, which is then in `raised`.
    """

    def __init__(
        self,
        run_dir: Path,
        steps: int,
        console: Console,
        *,
        seconds: float = 10.0,
        errors: Callable[[int | None], bool] = lambda rank: True,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        self._path = epochs.newest(run_dir, events.FILE)
        self._steps, self._console, self._seconds, self._errors = steps, console, seconds, errors
        self._offset, self._inode = self._size(), 0
        self._away = False  # the log could not be read at the last call
        self.failed = ""
        self.raised: Exception | None = None
        self._on_event = on_event
        self._half = b""  # the beginning of a line whose end is not written yet
        self._step: Step | None = None
        self._validation: Validation | None = None
        self._recent: deque[Step] = deque(maxlen=pace.RECENT)  # since the newest start
        self._said: tuple[int, float] | None = None  # the step of the last plain line, and when it was written
        self._reason = ""  # of the last incident
        self._told = set[str]()  # the errors of ranks that were shown, or are shown elsewhere
        self._live: Live | None = None
        self._progress = Progress(BarColumn(bar_width=24), TextColumn("{task.description}"), console=console, auto_refresh=False)
        self._task: TaskID | None = None

    def poll(self) -> None:
        """Read and show the events since the last call."""
        with self._whatever_happens():
            for event in self._new():
                self._pass_on(event)
                self._take(event)
            if self._step is None:
                return
            if self._console.is_terminal:
                self._redraw()
            elif self._said is None or (self._new_to_say() and time.monotonic() - self._said[1] >= self._seconds):
                self._print_if_new()

    def close(self) -> None:
        """Show the last state; the line stays on the terminal."""
        self.poll()
        with self._whatever_happens():
            if self._live is not None:
                self._live.stop()
                self._live = None
            elif self._new_to_say():
                self._print_if_new()

    def _pass_on(self, event: Event) -> None:
        if self._on_event is not None and self.raised is None:
            try:
                self._on_event(event)
            except Exception as error:  # of another's function: training goes on
                self.raised = error

    @contextmanager
    def _whatever_happens(self) -> Iterator[None]:
        """Suppress any exception of the block, also one from a drawing library: the run continues without its live line."""
        try:
            yield
        except (Exception, SystemExit) as error:  # rich raises the latter where a pipe is closed
            self.failed = self.failed or f"{type(error).__name__}: {error}"

    def __enter__(self) -> "LiveLine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _size(self) -> int:
        try:
            return self._path.stat().st_size
        except OSError:
            return 0

    def _new(self) -> list[Event]:
        try:
            fresh = self._read()
        except OSError as error:
            if not self._away and (self._inode or not isinstance(error, FileNotFoundError)):
                self._away = True
                words = f"{self._path} cannot be read ({error.strerror}): training continues, and progress is shown once it can be read"
                self._print(Text.assemble(("warning", "yellow"), f": {words}"))
            return []
        self._away = False
        *lines, self._half = (self._half + fresh).split(b"\n")
        found = [events.parse(line.decode("utf-8", "replace") + "\n") for line in lines]
        return [event for event in found if event is not None]

    def _read(self) -> bytes:
        """Return the unread bytes of the log. A log that was removed or truncated is read from its beginning. Raises OSError."""
        with self._path.open("rb") as file:
            found = os.fstat(file.fileno())
            if found.st_size < self._offset or self._inode not in (0, found.st_ino):
                self._offset, self._half = 0, b""
            self._inode = found.st_ino
            file.seek(self._offset)
            fresh = file.read()
        self._offset += len(fresh)
        return fresh

    def _take(self, event: Event) -> None:
        match event:
            case RunStarted():
                self._recent.clear()
            case Step():
                self._step = event
                self._recent.append(event)
            case Validation():
                self._validation = event
            case Incident():
                self._print(Text.assemble(("incident", "yellow"), f" at step {event.step}: {self._said_of(event)}"))
            case Recovery():
                how = f"from {event.restored}" if event.restored else "in place"
                self._print(Text.assemble(("resumed", "green"), f" at step {event.step}, {how}"))
            case PhaseBegan():
                self._print(Text.assemble(("phase", "cyan"), f": {event.words}"))
            case PrecisionWatched(raised=""):
                pass
            case Skipped() | Spike() | Rewound() | Lowered() | PrecisionWatched() | EarlyUpdatesPaused():
                self._print(Text.assemble(("warning", "yellow"), f": {event.words}"))
            case Problem(severity="error") if event.message in self._told or not self._errors(event.rank):
                self._told.add(event.message)
            case Problem():
                self._told |= {event.message} if event.severity == "error" else set()
                where = f" (rank {event.rank})" if event.rank is not None else ""
                colour = "red" if event.severity == "error" else "yellow"
                first, more, _ = event.message.partition("\n")
                self._print(Text.assemble((event.severity, colour), f": {first}{' …' if more else ''}{where}"))

    def _said_of(self, incident: Incident) -> str:
        """Return an incident's reason in one line; a repeated reason is shortened. The reason for a run's end is left out, because the
        command's last message has it."""
        if any(command.get("kind") == "stop" for command in incident.commands):
            return "the run stops"
        reason = incident.reason.partition("\n")[0]
        if self._reason and reason.startswith(self._reason):
            return f"the same{reason[len(self._reason) :]}"
        self._reason = reason
        return reason

    def print_line(self, text: str) -> None:
        """Print a line above the live line at once."""
        with self._whatever_happens():
            self._print(Text(text))

    def _print(self, line: Text) -> None:
        """Print a line above the live line. The line is not wrapped, so that it can be searched for in a saved output."""
        self._console.print(line, soft_wrap=True)

    def line(self) -> str:
        """Return the newest step in words: step, loss, validation loss, time left; recent medians of tokens a second and MFU."""
        assert self._step is not None, "no step yet"
        step = self._step
        words = [f"step {step.step}/{self._steps + step.left_out}", f"loss {step.loss:.4f}"]
        words += [self._validated(step)] if self._validation else []
        words += [f"scale {step.scale:,.0f}"] if step.scale is not None else []
        recent = list(self._recent) or [step]
        words.append(f"{units.count(pace.usual([one.tokens_per_second for one in recent]))} tokens/s")
        mfu = pace.usual([one.mfu for one in recent])
        words += [f"MFU {units.percent(mfu)}"] if mfu is not None else []
        words += [f"noise scale {units.count(step.noise['tokens'])} tokens"] if "tokens" in step.noise else []
        left = self._left()
        words += [f"ETA {units.clock(left)}"] if left is not None else []
        return "  ".join(words)

    def _validated(self, step: Step) -> str:
        assert self._validation is not None, "no validation yet"
        earlier = f" at {self._validation.step}" if self._validation.step != step.step else ""
        return f"val {self._validation.loss:.4f}{earlier}"

    def _left(self) -> float | None:
        """Return the seconds until the last step; None if the ranks have restarted and not yet finished a step."""
        if not self._recent:
            return None
        steps, times = [one.step for one in self._recent], [one.time for one in self._recent]
        newest = self._recent[-1]
        return pace.seconds_left(steps, times, last=self._steps + newest.left_out, seconds=newest.seconds)

    def _redraw(self) -> None:
        assert self._step is not None, "no step yet"
        if self._live is None:
            self._live = Live(self._progress, console=self._console, auto_refresh=False)
            self._live.start()
            self._task = self._progress.add_task("", total=self._steps)
        assert self._task is not None, self._task
        self._progress.update(self._task, completed=self._step.step - self._step.left_out, description=self.line())
        self._live.refresh()

    def _new_to_say(self) -> bool:
        return self._step is not None and (self._said is None or self._said[0] != self._step.step)

    def _print_if_new(self) -> None:
        assert self._step is not None, "no step yet"
        self._said = (self._step.step, time.monotonic())
        self._print(Text(self.line()))
