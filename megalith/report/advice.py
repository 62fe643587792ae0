"""Results of branches with other batch sizes, as a table and as a picture."""

import math

from rich.table import Table

from megalith.planner.batch import Advice
from megalith.report import units
from megalith.report.svg import Series, line_chart


def table(advice: Advice) -> Table:
    """Return a row for each batch size: its loss after the same tokens, beside the loss of the run's own batch size."""
    drawn = Table(
        "batch", "tokens a step", "loss", "above the run's", "+-", "verdict", box=None, pad_edge=False, padding=(0, 2, 0, 0)
    )
    for row in advice.rows:
        error = "-" if row.error is None or row.factor == 1 else f"{row.error:.4f}"
        excess, verdict = ("-", "the run's own") if row.factor == 1 else (f"{row.excess:+.4f}", row.verdict)
        drawn.add_row(f"{row.batch:,} (x{row.factor:g})", units.count(row.tokens), f"{row.loss:.4f}", excess, error, verdict)
    return drawn


def picture(advice: Advice) -> str:
    """Draw the excess loss of each batch size over the run's own, with 95 % intervals; a line marks the tolerance."""
    points = [(math.log2(row.factor), row.excess, row.error or 0.0) for row in advice.rows]
    limit = advice.tolerance * next(row.loss for row in advice.rows if row.factor == 1)
    series = [
        Series("loss minus that of the run's batch", [(x, y) for x, y, _ in points], 0, dots=True),
        Series("95 % interval", [(x, y + e) for x, y, e in points], 7),
        Series("", [(x, y - e) for x, y, e in points], 7, faint=True),
    ]
    marks = [(math.log2(row.factor), f"{row.batch:,}") for row in advice.rows]
    label = "doublings of the run's batch (labels above: sequences a step)"
    return line_chart(series, x_label=label, y_format=lambda y: f"{y:.3g}", level=limit, marks=marks)
