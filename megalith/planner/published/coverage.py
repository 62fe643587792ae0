"""Evaluation of predictions and their intervals on published rows: coverage and width, few-shot errors, and the cost of
choosing layouts by prediction. Each row's residual is from a fit without its source group, and each group's intervals use the
deviations of the other groups."""

import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import exp, log
from statistics import median
from typing import Any

from megalith.cost.calibrate import mean
from megalith.cost.doubt import SHARE, Interval, Spread, quantile, spread
from megalith.planner.published.residuals import Result

Groups = Mapping[str, Sequence[float]]
"""Logarithms of measured over predicted values, by source group."""

ENOUGH, DRAWS = 8, 20
"""Minimum number of rows of a stack in the few-shot evaluation, and the number of draws of known rows for each stack."""

CLEAR = 1.1
"""Two measured steps differ clearly if their ratio is above this."""


def others_of(groups: Groups) -> Callable[[str], Spread]:
    """Return a function that gives, for a group, the spread of all other groups."""
    known = {group: spread({name: logs for name, logs in groups.items() if name != group}) for group in groups}
    return known.__getitem__


@dataclass(frozen=True)
class Coverage:
    """Score of an interval; every group has the same weight."""

    rows: int
    groups: int
    share: float
    """Share of rows inside their interval."""
    width: float
    """Half-width of the intervals: the median over groups."""
    score: float
    """Mean interval score of the logarithms: width, and ten times how far rows lie outside (Gneiting & Raftery 2007, section 6.2)."""

    def to_json(self) -> dict[str, Any]:
        return vars(self)


def covered(groups: Groups, interval: Callable[[str, int], Interval]) -> Coverage:
    """Return the scores of intervals. `interval`: function from a group and the index of one of its rows to the interval of this row."""
    shares, widths, scores = list[float](), list[float](), list[float]()
    for group, logs in groups.items():
        found = [interval(group, place) for place in range(len(logs))]
        shares.append(mean(one.low <= exp(value) <= one.high for one, value in zip(found, logs, strict=True)))
        widths.append(median(one.half_width for one in found))
        scores.append(mean(_score(one, value) for one, value in zip(found, logs, strict=True)))
    return Coverage(sum(map(len, groups.values())), len(groups), mean(shares), median(widths), mean(scores))


def _score(interval: Interval, value: float) -> float:
    low, high = log(interval.low), log(interval.high)
    return high - low + 2 / (1 - SHARE) * (max(0.0, low - value) + max(0.0, value - high))


def coverage(groups: Groups, others: Callable[[str], Spread], constant: Interval) -> dict[str, Coverage]:
    """Return the scores of three kinds of intervals: for stacks without known rows, for stacks whose other rows are all
    known, and one interval for all rows."""
    alone = {group: others(group).interval() for group in groups}
    several = {group: logs for group, logs in groups.items() if len(logs) > 1}

    def known(group: str, place: int) -> Interval:
        logs, deviations = several[group], others(group)
        return deviations.interval(deviations.learn([*logs[:place], *logs[place + 1 :]]))

    return {
        "unseen": covered(groups, lambda group, _: alone[group]),
        "seen": covered(several, known),
        "constant": covered(groups, lambda *_: constant),
    }


def one_for_all(groups: Sequence[Groups]) -> Interval:
    """Return the single interval that holds four fifths of all rows of all kinds, with equal weight for each group: the
    baseline."""
    weighted = [(value, 1 / len(logs)) for kind in groups for logs in kind.values() for value in logs]
    return Interval(*(exp(quantile(weighted, share)) for share in ((1 - SHARE) / 2, 0.5, (1 + SHARE) / 2)))


def few_shot(groups: Groups, others: Callable[[str], Spread], rows: int) -> dict[str, dict[str, float]]:
    """Return for each stack the median error of its rows that are not known: before any row is known, with some known rows, and with the
    value of one known row doubled; and the share of draws in which the doubled row was detected."""
    found: dict[str, dict[str, float]] = {}
    for group, logs in groups.items():
        if len(logs) < ENOUGH:
            continue
        draw, deviations = random.Random(group), others(group)
        errors: dict[str, list[float]] = defaultdict(list)
        for _ in range(DRAWS):
            places = draw.sample(range(len(logs)), rows)
            taken, rest = [logs[place] for place in places], [v for place, v in enumerate(logs) if place not in places]
            planted = deviations.learn([taken[0] + log(2), *taken[1:]])
            errors["before"].append(_error(rest, 0.0))
            errors["after"].append(_error(rest, deviations.learn(taken).mean))
            errors["planted"].append(_error(rest, planted.mean))
            errors["named"].append(float(0 in planted.wrong))
        found[group] = {name: median(values) if name != "named" else mean(values) for name, values in errors.items()}
        found[group]["worse"] = median(a - b for a, b in zip(errors["after"], errors["before"], strict=True))
    return found


def _error(logs: Sequence[float], factor: float) -> float:
    return median(abs(exp(factor - value) - 1) for value in logs)


def choosing(results: Sequence[Result]) -> dict[str, dict[str, Any]]:
    """Evaluate the choice of a layout in each set of rows of one model, machine and software: the time lost with the layout
    that is predicted to be the fastest, and the number of clear pairs in the right order. A layout that was measured twice
    counts once, with its best time."""
    found: dict[str, dict[str, Any]] = {}
    for name, layouts in sets(results).items():
        first = min(layouts, key=lambda one: one.estimate.time.step)
        measured = [one.seconds or 0.0 for one in layouts]
        pairs = [sorted(pair, key=lambda one: one.seconds or 0.0) for pair in combinations(layouts, 2)]
        clear = [(a, b) for a, b in pairs if (b.seconds or 0.0) > CLEAR * (a.seconds or 0.0)]
        found[name] = {
            "layouts": len(layouts), "loss": (first.seconds or 0.0) / min(measured) - 1, "pairs": len(clear),
            "in_order": sum(a.estimate.time.step < b.estimate.time.step for a, b in clear),
        }  # fmt: skip
    return found


SAME = ("source_group", "model", "hardware", "n_gpus", "seq_len", "precision", "global_batch")
LAYOUT = ("tp", "pp", "vpp", "cp", "ep", "dp", "micro_batch", "recompute", "shard")


def sets(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Return the sets of at least two layouts whose rows agree in everything except the layout."""
    known: dict[str, dict[tuple[str, ...], Result]] = defaultdict(dict)
    for one in results:
        if one.seconds is None or one.kind == "hybrid":
            continue
        key, layout = "/".join(map(one.row.text, SAME)), tuple(map(one.row.text, LAYOUT))
        best = known[key].get(layout)
        if best is None or one.seconds < (best.seconds or 0.0):
            known[key][layout] = one
    return {key: list(layouts.values()) for key, layouts in known.items() if len(layouts) > 1}
