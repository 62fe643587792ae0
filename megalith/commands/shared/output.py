"""Output shared by all commands: JSON, problems, failures, progress. Quick to import."""

import errno
import json
import os
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.markup import escape

from megalith import disk
from megalith.report import units

if TYPE_CHECKING:
    from rich.progress import Progress

    from megalith.fleet.environment import Place
    from megalith.spec.problem import Problem, SpecErrors

BAD_SPECIFICATION, LOST = 2, 71  # as in fleet.exit_codes


@contextmanager
def readable_errors(*, as_json: bool) -> Iterator[None]:
    """On an error that a user can correct, print it without a traceback and exit. Errors of the program itself keep their traceback; a rank
    that torchrun or srun started prints only the place."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        if os.environ.get("MEGALITH_TRACEBACK"):
            raise
        if isinstance(error, typer.Exit):  # a RuntimeError to typer
            raise
        text, complete = _in_words(error)
        print_failure(text, kind=type(error).__name__, as_json=as_json, complete=complete)
        raise typer.Exit(LOST if disk.is_unavailable(error) else getattr(error, "exit_code", 1)) from error
    except Exception as error:
        from megalith.spec.problem import SpecErrors  # specifications take 0.2 s to import

        if not isinstance(error, SpecErrors):
            if as_json or _place() is None or os.environ.get("MEGALITH_TRACEBACK"):
                raise
            _print_of_rank(error)
            raise typer.Exit(1) from error
        if not as_json and (rank := _repeats(error)):
            print(f"rank {rank} ends: the run has problems, which another rank lists", file=sys.stderr, flush=True)
        else:
            print_problems(error.problems, as_json=as_json)
        raise typer.Exit(BAD_SPECIFICATION) from error


def _repeats(error: "SpecErrors") -> int:
    """Return the rank of this process if torchrun or srun started it, and its machine's first rank lists the same problems: files may
    differ between machines. Otherwise return 0."""
    place = _place()
    return 0 if place is None or place.local_rank == 0 else place.rank


def _place() -> "Place | None":
    """Return the place of this process if torchrun or srun started it as one of several."""
    from megalith.fleet import environment

    try:
        return environment.find()
    except ValueError:  # of the environment itself
        return None


def _print_of_rank(error: Exception) -> None:
    from megalith.control.outcome import in_words

    place = _place()
    print("\n".join(in_words(error, place.rank if place else 0)), file=sys.stderr)
    print("MEGALITH_TRACEBACK=1 in the environment shows the whole traceback.", file=sys.stderr, flush=True)


@contextmanager
def lossy_output() -> Iterator[None]:
    """Continue the command when standard output or error cannot be written (closed pipe, full disk): unwritten output is lost. At the
    end, each of the two streams reports how much the other one lost."""
    before = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    outputs: dict[str, disk.Output] = {}
    for name, stream in before.items():
        try:
            stream.flush()
            outputs[name] = disk.Output(stream.fileno())
        except (AttributeError, OSError, ValueError):  # there is none, or it is not a file
            continue
        setattr(sys, name, disk.text_output(outputs[name], encoding=stream.encoding, errors=stream.errors))
    try:
        yield
    finally:
        for name, other in (("stdout", "stderr"), ("stderr", "stdout")):
            if name in outputs:
                getattr(sys, name).flush()
                if lost := outputs[name].lost:
                    text = f"{lost:,} bytes of output were lost: {name} could not be written ({outputs[name].why})"
                    print(text, file=getattr(sys, other), flush=True)
        sys.stdout, sys.stderr = before["stdout"], before["stderr"]


def print_json(value: Any) -> None:
    """Print a value, or a dataclass, as one JSON object. NaN and infinity, which JSON lacks, become null."""
    plain = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
    print(json.dumps(units.finite(plain), indent=1, default=str))


WAYS_OUT = {
    errno.ENOENT: "Check the path; relative paths start at the current directory.",
    errno.EACCES: "Give this user access to the path, or name another place.",
    errno.EPERM: "Give this user access to the path, or name another place.",
    errno.EROFS: "Name a place that can be written, with --out or --run-dir.",
    errno.ENOTDIR: "A part of the path is a file. Name another place.",
    errno.EISDIR: "This is a folder. Name a file.",
    errno.ENOSPC: "Free some space, or name another place.",
    errno.ENAMETOOLONG: "Use a shorter name.",
}
"""Advice for each error of the operating system."""


def _in_words(error: Exception) -> tuple[str, bool]:
    """Return an error as text, and whether this text suffices for a user. A library's error also needs the place where it was raised."""
    number = getattr(error, "errno", None) if isinstance(error, OSError) else None
    if number is not None:
        path = f"{error.filename}: " if error.filename else ""  # type: ignore[attr-defined]
        way_out = f" {WAYS_OUT[number]}" if number in WAYS_OUT and path else ""
        return f"{path}{error.strerror or error}.{way_out}", bool(way_out)  # type: ignore[attr-defined]
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    ours = last is not None and str(last.tb_frame.f_globals.get("__name__", "")).startswith("megalith.")
    return str(error) or type(error).__name__, ours and " " in str(error)


