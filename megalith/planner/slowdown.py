"""Analysis of a run that is slower than predicted: the terms of its step compared with the prediction, and changes to try, sorted by
gain. Imports torch only to trace parts."""

from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from megalith.cost.constants import calibration
from megalith.cost.estimate import Time
from megalith.cost.predicted import workload_of
from megalith.cost.software import hiding
from megalith.planner.explain import neighbours
from megalith.planner.gains import NOTABLE, TERMS, Try, tries
from megalith.planner.measured import newest
from megalith.planner.problems import plan_problems
from megalith.planner.search import Scorer
from megalith.spec.run import RunSpec


@dataclass(frozen=True)
class Term:
    """One term of a step, in seconds."""

    name: str
    predicted: float
    measured: float

    @property
    def over(self) -> float:
        """Measured minus predicted seconds."""
        return self.measured - self.predicted


@dataclass(frozen=True)
class SlowdownReport:
    """A run's step compared with its prediction. `terms` begin with the largest excess, `tries` with the largest gain."""

    name: str
    predicted: float
    measured: float
    terms: tuple[Term, ...]
    tries: tuple[Try, ...]

    @property
    def to_blame(self) -> Term | None:
        """The term that exceeds its prediction most; None if the excess is too small to matter."""
        first = self.terms[0]
        return first if first.over > NOTABLE * self.predicted else None

    def to_json(self) -> dict[str, Any]:
        terms = [vars(one) | {"over": one.over} for one in self.terms]
        blamed = self.to_blame
        return {
            "run": self.name, "predicted": self.predicted, "measured": self.measured, "terms": terms,
            "to_blame": blamed.name if blamed else None, "tries": [vars(one) for one in self.tries],
        }  # fmt: skip


def slowdown(folder: Path, *, tried: bool = True) -> SlowdownReport:
    """Compare the run in a folder with its prediction. `tried`: predict other plans too. Raises ValueError if the run names
    no cluster or has too few steps."""
    spec, steps = newest(folder)
    here = by_term(Scorer(calibration()).estimate(workload_of(spec)).time)
    measured = {
        name: median(sum(step.breakdown.get(kind, 0.0) for kind in kinds) for step in steps) for name, kinds in TERMS.items()
    }
    terms = [Term(name, here[name], measured[name]) for name in TERMS]
    return SlowdownReport(
        folder.name, sum(here.values()), median(step.seconds for step in steps),
        tuple(sorted(terms, key=lambda one: -one.over)), tries(here, measured, alternatives(spec)) if tried else (),
    )  # fmt: skip


def alternatives(spec: RunSpec) -> dict[str, dict[str, float]]:
    """Predict the terms of a step under each plan that differs from the run's in one choice, is valid and fits. Raises ValueError
    for a run that cannot be predicted."""
    workload, scorer, found = workload_of(spec), Scorer(calibration()), dict[str, dict[str, float]]()
    for change, plan in neighbours(workload):
        other = replace(
            workload, plan=plan, software_profile=hiding(plan, replace(workload.software_profile, overlap_expert=False))
        )
        if not plan_problems(spec, plan) and scorer.fits(other, scorer.held(other)):
            found[change] = by_term(scorer.estimate(other).time)
    return found


def by_term(time: Time) -> dict[str, float]:
    """Return the seconds of a predicted step by term; the names are those of TERMS."""
    return {
        "compute": time.compute, "communication": time.exposed, "bubble": time.bubble, "optimizer": time.optimizer, "other": time.other,
    }  # fmt: skip
