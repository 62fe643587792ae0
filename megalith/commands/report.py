"""`megalith report`: a run's report page, from the files in its folder."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from megalith.commands.arguments import Json, RunFolder
from megalith.commands.output import print_json


def command(
    run_dir: RunFolder,
    trace: Annotated[
        bool, typer.Option("--trace", help="Also write trace.json: the pipeline, predicted and measured, for ui.perfetto.dev.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show a run in short, and write its report.html again, from the files in its folder; also while it trains.

    Example:  megalith report runs/first --trace
    """
    page = report(run_dir)
    traced = _trace(run_dir) if trace else None
    if as_json:
        print_json({"ok": True, "report": str(page)} | ({"trace": str(traced)} if traced else {}))
        return
    from megalith.report import tables  # drawing

    Console().print(tables.summary(run_dir))
    print(f"report: {page}" + (f"\ntrace: {traced}" if traced else ""))


def report(run_dir: Path) -> Path:
    """Write a run's report page from the files in its folder, and return the page. Raises FileNotFoundError for another folder."""
    from megalith.report import page  # drawing
    from megalith.spec import files

    if not (run_dir / files.FILE).is_file():
        raise FileNotFoundError(f"{run_dir} holds no {files.FILE}: it is no run folder. Give the --run-dir of a run.")
    return page.write(run_dir)


def report_if_any(run_dir: Path) -> Path | None:
    """Return the report page, or None if the run wrote nothing to report: a run that trained well does not fail over its report."""
    try:
        return report(run_dir)
    except (OSError, ValueError):
        return None


def _trace(run_dir: Path) -> Path:
    """Write a run's pipeline, predicted and measured, as trace.json for Perfetto, and return the file."""
    from megalith.report import history, page  # drawing

    out = run_dir / "trace.json"
    out.write_text(json.dumps(page.trace(history.history(run_dir))), encoding="utf-8")
    return out
