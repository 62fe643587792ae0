"""Gains of other plans for a run, given how far its own step is from its prediction. No torch, and nothing that takes long to import."""

from collections.abc import Mapping
from dataclasses import dataclass

TERMS = {
    "compute": ("forward", "backward"), "communication": ("communication",), "bubble": ("bubble",), "optimizer": ("optimizer",),
    "other": ("other", "data"),
}  # fmt: skip
"""A term of a predicted step -> the kinds of measured time that it covers."""

NOTABLE = 0.01
"""Share of a step below which a difference or a gain counts as zero."""


@dataclass(frozen=True)
class Try:
    """A change of the plan, and the seconds of a step that it should save. Each term is scaled by its measured over its predicted
    time."""

    change: str
    gain: float


def tries(here: Mapping[str, float], measured: Mapping[str, float], others: Mapping[str, Mapping[str, float]]) -> tuple[Try, ...]:
    """Return which of `others` are worth a try, the most gain first. All are seconds of a step by term: those predicted for the run's own
    plan, those that were measured, and those predicted for each other plan."""
    ratios = {name: measured[name] / here[name] if here[name] else 1.0 for name in TERMS}
    found = (Try(change, sum(ratios[name] * (here[name] - there[name]) for name in TERMS)) for change, there in others.items())
    worth = (one for one in found if one.gain > NOTABLE * sum(measured.values()))
    return tuple(sorted(worth, key=lambda one: -one.gain))
