"""Comparison of runs: their numbers in one table, the keys in which they differ, and their curves on one page."""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megalith.events import Step
from megalith.report import units
from megalith.report.history import History, history
from megalith.report.page import smoothed
from megalith.report.style import curves, figure, figures, html_page, html_table
from megalith.report.summary import Summary, summarize
from megalith.report.svg import Point, Series

LABELS = frozenset({"name"})
"""Keys that only label a run, and so do not count as differences."""

NOT_GIVEN = "not given"


def read(folders: Sequence[Path]) -> dict[str, History]:
    """Return the runs by their folders' names, preceded by as much of the paths as makes the names unique."""
    parts = [folder.resolve().parts for folder in folders]
    depth = next(n for n in range(1, max(map(len, parts)) + 1) if len({part[-n:] for part in parts}) == len(set(parts)))
    return {"/".join(part[-depth:]): history(folder) for part, folder in zip(parts, folders, strict=True)}


def table(runs: Mapping[str, History]) -> RenderableType:
    """Return the numbers of the runs side by side, and the keys in which they differ."""
    found = Table(box=None, padding=(0, 2, 0, 0))
    found.add_column("", style="dim", no_wrap=True)
    for name in runs:
        found.add_column(name, overflow="fold")
    for row in _rows(runs):
        found.add_row(*row)
    differing = Table(box=None, padding=(0, 2, 0, 0))
    differing.add_column("differs in", style="dim", no_wrap=True)
    for name in runs:
        differing.add_column(name, overflow="fold")
    for key, values in differences(runs).items():
        differing.add_row(key, *map(_worded, values))
    said = differing if differing.row_count else Text("The runs have the same values for all keys except `name`.")
    return Group(found, Text(""), said)


def differences(runs: Mapping[str, History]) -> dict[str, tuple[Any, ...]]:
    """Return each key (except LABELS) whose value is not the same in all runs, with the value of each run."""
    flat = [dict(_leaves(run.spec)) for run in runs.values()]
    keys = dict.fromkeys(key for values in flat for key in values if key.partition(".")[0] not in LABELS)
    tables = {key[:end] for key in keys for end, letter in enumerate(key) if letter == "."}
    keys = [key for key in keys if key not in tables]  # a table that one run lacks, of which other rows have the keys
    found = {key: tuple(values.get(key, NOT_GIVEN) for values in flat) for key in keys}
    return {key: values for key, values in found.items() if any(value != values[0] for value in values)}


def as_json(runs: Mapping[str, History]) -> dict[str, Any]:
    """Map each differing key to the value of each run, by the run's name."""
    return {key: dict(zip(runs, values, strict=True)) for key, values in differences(runs).items()}


def write(runs: Mapping[str, History], out: Path) -> Path:
    """Write the page of the comparison."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(render(runs), encoding="utf-8")
    return out


def render(runs: Mapping[str, History]) -> str:
    """Return the page as text; it refers to no other file."""
    title = " · ".join(runs)
    drawn = [
        _chart("Training loss (nats a token)", runs, lambda step: step.loss, log=True),
        _validation(runs),
        _chart("Tokens a second", runs, lambda step: step.tokens_per_second, from_zero=True),
        _chart("Gradient norm, before clipping", runs, lambda step: step.grad_norm, log=True, from_zero=True),
    ]
    keys = differences(runs)
    body = f"<header><h1>{escape(title)}</h1><p>{len(runs)} runs, over the tokens that each has read</p></header>"
    body += f"<section>{figures(*drawn)}</section>"
    body += f"<section><h2>Numbers</h2>{html_table(['', *runs], _rows(runs))}</section>"
    rows = [[key, *map(_worded, values)] for key, values in keys.items()]
    said = (
        html_table(["key", *runs], rows)
        if rows
        else '<p class="none">The runs have the same values for all keys except <code>name</code>.</p>'
    )
    body += f"<section><h2>Differences</h2>{said}</section>"
    return html_page(title, body)


def _rows(runs: Mapping[str, History]) -> list[list[str]]:
    found = [summarize(run) for run in runs.values()]
    forms: dict[str, Callable[[Summary], str | None]] = {
        "state": lambda one: one.state,
        "model": lambda one: f"{one.model or ''} {units.count(one.parameters)} parameters".strip() if one.parameters else None,
        "ranks": lambda one: f"{one.ranks} on {one.device}" if one.ranks else None,
        "steps": lambda one: f"{one.step:,}" + (f" of {one.steps:,}" if one.steps else ""),
        "tokens": lambda one: units.count(one.tokens) if one.tokens else None,
        "training loss": lambda one: f"{one.loss:.4f}" if one.loss is not None else None,
        "validation loss": lambda one: (
            f"{one.validation_loss:.4f} at step {one.validation_step:,}" if one.validation_loss is not None else None
        ),
        "bits a byte": lambda one: f"{one.bits_per_byte:.4f} in validation" if one.bits_per_byte is not None else None,
        "tokens a second": lambda one: units.count(one.tokens_per_second) if one.tokens_per_second else None,
        "MFU": lambda one: units.percent(one.mfu) if one.mfu is not None else None,
        "time in steps": lambda one: units.duration(one.seconds_in_steps) if one.seconds_in_steps else None,
        "incidents": lambda one: str(len(one.incidents)) if one.incidents else None,
    }
    rows = [[name, *(form(one) for one in found)] for name, form in forms.items()]
    return [[cell or units.NOTHING for cell in row] for row in rows if any(row[1:])]


def _leaves(value: Any, path: str = "") -> Sequence[tuple[str, Any]]:
    if not isinstance(value, dict) or not value:
        return [(path, value)]
    return [leaf for key, inside in value.items() for leaf in _leaves(inside, f"{path}.{key}".removeprefix("."))]


def _worded(value: Any) -> str:
    return "none" if value is None else str(value)


def _chart(
    caption: str,
    runs: Mapping[str, History],
    number: Callable[[Step], float | None],
    *,
    log: bool = False,
    from_zero: bool = False,
) -> str:
    """Draw the curve of one number over the tokens read, for the steps of every run; long curves are smoothed."""
    series = list[Series]()
    for colour, (name, run) in enumerate(runs.items()):
        points: list[Point] = [(step.tokens_seen, y) for step in run.steps if (y := number(step)) is not None]
        points = smoothed(points, reach=max(len(points) // 60, 3)) if len(points) > 60 else points
        series.append(Series(name, points, colour % 8))
    return figure(caption, curves(series, _digits, x_label="tokens", log=log, from_zero=from_zero))


def _validation(runs: Mapping[str, History]) -> str:
    series = list[Series]()
    for colour, (name, run) in enumerate(runs.items()):
        tokens = {step.step: step.tokens_seen for step in run.steps}
        points = [(tokens[one.step], one.loss) for one in run.validations if one.step in tokens]
        series.append(Series(name, points, colour % 8, dots=True))
    if not any(one.points for one in series):
        return ""
    return figure("Validation loss (nats a token)", curves(series, _digits, x_label="tokens", log=True))


def _digits(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else units.count(value)