def print_failure(text: str, *, kind: str, as_json: bool, complete: bool = False) -> None:
    """Print why a command failed: to stderr, or as JSON with the error's `kind` to stdout. If the text is not `complete`, a line
    says how to see where the error was raised."""
    if as_json:
        print_json({"ok": False, "error": text, "kind": kind})
        return
    console = Console(stderr=True, soft_wrap=True)
    console.print(f"[bold red]failed[/]  {escape(text)}", highlight=False)
    if not complete:
        console.print("[dim]MEGALITH_TRACEBACK=1 in the environment shows where the error was raised.[/]", highlight=False)


def print_problems(problems: "Sequence[Problem]", *, as_json: bool) -> None:
    """Print all problems of a run, each with its value, reason and way out: to stderr, or as JSON to stdout."""
    errors = [problem for problem in problems if problem.severity == "error"]
    if as_json:
        print_json({"ok": not errors, "problems": problem_rows(problems)})
        return
    from megalith.spec.toml import literal  # specifications take 0.2 s to import

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    width = text_width(console)
    indent = max(len(problem.severity) for problem in problems) + 2 if problems else 0
    for problem in problems:
        colour = "bold red" if problem.severity == "error" else "yellow"
        value = "" if problem.value is None else f" = {literal(problem.value)}"
        origin = f"  [dim]{escape(problem.source)}[/]" if problem.source else ""
        severity = f"{problem.severity:<{indent}}"
        console.print(f"[{colour}]{severity}[/][bold]{escape(problem.key + value)}[/]{origin}")
        for sentence in (f"{problem.reason}.", problem.way_out):
            console.print(escape(indented(sentence, indent, width)))
        console.print()
    if errors:
        console.print(f"[bold]{len(errors)} error{'s' * (len(errors) > 1)}[/]: nothing was started.")


def text_width(console: Console) -> int | None:
    """Return the number of columns at which text is wrapped: the terminal's, or COLUMNS. None in a pipe, so that grep finds whole lines."""
    return console.width if console.is_terminal or os.environ.get("COLUMNS", "").isdecimal() else None


def indented(text: str, indent: int, width: int | None) -> str:
    """Return text with each line indented, wrapped at `width` columns."""
    before = " " * indent
    if width is None:
        return before + text
    lines = textwrap.wrap(text, max(width, indent + 20), initial_indent=before, subsequent_indent=before, break_on_hyphens=False)
    return "\n".join(lines)


def problem_rows(problems: "Sequence[Problem]") -> list[dict[str, Any]]:
    """Return problems as JSON objects."""
    return [asdict(problem) for problem in problems]


def progress() -> "Progress":
    """Return a progress bar on stderr with the share done, counts, time left and the current piece of work; it is hidden unless stderr is a
    terminal.

    The bar is drawn only at updates, and not by a thread, because ranks are forked from this process.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # few commands draw

    console = Console(stderr=True)
    counts, name = TextColumn("{task.fields[counts]}"), TextColumn("{task.description}")
    columns = (BarColumn(20), MofNCompleteColumn(), counts, TextColumn("left"), TimeRemainingColumn(), name)
    hidden = not console.is_terminal
    return Progress(*columns, console=console, auto_refresh=False, disable=hidden, speed_estimate_period=3600, transient=True)


def write(text: str, path: Path, *, overwrite: bool) -> None:
    """Write a file, and make missing folders above it. Raises FileExistsError if the file exists with other content, unless `overwrite`."""
    if not overwrite and path.exists() and path.read_text(encoding="utf-8", errors="replace") != text:
        raise FileExistsError(f"{path} already exists with other content. Use --overwrite, or another --out.")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
