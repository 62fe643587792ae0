"""Intervals contain their stated share of rows, and a user's own rows count according to their reliability."""

import random
from math import exp, log, sqrt

import pytest

from megalith.cost.doubt import KINDS, Residual, Spread, _deviation, as_toml, bundled, by_group, estimated, quantile, spread

SPREAD = Spread(bias=0.05, between=0.15, within=0.08, reach=1.4, reach_known=1.4, groups=10, rows=100)


def drawn(seed: int, groups: int = 40, rows: int = 12) -> dict[str, list[float]]:
    """Draw stacks and rows, each with random factors of error."""
    draw = random.Random(seed)
    return {
        str(group): [draw.gauss(own, 0.08) for _ in range(rows)]
        for group, own in enumerate(draw.gauss(0.1, 0.2) for _ in range(groups))
    }


def test_intervals_of_80_percent_hold_80_percent_of_rows_of_new_stacks():
    known, new = spread(drawn(0)), drawn(1, groups=300)
    low, _, high = known.interval()
    inside = [low <= exp(value) <= high for logs in new.values() for value in logs]
    assert 0.75 <= sum(inside) / len(inside) <= 0.9


def test_deviations_are_found_again():
    known = spread(drawn(2, groups=200))
    assert (known.bias, known.between, known.within) == pytest.approx((0.1, 0.2, 0.08), abs=0.04)


@pytest.mark.parametrize("count", [2, 3, 4, 7, 10, 30])
def test_the_deviation_of_few_values_is_not_too_small(count: int):
    """Without the correction, four values would show 0.73 of their deviation."""
    draw = random.Random(count)
    found = [_deviation([draw.gauss(5.0, 1.0) for _ in range(count)]) for _ in range(4000)]
    assert sum(found) / len(found) == pytest.approx(1.0, abs=0.05)


def test_few_stacks_say_less_about_another_one():
    """Their rows are alike, so a row of another stack is followed further if few stacks are known: their bias is uncertain."""
    few, many = ({str(n): [own, own + 0.02, own - 0.02] for n, own in enumerate([-0.1, 0.1] * times)} for times in (1, 30))
    moved = [spread(groups).learn([0.2]).mean for groups in (few, many)]
    assert moved[0] > moved[1] > 0


def test_rows_of_a_stack_narrow_its_interval_and_move_it_toward_them():
    none, one, three = (SPREAD.interval(SPREAD.learn([0.3] * rows) if rows else None) for rows in (0, 1, 3))
    assert none.half_width > one.half_width > three.half_width
    assert none.middle < one.middle < three.middle < exp(0.3)


def test_a_row_is_followed_by_how_much_it_can_be_trusted():
    """The normal model says how far: by the ratio of the stacks' variance to the sum of the stacks' and the rows' variances."""
    learnt = SPREAD.learn([0.2])
    share = SPREAD.between**2 / (SPREAD.between**2 + SPREAD.within**2)
    assert learnt.mean == pytest.approx(SPREAD.bias + share * (0.2 - SPREAD.bias))
    assert learnt.deviation == pytest.approx(SPREAD.within * sqrt(share))


@pytest.mark.parametrize("others", [[], [0.1], [0.1, 0.12], [0.02, 0.1, 0.15, 0.08]])
@pytest.mark.parametrize("wrong", [log(2), -log(2)])
def test_a_row_that_is_wrong_by_a_factor_of_two_is_named_and_not_followed(others: list[float], wrong: float):
    learnt = SPREAD.learn([*others, 0.1 + wrong])
    assert learnt.wrong == (len(others),)
    assert learnt.mean == pytest.approx(SPREAD.learn(others).mean)


def test_a_stack_that_is_twice_as_slow_as_all_others_is_believed_once_its_rows_agree():
    assert SPREAD.learn([0.68, 0.7, 0.69, 0.71, 0.7]).wrong == ()


def test_rows_that_agree_with_the_others_are_not_named():
    assert SPREAD.learn([0.1, 0.2, 0.05, 0.15]).wrong == ()


def test_groups_weigh_alike():
    many = {"a": [0.5] * 500, "b": [0.0, 0.01], "c": [0.02, 0.0]}
    assert spread(many).bias < 0.1


def test_a_weighted_quantile_is_the_plain_one_of_equal_weights():
    values = [(float(n), 1.0) for n in range(1, 11)]
    assert quantile(values, 0.8) == 8
    assert quantile([*values, (100.0, 0.0)], 1.0) == 10


def test_what_is_written_is_what_is_read():
    rows = [Residual(str(n), f"g{n % 5}", kind, n / 100) for n in range(30) for kind in KINDS]
    assert by_group(rows, "memory")["g0"][:2] == [0.0, 0.05]
    text = as_toml(estimated(rows), command="again")
    assert text.count("[") == len(KINDS)


def test_the_bundled_spreads_are_of_each_kind_and_can_be_used():
    for kind in KINDS:
        one = bundled()[kind]
        assert one.groups > 3 and one.between > 0 and one.within > 0
        assert one.interval().low < one.interval().middle < one.interval().high
