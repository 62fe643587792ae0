"""Table of an optimizer's rule for each parameter."""

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from megalith.report.units import count
from megalith.spec.treatment import Treated


def table(rows: Sequence[Treated]) -> Table:
    """A row for each group of parameters that are updated alike."""
    drawn = Table("parameters", "optimizer", "lr", "decay", "tensors", "numbers", "such as", box=None, pad_edge=False)
    for column in drawn.columns[2:6]:
        column.justify = "right"
    for row in rows:
        how, numbers, first = row.treatment, count(row.numel), row.parameters[0].name
        drawn.add_row(
            escape(row.pattern or "others"),
            how.kind,
            f"x {how.lr:g}",
            f"{how.weight_decay:g}",
            str(len(row.parameters)),
            numbers,
            escape(first),
        )
    return drawn
