"""Why a run is slower than predicted: the terms of its step beside those of the prediction, and what to try, by what that would gain. No
torch unless a part must be traced."""

from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from megalith.cost.constants import calibration
from megalith.cost.estimate import Time
from megalith.cost.foreseen import of_run
from megalith.planner.asked import refusals
from megalith.planner.explain import neighbours
from megalith.planner.measured import spec_of, steps_of
from megalith.planner.search import Scorer, hiding

TERMS = {
    "compute": ("forward", "backward"), "communication": ("communication",), "bubble": ("bubble",), "optimizer": ("optimizer",),
    "other": ("other", "data"),
}  # fmt: skip
"""A term of a predicted step -> the kinds of a measured one that it stands for."""

NOTABLE = 0.01
"""Share of a step below which a difference or a gain is none."""


@dataclass(frozen=True)
class Term:
    """One term of a step, in seconds."""

    name: str
    predicted: float
    measured: float

    @property
    def over(self) -> float:
        """Seconds that it takes longer than predicted."""
        return self.measured - self.predicted


@dataclass(frozen=True)
class Try:
    """A change of the plan, and the seconds of a step that it should gain, each term taken as much longer as it was measured."""

    change: str
    gain: float


@dataclass(frozen=True)
class Slower:
    """A run's step beside its prediction: the terms that take longest over it first, and what to try, the most gain first."""

    name: str
    predicted: float
    measured: float
    terms: tuple[Term, ...]
    tries: tuple[Try, ...]

    @property
    def to_blame(self) -> Term | None:
        """The term that takes longest over its prediction; None if none does notably."""
        first = self.terms[0]
        return first if first.over > NOTABLE * self.predicted else None

    def to_json(self) -> dict[str, Any]:
        terms = [vars(one) | {"over": one.over} for one in self.terms]
        blamed = self.to_blame
        return {
            "run": self.name, "predicted": self.predicted, "measured": self.measured, "terms": terms,
            "to_blame": blamed.name if blamed else None, "tries": [vars(one) for one in self.tries],
        }  # fmt: skip


def slower(folder: Path) -> Slower:
    """Compare the run in a folder with its prediction. Raises ValueError if it names no cluster or has too few steps."""
    spec, steps = spec_of(folder), steps_of(folder)
    workload, scorer = of_run(spec), Scorer(calibration())
    here = by_term(scorer.estimate(workload).time)
    measured = {
        name: median(sum(step.breakdown.get(kind, 0.0) for kind in kinds) for step in steps) for name, kinds in TERMS.items()
    }
    terms = [Term(name, here[name], measured[name]) for name in TERMS]
    ratios = {one.name: one.measured / one.predicted if one.predicted else 1.0 for one in terms}
    tries = list[Try]()
    for change, plan in neighbours(workload):
        other = replace(workload, plan=plan, practice=hiding(plan, replace(workload.practice, overlap_expert=False)))
        if not refusals(spec, plan) and scorer.fits(other, scorer.held(other)):
            there = by_term(scorer.estimate(other).time)
            gain = sum(ratios[name] * (here[name] - there[name]) for name in TERMS)
            tries += [Try(change, gain)] if gain > NOTABLE * sum(measured.values()) else []
    return Slower(
        folder.name, sum(here.values()), median(step.seconds for step in steps),
        tuple(sorted(terms, key=lambda one: -one.over)), tuple(sorted(tries, key=lambda one: -one.gain)),
    )  # fmt: skip


def by_term(time: Time) -> dict[str, float]:
    """Return the seconds of a predicted step by the names of TERMS."""
    return {
        "compute": time.compute, "communication": time.exposed, "bubble": time.bubble, "optimizer": time.optimizer, "other": time.other,
    }  # fmt: skip
