"""A dry run compared with its prediction: tables for a terminal of 80 columns, a picture, and a page."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from megalith.report import svg, units
from megalith.report.style import figure, html_page, html_table

if TYPE_CHECKING:
    from megalith.cost.predicted import Comparison
    from megalith.prove.dryrun import DryRun
    from megalith.prove.meter import Memory
    from megalith.spec.problem import Problem


def heading(run: "DryRun") -> str:
    """Return a line with the rank's coordinates and its number of parameters."""
    counted = run.counted
    place = ", ".join(f"{axis} {at}" for axis, at in counted.coordinates.items())
    return (
        f"rank {run.rank} of {run.world:,}: {place}; {units.count(counted.parameters)} parameters of {len(counted.parts)} parts"
    )


def memory(held: "Memory", lines: Mapping[str, "Comparison"], limit: int | None) -> Table:
    """Return the table of bytes by category. The column "at the peak" has each category's bytes at the moment when all memory
    together was largest."""
    table = _table("memory", "at the peak", "predicted", "gap", "at most", "between steps")
    for name in held.peak:
        row = lines[f"memory.{name}"]
        table.add_row(name, *_sides(row), units.memory(held.most[name]), units.memory(held.between[name]))
    table.add_row("[bold]all[/]", *_sides(lines["memory.all"]), "", units.memory(sum(held.between.values())))
    table.add_row("while building", units.memory(held.building))
    for tier in ("host", "disk"):
        if (row := lines.get(f"memory.{tier}")) is not None:
            table.add_row(f"on the {tier}", *_sides(row))
    if limit is not None:
        table.add_row("the device has", units.memory(limit))
    return table


COLOURS = {"weights": 0, "optimizer": 2, "gradients": 1, "buffers": 6, "activations": 4}
"""Category -> colour, from the bottom up: persistent memory is drawn below temporary memory."""


def memory_timeline(moments: Sequence[Mapping[str, int]]) -> str:
    """Memory over the step by category, as a self-contained SVG."""
    return svg.standalone(_memory_timeline(moments))


def page(
    name: str, run: "DryRun", lines: Mapping[str, "Comparison"], limit: int | None, problems: "Iterable[Problem]" = ()
) -> str:
    """The dry run of run `name` as one self-contained HTML page: memory over the step by category, and every table."""
    wrong = "".join(
        f'<li class="{one.severity}"><b>{one.severity}</b><span>{escape(one.reason)}. {escape(one.way_out)}</span></li>'
        for one in problems
    )
    shown = {
        "Memory": memory(run.counted.memory, lines, limit),
        "Collectives and messages of a step": traffic(lines),
        "Work of a step": work(lines),
    }
    tables = "".join(f"<h2>{title}</h2>{_html(table)}" for title, table in shown.items())
    picture = figure("Memory over the step by category", _memory_timeline(run.counted.memory_timeline), wide=True)
    title = f"Dry run of {name}"
    body = f"<header><h1>{escape(title)}</h1><p>{escape(heading(run))}</p></header>"
    body += f'<ul class="problems">{wrong}</ul>{picture}{tables}<footer>Made by megalith dryrun.</footer>'
    return html_page(title, body)


def _html(table: Table) -> str:
    columns = [[Text.from_markup(str(cell)).plain for cell in column.cells] for column in table.columns]
    return html_table([str(column.header) for column in table.columns], list(zip(*columns, strict=True)))


def _memory_timeline(moments: Sequence[Mapping[str, int]]) -> str:
    most = max((sum(sizes.values()) for sizes in moments), default=0)
    unit, scale = units.memory_unit(most)
    columns = [
        (100 * at / len(moments), {name: size / scale for name, size in sizes.items()}) for at, sizes in enumerate(moments)
    ]
    return svg.stacked_columns(
        columns,
        COLOURS,
        x_label="% of the step's allocations",
        y_format=lambda size: f"{size:.3g} {unit}",
        width=1000,
        height=380,
    )


def traffic(lines: Mapping[str, "Comparison"]) -> Table:
    """Return the table of collectives and messages by axis."""
    table = _table("axis", "collective", "calls", "predicted", "bytes", "predicted", "gap")
    table.columns[1].justify = "left"
    for name, calls in lines.items():
        if not name.startswith("traffic.") or not name.endswith(".calls"):
            continue
        _, axis, kind, _ = name.split(".")
        size = lines[f"traffic.{axis}.{kind}.bytes"]
        expected = units.NOTHING if calls.predicted is None else f"{calls.predicted:,.0f}"
        table.add_row(axis, kind, f"{calls.counted:,.0f}", expected, *_sides(size))
    return table


def work(lines: Mapping[str, "Comparison"]) -> Table:
    """Return the table of FLOPs by kind."""
    table = _table("FLOPs", "dry run", "predicted", "gap")
    for name in ("products", "attention"):
        row = lines[f"work.{name}"]
        table.add_row({"products": "matrix products"}.get(name, name), _flops(row.counted), _flops(row.predicted), gap(row.gap))
    return table


def _flops(number: float | None) -> str:
    return units.flops(number).removesuffix("/s")


def _table(*columns: str) -> Table:
    table = Table(*columns, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in table.columns[1:]:
        column.justify = "right"
        column.no_wrap = True
    return table


def _sides(row: "Comparison") -> Sequence[str]:
    return units.memory(row.counted), units.memory(row.predicted), gap(row.gap)


def gap(share: float | None) -> str:
    """Return a gap such as "+3.1 %", or "none" if it rounds to 0."""
    if share is None:
        return units.NOTHING
    return "none" if abs(share) < 5e-5 else f"{share * 100:+.1f} %" if abs(share) < 9.995 else f"{share + 1:,.0f} times"
