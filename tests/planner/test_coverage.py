"""The judgements of intervals, of few known rows and of choices are correct on constructed rows."""

import random
from math import exp
from typing import Any, cast

import pytest

from megalith.cost.doubt import Interval
from megalith.planner.published import coverage
from megalith.planner.published.residuals import Result


def drawn(groups: int, rows: int = 12) -> dict[str, list[float]]:
    draw = random.Random(1)
    return {
        str(group): [draw.gauss(own, 0.05) for _ in range(rows)]
        for group, own in enumerate(draw.gauss(0.1, 0.2) for _ in range(groups))
    }


def test_an_interval_that_holds_all_covers_all_and_one_that_holds_none_none():
    groups = {"a": [0.0, 0.1], "b": [0.05]}
    wide, far = Interval(0.5, 1, 2), Interval(2, 3, 4)
    assert coverage.covered(groups, lambda *_: wide).share == 1
    none = coverage.covered(groups, lambda *_: far)
    assert none.share == 0
    assert none.score > coverage.covered(groups, lambda *_: wide).score


def test_the_score_is_the_width_and_ten_times_what_lies_outside():
    interval = Interval(exp(-0.1), 1, exp(0.1))
    assert coverage.covered({"a": [0.0]}, lambda *_: interval).score == pytest.approx(0.2)
    assert coverage.covered({"a": [0.3]}, lambda *_: interval).score == pytest.approx(0.2 + 10 * 0.2)


def test_intervals_of_known_stacks_are_narrower_and_both_beat_one_for_all():
    groups = drawn(30)
    found = coverage.coverage(groups, coverage.others_of(groups), coverage.one_for_all([groups]))
    assert found["seen"].width < found["unseen"].width
    assert found["seen"].score < found["constant"].score
    for one in (found["seen"], found["unseen"]):
        assert 0.7 <= one.share <= 0.92


def test_three_rows_of_a_stack_make_the_rest_better_and_a_wrong_one_is_named():
    groups = drawn(20)
    found = coverage.few_shot(groups, coverage.others_of(groups), 3)
    assert set(found) == set(groups)
    mean = {name: sum(one[name] for one in found.values()) / len(found) for name in ("before", "after", "named")}
    assert mean["after"] < 0.5 * mean["before"]
    assert mean["named"] > 0.9


class _Row:
    """Make a row with the fields that grouping needs."""

    def __init__(self, layout: str) -> None:
        self.layout = layout

    def text(self, name: str) -> str:
        return self.layout if name == "tp" else "same"


def _result(layout: str, measured: float, predicted: float) -> Result:
    step: Any = type("Time", (), {"step": predicted})
    found: Any = type("Estimate", (), {"time": step})
    return Result(cast(Any, _Row(layout)), "dense", cast(Any, None), found, measured, 0.0)


def test_choosing_loses_what_the_first_takes_longer_than_the_best():
    results = [_result("1", 1.0, 1.3), _result("2", 1.2, 1.0), _result("4", 1.5, 2.0), _result("4", 9.0, 2.0)]
    (one,) = coverage.choosing(results).values()
    assert (one["layouts"], one["pairs"], one["in_order"]) == (3, 3, 2)
    assert one["loss"] == pytest.approx(0.2)
