"""Table of the update rule of each parameter."""

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from megalith.report.units import count
from megalith.spec.treatment import ParameterSet


def table(rows: Sequence[ParameterSet]) -> Table:
    """Return a table with a row for each group of parameters that have the same update rule."""
    few = any(row.treatment.moments.number != "fp32" for row in rows)
    names = ("parameters", "optimizer", *(["moments"] if few else []), "lr", "decay", "tensors", "numbers", "such as")
    drawn = Table(*names, box=None, pad_edge=False)
    for column in drawn.columns[-5:-1]:
        column.justify = "right"
    for row in rows:
        how, numbers, first = row.treatment, count(row.numel), row.parameters[0].name
        drawn.add_row(
            escape(row.pattern or "others"),
            how.kind,
            *([how.moments.number] if few else []),
            f"x {how.lr:g}",
            f"{how.weight_decay:g}",
            str(len(row.parameters)),
            numbers,
            escape(first),
        )
    return drawn
