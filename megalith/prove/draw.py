"""Plans drawn at random so that every compatible pair of choices occurs: `parity --random` runs these plans to prove any
combination.

Most faults of combinations need two choices to meet (Kuhn et al. 2004, "Software fault interactions"). A sample with every pair
of values of any two axes therefore finds most faults, and further draws look for faults that need three choices.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heapreplace
from itertools import combinations
from random import Random

from megalith.check import Problem
from megalith.prove.axes import (
    AXES,
    BELOW_FP32,
    ROUNDED,
    Axes,
    Choice,
    Choices,
    Pair,
    ParityCase,
    conflicts,
    cost_of,
    halvings,
    pairs_of,
    run_of,
    valid_run,
)

FIRST = dict.fromkeys(
    ("dp_shard", "dp_replicate", "tensor", "context", "pipeline", "expert", "retain", "phases", "moments", "clipping"), 0.5
) | {"precision": 0.9, "sites": 0.8}
"""Probability that an axis keeps its first value without a draw. Without a preference for first values, nearly every combination
would have too many ranks. The first precision is preferred because faults show best in it."""

TRIES = 600
"""The least number of random combinations from which draws are chosen; for many draws, eight times their number."""

SWEEPS = 2
"""A search for a valid combination changes one choice at a time. The search ends after this many rounds over all possible changes
in which the number of conflicts does not fall."""

RETRIES = 2
"""Number of searches for a combination with a given pair, each from another combination, after which no draw covers this pair."""

SEARCHES = 3
"""Number of searches, each from another combination, after which a pair counts as impossible. One search is enough if a conflict
remains whichever choice is changed."""


def draw(count: int | None, seed: int, axes: Axes = AXES) -> list[ParityCase]:
    """Return `count` distinct valid combinations of values of `axes`. The first combinations cover all possible pairs of choices,
    as far as `count` allows; with `count=None`, only these are returned. The same seed gives the same combinations."""
    random = Random(seed)
    pool = _pool(random, max(TRIES, 8 * (count or 0)), axes)
    chosen = [] if count is None else _cover(random, pool, axes, count)
    if count is None or len(chosen) < count:  # few draws show no pair that is rarely met: do not look for these
        pool += _missing(random, pool, axes)
        chosen = _cover(random, pool, axes, count)
    if count is None:
        return _needed(chosen)
    known = {one.choices for one in chosen}
    rest = [one for one in pool if one.choices not in known]
    further = random.sample(rest, max(0, min(len(rest), count - len(chosen))))
    return chosen + sorted(further, key=lambda one: one.name)


def _cover(random: Random, pool: Sequence[ParityCase], axes: Axes, count: int | None) -> list[ParityCase]:
    """Return draws that cover all pairs of a pool, as far as `count` allows. The next draw is always the combination with the
    most uncovered pairs for its cost; then its choices are changed one by one so that it covers more pairs.

    The number of uncovered pairs of a combination only falls as other draws are chosen. An earlier number of a combination's
    uncovered pairs is therefore an upper bound, and few combinations must be examined again (Minoux 1978).
    """
    left = frozenset[Pair]().union(*(one.pairs for one in pool))
    bounds = [(-_worth(one.choices, left), number) for number, one in enumerate(pool)]
    heapify(bounds)
    chosen: list[ParityCase] = []
    while left and (count is None or len(chosen) < count):
        number = bounds[0][1]
        now = (-_worth(pool[number].choices, left), number)
        if now > bounds[0]:
            heapreplace(bounds, now)
            continue
        chosen.append(_climbed(random, pool[number], axes, left))
        left -= chosen[-1].pairs
    return chosen


def _worth(choices: Choices, left: frozenset[Pair]) -> float:
    return len(pairs_of(choices) & left) / cost_of(choices)


def _climbed(random: Random, one: ParityCase, axes: Axes, left: frozenset[Pair]) -> ParityCase:
    before = None
    while one is not before:
        before = one
        for axis in random.sample([*axes], len(axes)):
            worth = _worth(one.choices, left)
            others = ((_worth(other, left), other) for other in (_changed(one.choices, axis, value) for value in axes[axis]))
            for _, other in sorted((pair for pair in others if pair[0] > worth), reverse=True):
                if (spec := valid_run(other)) is not None:
                    one = ParityCase(other, spec)
                    break
    return one


def _needed(chosen: Sequence[ParityCase]) -> list[ParityCase]:
    times = Counter(pair for one in chosen for pair in one.pairs)
    needless = set[Choices]()
    for one in sorted(chosen, key=lambda one: cost_of(one.choices), reverse=True):
        if all(times[pair] > 1 for pair in one.pairs):
            needless.add(one.choices)
            times.subtract(one.pairs)
    return [one for one in chosen if one.choices not in needless]


def uncovered(draws: Sequence[ParityCase], axes: Axes = AXES) -> list[Pair]:
    """Return the pairs of choices that no draw covers."""
    shown = frozenset[Pair]().union(*(one.pairs for one in draws))
    return [pair for pair in _every(axes) if pair not in shown]


def conflict_of(pair: Pair) -> list[Problem]:
    """Return the conflicts of a pair of choices that remain whatever the other choices are; none if a combination can prove the
    pair."""
    return _search(Random(0), pair, AXES)[1]


def _every(axes: Axes) -> Iterator[Pair]:
    for axis, other in combinations(axes, 2):
        for value in axes[axis]:
            for theirs in axes[other]:
                yield frozenset({(axis, value), (other, theirs)})


def _pool(random: Random, tries: int, axes: Axes) -> list[ParityCase]:
    tried = dict.fromkeys(_any(random, (), axes) for _ in range(tries))
    return [ParityCase(choices, spec) for choices in tried if (spec := valid_run(choices)) is not None]


def _missing(random: Random, pool: Sequence[ParityCase], axes: Axes) -> list[ParityCase]:
    found, shown = list[ParityCase](), set[Pair]()
    for pair in uncovered(pool, axes):
        if pair in shown:
            continue
        if one := next(filter(None, (_search(random, pair, axes)[0] for _ in range(RETRIES))), None):
            found.append(one)
            shown |= one.pairs
    return found


def _search(random: Random, pair: Pair, axes: Axes) -> tuple[ParityCase | None, list[Problem]]:
    """Search for a combination that proves a pair, starting from several combinations. If no combination is found, return None
    and the smallest list of conflicts that remained."""
    if not BELOW_FP32 & pair:  # which rounded precisions do not prove
        exact = {name: asked for name, asked in axes["precision"].items() if ("precision", name) not in ROUNDED}
        if not exact:
            return None, []
        axes = {**axes, "precision": exact}
    found = list[list[Problem]]()
    for _ in range(SEARCHES):
        choices, left, stays = _without_objections(random, pair, axes)
        if not left:
            return ParityCase(choices, run_of(choices)), []
        found.append(left)
        if stays:
            break
    return None, min(found, key=len)


def _without_objections(random: Random, pair: Pair, axes: Axes) -> tuple[Choices, list[Problem], bool]:
    """Start from a random combination with the pair, and change its other choices one at a time, accepting no change that adds
    conflicts. If there are too many ranks, each necessary halving of their number counts as one conflict. Return the combination,
    its conflicts, and True if some conflicts stay whichever choice is changed; if so, only the conflicts that stay are
    returned."""
    choices = _any(random, pair, axes)
    left, before = list(conflicts(choices)), halvings(choices)
    changes, idle = [(axis, value) for axis in axes if axis not in dict(pair) for value in axes[axis]], 0
    while left and idle < SWEEPS:
        idle, stay = idle + 1, {*map(str, left)}
        for axis, value in random.sample(changes, len(changes)):
            other = _changed(choices, axis, value)
            problems, after = list(conflicts(other)), halvings(other)
            stay.intersection_update(map(str, problems))
            if len(problems) + after > len(left) + before:
                continue
            idle = idle if len(problems) + after == len(left) + before else 0
            choices, left, before = other, problems, after
            if not left:
                break
        if stay:
            return choices, [problem for problem in left if str(problem) in stay], True
    return choices, left, False


def _any(random: Random, fixed: Iterable[Choice], axes: Axes) -> Choices:
    known = dict(fixed)
    return tuple((axis, known.get(axis) or _value(random, axis, axes)) for axis in axes)


def _value(random: Random, axis: str, axes: Axes) -> str:
    values = list(axes[axis])
    return values[0] if random.random() < FIRST.get(axis, 0.0) else random.choice(values)


def _changed(choices: Choices, axis: str, value: str) -> Choices:
    return tuple((each, value if each == axis else old) for each, old in choices)
