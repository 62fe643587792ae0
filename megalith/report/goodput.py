"""Use of a run's time, measured or simulated, as self-contained pictures."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from megalith.report import svg, units
from megalith.report.svg import Area, Series

if TYPE_CHECKING:
    from megalith.rehearse.simulate import SimulationResult, SweepPoint

COLOURS: dict[str, int] = {
    "useful": 2, "straggling": 4, "data": 8, "validation": 5, "checkpoint": 0, "start-up": 9, "lost steps": 1, "away": 6,
    "recovery": 3, "detection": 7, "waiting for nodes": 6, "fewer nodes": 8, "planned": 5, "waiting for a person": 9,
    "between sites": 10, "other": 10,
}  # fmt: skip
"""Colour of each use of time, in runs (`control.ledger`) and in simulations (`rehearse.simulate`). No two uses of a run have the
same colour, and no two uses of a simulation."""


def shares(accounts: Mapping[str, Mapping[str, float]], *, width: float = 620) -> str:
    """Draw a bar for each account (name -> seconds by cause), with lost time by cause as shares of the wall time. Useful time is
    only stated in the bar's name: at 97 % its bar would leave no room for the other causes.
    """
    rows: dict[str, dict[str, float]] = {}
    for name, seconds in accounts.items():
        wall = sum(seconds.values()) or 1.0
        rows[f"{name}: {units.percent(seconds.get('useful', 0.0) / wall)}"] = {
            cause: value / wall for cause, value in seconds.items() if cause != "useful" and value > 0
        }
    used = {cause for row in rows.values() for cause in row}
    colours = {cause: colour for cause, colour in COLOURS.items() if cause in used}
    return svg.stacked_rows(rows, colours, form=units.percent, x_label="share of the wall time that was not useful", width=width)


def over_time(curves: Sequence[Sequence[tuple[float, float]]], *, width: float = 620) -> str:
    """Draw the goodput until each day, one curve for each seed. The first seed's curve is strong; the others show the spread."""
    others = len(curves) - 1
    series = [
        Series(
            "first seed" if others else "goodput so far",
            [(seconds / 86_400, share) for seconds, share in curve[1:]],
            colour=2 if i == 0 else 6,
            faint=i > 0,
        )
        for i, curve in enumerate(curves)
    ]
    return svg.line_chart(
        [*series[1:], *series[:1]],
        x_label="days",
        y_label="goodput so far",
        y_format=units.percent,
        level=1.0,
        names=[(f"{others} other seed{'s' * (others > 1)}", 6)] if others else [],
        width=width,
    )


def sweep(
    points: "Sequence[SweepPoint]", *, title: str, x_label: str, marks: Sequence[tuple[float, str]] = (), width: float = 620
) -> str:
    """Draw goodput against the swept setting (`rehearse.simulate.SweepPoint`) as a stand-alone picture, with the spread of the
    seeds. `marks`: values of the setting that are marked, with their names."""
    ordered = sorted(points, key=lambda point: point.value)
    spread = [[(point.value, point.band[end]) for point in ordered] for end in (0, 1)]
    series = [
        Series("of all devices paid for", [(point.value, point.per_device) for point in ordered], 0, dots=True),
        Series("goodput", [(point.value, point.goodput) for point in ordered], 2, dots=True),
    ]
    chart = svg.line_chart(
        series,
        x_label=x_label,
        y_label="share of the wall time",
        y_format=units.percent,
        areas=[Area("goodput, 5th to 95th percentile of the seeds", spread[0], spread[1], 6)],
        level=1.0,
        marks=marks,
        width=width,
        height=320,
    )
    return svg.standalone(svg.titled(title, [chart]))


def simulation(result: "SimulationResult") -> str:
    """Draw a simulation as one stand-alone picture: where its time went, and goodput over the days."""
    seconds, plan = {what.value: value for what, value in result.seconds.items()}, result.scenario
    bars, curves = shares({"goodput": seconds}), over_time([life.curve for life in result.lives])
    return svg.standalone(svg.titled(f"{plan.name}, {plan.days:g} days: where the time went", [bars, curves]))
