"""Predicted gains of other plans for a run, corrected by the measured step of its own plan. Imports neither torch nor other slow
packages."""

from collections.abc import Mapping
from dataclasses import dataclass

TERMS = {
    "compute": ("forward", "backward"), "communication": ("communication",), "bubble": ("bubble",), "optimizer": ("optimizer",),
    "other": ("other", "data"),
}  # fmt: skip
"""Term of a predicted step -> the kinds of measured time that the term covers."""

NOTABLE = 0.01
"""Share of a step below which a difference or a gain counts as zero."""


@dataclass(frozen=True)
class Try:
    """A change of the plan, and the seconds of a step that the change should save. Each predicted term is scaled by the ratio
    of measured to predicted time under the run's plan."""

    change: str
    gain: float


def tries(here: Mapping[str, float], measured: Mapping[str, float], others: Mapping[str, Mapping[str, float]]) -> tuple[Try, ...]:
    """Return the changes in `others` that are worth a try, the largest gain first. The arguments are seconds of a step by
    term: predicted for the run's plan, measured under it, and predicted for each other plan."""
    ratios = {name: measured[name] / here[name] if here[name] else 1.0 for name in TERMS}
    found = (Try(change, sum(ratios[name] * (here[name] - there[name]) for name in TERMS)) for change, there in others.items())
    worth = (one for one in found if one.gain > NOTABLE * sum(measured.values()))
    return tuple(sorted(worth, key=lambda one: -one.gain))
