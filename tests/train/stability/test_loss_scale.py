"""The loss scale as a value, and its changes."""

from hypothesis import given
from hypothesis import strategies as st

from megalith.spec.run import LossScaleSpec
from megalith.train.stability.loss_scale import LARGEST, Overflow, Scale, exponent_of


def test_it_doubles_after_so_many_updates_in_a_row() -> None:
    spec, scale = LossScaleSpec(initial=16, growth_interval=3), Scale(4)
    values = []
    for _ in range(6):
        scale = scale.updated(spec)
        values.append((scale.value, scale.good))
    assert values == [(16, 1), (16, 2), (32, 0), (32, 1), (32, 2), (64, 0)]


def test_it_is_halved_at_the_second_overflow_since_it_grew_and_at_each_further_one() -> None:
    spec, scale = LossScaleSpec(initial=16, growth_interval=2, hysteresis=2, floor=4), Scale.first(LossScaleSpec(initial=16))
    found = []
    for overflows in (True, False, True, True, False, False, True, True):
        after = scale.overflowed(spec) if overflows else scale.updated(spec)
        assert after is not None
        scale = after
        found.append(int(scale.value))
    assert found == [16, 16, 8, 4, 4, 8, 8, 4] and scale.overflows == 5
    assert scale.overflowed(spec) is None, "at its floor"


@given(st.lists(st.booleans(), max_size=60), st.integers(0, 6), st.integers(0, 6), st.integers(1, 4), st.integers(1, 5))
def test_it_never_leaves_its_range_and_counts_every_overflow(
    answers: list[bool], first: int, floor: int, growth: int, hysteresis: int
) -> None:
    first = max(first, floor)
    spec = LossScaleSpec(initial=2**first, floor=2**floor, growth_interval=growth, hysteresis=hysteresis)
    scale, overflows = Scale.first(spec), 0
    for overflowed in answers:
        after = scale.overflowed(spec) if overflowed else scale.updated(spec)
        if after is None:
            assert scale.exponent == floor and scale.spent >= hysteresis - 1
            return
        overflows += overflowed
        scale = after
        assert floor <= scale.exponent <= LARGEST and 0 <= scale.good < growth and 0 <= scale.spent <= hysteresis
        assert scale.overflows == overflows


def test_it_stops_growing() -> None:
    assert Scale(LARGEST).updated(LossScaleSpec(growth_interval=1)).exponent == LARGEST


def test_a_part_is_named_by_its_tensor() -> None:
    names = {"blocks.12.mlp.up.weight": "blocks.12", "head.output.weight": "head", "embedding.weight": "embedding", "": ""}
    assert {name: Overflow(name, 2.0, 1.0).part for name in names} == names
    assert exponent_of(65_536) == 16
