"""Errors of predictions, and their reduction by a few measured rows. No torch.

A *stack* is software on machines that one source measured. Predictions of a stack's rows are wrong by a common factor, times
a factor of each row:

    log(measured / predicted) = bias + term of the stack (of deviation `between`) + term of the row (of deviation `within`)

The deviations come from published rows, each judged by a fit without its stack. An 80 % interval is as wide, in deviations, as is needed
to hold 80 % of the published rows, if each stack has equal weight (split conformal prediction over groups; Vovk et al. 2005; Barber et
al. 2021, arXiv:1905.02928). For a stack with known rows, the predicted factor moves toward the factor of the known rows, depending on
their number and scatter (the normal model's posterior; Gelman et al. 2013, section 5.4).
"""

import tomllib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from math import exp, log, pi, sqrt
from statistics import median
from typing import NamedTuple

SHARE = 0.8
"""Share of rows that an interval holds."""

NORMAL = 1.4826
"""Standard deviation of a normal distribution, divided by the median distance from its median."""

FEW = {2: 1.196, 3: 1.495, 4: 1.363, 5: 1.206, 6: 1.200, 7: 1.140, 8: 1.129, 9: 1.107}
"""Correction of NORMAL for few values (Croux & Rousseeuw 1992, "Time-efficient algorithms for two highly robust estimators
of scale", section 4); for n > 9 values it is n / (n - 0.8)."""

MEDIAN = pi / 2
"""Variance of the median of many normal values, divided by the variance of their mean."""

KINDS = ("time.dense", "time.expert", "memory")

WRONG = log(1.3)
"""A row with a smaller deviation (of the logarithm) than this is never called wrong."""

FAR = 3.0
"""A row is called wrong if it is more than this number of standard deviations from the estimate of the other rows and all stacks."""


class Residual(NamedTuple):
    """Logarithm of a measured figure over its prediction."""

    name: str
    group: str
    kind: str
    """One of KINDS, or another kind, which no estimate uses."""
    log: float


class Interval(NamedTuple):
    """Factors of a prediction: a measured value is between `low` and `high` in 80 % of cases, and above `middle` in half of
    the cases."""

    low: float
    middle: float
    high: float

    @property
    def half_width(self) -> float:
        """Relative half-width of the interval: the geometric mean of both sides."""
        return sqrt(self.high / self.low) - 1


@dataclass(frozen=True)
class LearnedSpread:
    """Estimate for a stack from some rows: `mean`, the logarithm of the stack's factor; `deviation`, the uncertainty of the mean;
    `within`, the scatter of rows; `wrong`, the indices of ignored rows."""

    mean: float
    deviation: float
    within: float
    wrong: tuple[int, ...] = ()


@dataclass(frozen=True)
class Spread:
    """Errors of the predictions of one kind, as logarithms of measured over predicted."""

    bias: float
    between: float
    within: float
    reach: float
    """Half-width of an interval, in deviations, for software and machines without a measured row."""
    reach_known: float
    """Half-width of an interval, in deviations, for software and machines with some measured rows."""
    groups: int
    """Number of stacks from which the spread was estimated."""
    rows: int

    def learn(self, logs: Sequence[float]) -> LearnedSpread:
        """Return the estimate for a stack from its rows. Rows that are very unlikely given the other rows and all stacks are
        left out, the worst first."""
        left, wrong = dict(enumerate(logs)), list[int]()
        while left:
            gaps = {place: self._gap(place, left) for place in left}
            worst = max(gaps, key=lambda place: gaps[place])
            if gaps[worst] <= 1:
                break
            wrong.append(worst)
            del left[worst]
        return self._posterior(list(left.values()), tuple(sorted(wrong)))

    def _gap(self, place: int, rows: Mapping[int, float]) -> float:
        """Distance of a row from the estimate of the other rows, divided by the distance at which it is called wrong."""
        others = self._posterior([value for other, value in rows.items() if other != place])
        return abs(rows[place] - others.mean) / max(WRONG, FAR * sqrt(others.deviation**2 + others.within**2))

    def _posterior(self, logs: Sequence[float], wrong: tuple[int, ...] = ()) -> LearnedSpread:
        sure = 1 / self.between**2 + len(logs) / self.within**2
        mean = (self.bias / self.between**2 + sum(logs) / self.within**2) / sure
        scatter = sum((value - mean) ** 2 for value in logs)
        within = sqrt((PRIOR * self.within**2 + scatter) / (PRIOR + len(logs)))
        return LearnedSpread(mean, 1 / sqrt(sure), within, wrong)

    def interval(self, learnt: LearnedSpread | None = None) -> Interval:
        """Return the factors of an 80 % interval for a stack, given the estimate from its known rows, if any."""
        known = learnt or self._posterior(())
        reach = self.reach_known if learnt else self.reach
        wide = reach * sqrt(known.deviation**2 + known.within**2)
        return Interval(exp(known.mean - wide), exp(known.mean), exp(known.mean + wide))


