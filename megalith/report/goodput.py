"""Where a run's time went, measured or simulated, as self-contained pictures."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from megalith.report import svg, units
from megalith.report.svg import Series

if TYPE_CHECKING:
    from megalith.rehearse.simulate import Simulated, Tried

COLOURS: dict[str, int] = {
    "useful": 2, "straggling": 4, "data": 7, "validation": 5, "checkpoint": 0, "start-up": 5, "lost steps": 1, "away": 6,
    "recovery": 3, "detection": 7, "waiting for nodes": 6, "fewer nodes": 4, "planned": 5, "waiting for a person": 6,
    "between sites": 7, "other": 6,
}  # fmt: skip
"""Colour of each thing that time goes to, in runs (`control.ledger`) and in simulations (`rehearse.simulate`)."""


def shares(accounts: Mapping[str, Mapping[str, float]], *, width: float = 620) -> str:
    """A bar for each account (name -> seconds by cause): what is not useful, as shares of its wall time, so that small parts show.

    Useful time is not drawn: at 97 % it would leave no room for what is to be compared. It stands in each bar's name.
    """
    rows: dict[str, dict[str, float]] = {}
    for name, seconds in accounts.items():
        wall = sum(seconds.values()) or 1.0
        rows[f"{name}: {units.percent(seconds.get('useful', 0.0) / wall)}"] = {
            cause: value / wall for cause, value in seconds.items() if cause != "useful" and value > 0
        }
    used = {cause for row in rows.values() for cause in row}
    colours = {cause: colour for cause, colour in COLOURS.items() if cause in used}
    return svg.stacked_rows(rows, colours, form=units.percent, width=width)


def over_time(curves: Sequence[Sequence[tuple[float, float]]], *, width: float = 620) -> str:
    """Goodput so far by day, one curve a seed; the first is drawn strong, the others show the spread."""
    series = [
        Series(
            "goodput so far" if i == 0 else f"seed {i}",
            [(seconds / 86_400, share) for seconds, share in curve[1:]],
            colour=2 if i == 0 else 6,
            faint=i > 0,
        )
        for i, curve in enumerate(curves)
    ]
    return svg.line_chart(
        [*series[1:], *series[:1]], x_label="days (goodput so far, a curve a seed)", y_format=units.percent, width=width
    )


def tried(points: "Sequence[Tried]", *, x_label: str, width: float = 620) -> str:
    """Goodput by a setting that was tried out (`rehearse.simulate.Tried`), with the 5th and 95th percentile of the seeds."""
    ordered = sorted(points, key=lambda point: point.value)
    series = [
        Series("goodput", [(point.value, point.goodput) for point in ordered], 2, dots=True),
        Series("5 %", [(point.value, point.band[0]) for point in ordered], 6),
        Series("95 %", [(point.value, point.band[1]) for point in ordered], 6),
        Series("of all devices paid for", [(point.value, point.per_device) for point in ordered], 0, dots=True),
    ]
    return svg.line_chart(series, x_label=x_label, y_format=units.percent, width=width)


def simulated(result: "Simulated") -> str:
    """A simulation as one stand-alone picture: what time went to, and goodput over the days."""
    seconds = {what.value: value for what, value in result.seconds.items()}
    bars, curves = shares({result.scenario.name: seconds}), over_time([life.curve for life in result.lives])
    return svg.standalone(_stacked(bars, curves))


def _stacked(above: str, below: str) -> str:
    """One picture over another."""
    sizes = [[float(number) for number in one.partition('viewBox="')[2].partition('"')[0].split()] for one in (above, below)]
    width, height = max(size[2] for size in sizes), sum(size[3] for size in sizes)
    # groups, not pictures in a picture: STYLE gives every svg element the width of what it stands in
    placed = "".join(
        f'<g transform="translate(0,{top:g})">{one[one.index(">") + 1 : one.rindex("</svg>")]}</g>'
        for one, top in zip((above, below), (0.0, sizes[0][3]), strict=True)
    )
    return svg.picture(width, height, placed, "goodput")
