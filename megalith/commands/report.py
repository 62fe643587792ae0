"""`megalith report`: write a run's report page from the files in its folder, or compare several runs."""

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from megalith.commands.shared.arguments import Json, RunRequest
from megalith.commands.shared.output import print_json

if TYPE_CHECKING:
    from megalith.planner.slowdown import SlowdownReport

COMPARISON = "compare.html"


def command(
    run_dirs: Annotated[
        list[Path], typer.Argument(metavar="RUN_DIR...", help="A run folder; several folders are compared.", show_default=False)
    ],
    trace: Annotated[
        bool, typer.Option("--trace", help="Also write trace.json: the pipeline, predicted and measured, for ui.perfetto.dev.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The page's file. Default: report.html in the run folder (in a temporary folder if the run folder is read-only); "
            "with several runs, compare.html in the current directory."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Summarize a run, finished or in progress, and write its report.html from the files in its folder.

    With several runs, compare their numbers, their differing keys, and their curves over the tokens read.

    Example:  megalith report runs/first --trace

    Two runs:  megalith report runs/first runs/other --out compare.html
    """
    if len(run_dirs) > 1:
        if trace:
            raise typer.BadParameter("--trace shows one run. Name one run folder, or leave --trace out.")
        _compare(run_dirs, out or Path(COMPARISON), as_json=as_json)
        return
    (run_dir,) = run_dirs
    beside = _folder_for_pages(run_dir)
    page = report(run_dir, out=out or beside / "report.html")
    traced = _trace(run_dir, beside / "trace.json") if trace else None
    if as_json:
        from megalith.report import summary  # drawing

        numbers = asdict(summary.of_folder(run_dir))
        print_json({"ok": True, "report": str(page)} | ({"trace": str(traced)} if traced else {}) | numbers)
        return
    from megalith.report import tables  # drawing

    Console().print(tables.summary(run_dir))
    print(f"report: {page}" + (f"\ntrace: {traced}" if traced else ""))


def _compare(run_dirs: Sequence[Path], out: Path, *, as_json: bool) -> None:
    """Print the comparison of runs, and write the comparison's page. Raises FileNotFoundError for a folder without a run."""
    from megalith.report import compare, summary  # drawing

    for run_dir in run_dirs:
        RunRequest.in_folder(run_dir)
    runs = compare.read(run_dirs)
    page = compare.write(runs, out)
    if as_json:
        numbers = {name: asdict(summary.summarize(run)) for name, run in runs.items()}
        print_json({"ok": True, "report": str(page), "runs": numbers, "differences": compare.as_json(runs)})
        return
    Console().print(compare.table(runs))
    print(f"comparison: {page}")


def report(run_dir: Path, *, out: Path | None = None) -> Path:
    """Write a run's report page from the files in its folder, to `out` (default: report.html in this folder), and return the page. Raises
    FileNotFoundError for a folder without a run."""
    from megalith.report import page  # drawing

    RunRequest.in_folder(run_dir)
    return page.write(run_dir, out, _compared(run_dir))


def _compared(run_dir: Path) -> "SlowdownReport | str":
    """Return a run's step beside its prediction, or the reason why there is none. Runs do not record predictions, so the prediction is made
    now from spec.json."""
    from megalith.planner.slowdown import slowdown  # traces parts of the model that were not predicted before
    from megalith.spec.base import AbsentError
    from megalith.spec.problem import SpecErrors

    try:
        return slowdown(run_dir, tried=False)
    except SpecErrors as errors:
        return "; ".join(problem.reason for problem in errors.problems)
    except (OSError, ValueError, KeyError, AssertionError, AbsentError) as error:
        return str(error) or type(error).__name__


def report_if_any(run_dir: Path) -> tuple[Path | None, str]:
    """Write the report page, and return its path; if it cannot be written, return None and the reason. A failed report does not make the
    run fail."""
    try:
        return report(run_dir), ""
    except Exception as error:  # whatever the events hold
        return None, f"the report could not be written: {error or type(error).__name__}"


def _folder_for_pages(run_dir: Path) -> Path:
    """Return the run's folder, or a new temporary one if the run's folder is read-only."""
    if not run_dir.is_dir() or os.access(run_dir, os.W_OK):
        return run_dir
    return Path(tempfile.mkdtemp(prefix="megalith-report-"))


def _trace(run_dir: Path, out: Path) -> Path:
    """Write a run's pipeline, predicted and measured, as a trace for Perfetto, and return the file."""
    from megalith.report import history, predicted  # drawing

    out.write_text(json.dumps(predicted.trace(history.history(run_dir))), encoding="utf-8")
    return out