PRIOR = 4
"""When a stack's scatter is estimated, the scatter of all stacks counts as this number of additional rows."""


def estimated(residuals: Sequence[Residual]) -> dict[str, Spread]:
    """Return the spread of each kind, from residuals of fits without the row's group."""
    return {kind: spread(by_group(residuals, kind)) for kind in KINDS}


def by_group(residuals: Sequence[Residual], kind: str) -> dict[str, list[float]]:
    """Return the logarithms of one kind by source group."""
    found: dict[str, list[float]] = defaultdict(list)
    for one in residuals:
        if one.kind == kind:
            found[one.group].append(one.log)
    return dict(found)


def spread(groups: Mapping[str, Sequence[float]]) -> Spread:
    """Return the spread of the rows of some groups. To find a `reach`, each group is measured in deviations estimated from the other
    groups, as in predictions."""
    plain = _deviations(groups)
    alone: list[tuple[float, float]] = []
    known: list[tuple[float, float]] = []
    for group, logs in groups.items():
        others = _deviations({name: rows for name, rows in groups.items() if name != group})
        first = others._posterior(())
        alone += [(abs(value - first.mean) / sqrt(first.deviation**2 + first.within**2), 1 / len(logs)) for value in logs]
        for place, value in enumerate(logs) if len(logs) > 1 else ():
            learnt = others._posterior([*logs[:place], *logs[place + 1 :]])
            known.append((abs(value - learnt.mean) / sqrt(learnt.deviation**2 + learnt.within**2), 1 / len(logs)))
    return Spread(
        plain.bias, plain.between, plain.within, quantile(alone, SHARE), quantile(known, SHARE), len(groups), plain.rows
    )


def _deviations(groups: Mapping[str, Sequence[float]]) -> Spread:
    """Return a spread with bias and deviations, but without its `reach`. `bias` and `between` follow from the groups' medians, each with
    equal weight, so that no single bad group determines them. `within` is the root mean square of the deviations inside groups of more than
    two rows.

    `between` is for a stack that is in none of `groups`, so it includes the uncertainty of the bias.
    """
    middles = [median(logs) for logs in groups.values()]
    scatters = [_deviation(logs) for logs in groups.values() if len(logs) > 2]
    bias = median(middles)
    between = _deviation(middles) * sqrt(1 + MEDIAN / len(middles))
    within = sqrt(sum(value**2 for value in scatters) / len(scatters)) if scatters else between
    return Spread(bias, max(between, MINIMUM), max(within, MINIMUM), 1.0, 1.0, len(groups), sum(map(len, groups.values())))


def _deviation(values: Sequence[float]) -> float:
    """Estimate the standard deviation of normal values from the median distance from their median."""
    count, middle = len(values), median(values)
    few = FEW.get(count, count / (count - 0.8) if count > 1 else 1.0)
    return few * NORMAL * median(abs(value - middle) for value in values)


MINIMUM = 0.02
"""Lower bound of a deviation: the noise of repeated measurements."""


def quantile(weighted: Sequence[tuple[float, float]], share: float) -> float:
    """Return the smallest value such that at least this share of the weight is at or below it."""
    total, passed = sum(weight for _, weight in weighted), 0.0
    for value, weight in sorted(weighted):
        passed += weight
        if passed >= share * total:
            return value
    return max((value for value, _ in weighted), default=1.0)


@cache
def bundled() -> Mapping[str, Spread]:
    """Return the spread of each kind in the bundled fit."""
    text = files("megalith.cost").joinpath("doubt.toml").read_text(encoding="utf-8")
    return {kind: Spread(**row) for kind, row in tomllib.loads(text).items()}


def as_toml(spreads: Mapping[str, Spread], *, command: str) -> str:
    """Return the text of doubt.toml."""
    lines = [f"# Errors of predictions, as logarithms of measured over predicted. Written by {command}"]
    for kind, row in spreads.items():
        lines += ["", f'["{kind}"]', *(f"{key} = {_number(value)}" for key, value in vars(row).items())]
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else repr(float(f"{value:.4g}"))
