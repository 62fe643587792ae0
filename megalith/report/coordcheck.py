"""The result of a coordinate check, as tables and as a picture."""

import math
from collections.abc import Sequence

from rich.table import Column, Table

from megalith.prove.coordcheck import QUANTITIES, CoordinateCheck
from megalith.report.svg import Series, line_chart, titled


def table(checked: CoordinateCheck, limit: float) -> Table:
    """Return a row for each quantity: its RMS at the step with the steepest slope, this slope, and the slope after the last step."""
    what = "width" if checked.axis == "width" else "number of blocks"
    title = f"{checked.parametrization}: root mean square by {what}"
    columns = [Column(name, no_wrap=True) for name in ("quantity", "step", *map(str, checked.sizes), "slope", "at the end", "")]
    drawn = Table(*columns, title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for quantity in QUANTITIES:
        steepest = checked.steepest(quantity)
        last = next(one for one in reversed(checked.series) if one.quantity == quantity)
        verdict = "flat" if abs(steepest.slope) <= limit else "grows" if steepest.slope > 0 else "shrinks"
        values = [f"{value:.3g}" for value in steepest.rms]
        drawn.add_row(quantity, str(steepest.step), *values, f"{steepest.slope:+.2f}", f"{last.slope:+.2f}", verdict)
    return drawn


def picture(found: Sequence[CoordinateCheck]) -> str:
    """Draw, for each parametrization and axis, every quantity after the last step against the size, on log2 axes."""
    parts = []
    for one in found:
        last = {series.quantity: series for series in one.series}
        curves = [
            Series(name, list(zip(map(math.log2, one.sizes), map(math.log2, last[name].rms), strict=True)), number, dots=True)
            for number, name in enumerate(QUANTITIES)
            if all(value > 0 and math.isfinite(value) for value in last[name].rms)
        ]
        label = f"{one.parametrization}: log2 of the {'width' if one.axis == 'width' else 'number of blocks'}"
        parts.append(line_chart(curves, x_label=label, y_label="log2 RMS after the last step", y_format=lambda y: f"{y:.1f}"))
    return titled("Coordinate check", parts)
