"""The learning rate follows its schedule."""

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megalith.spec.run import BranchSpec, OptimizerSpec
from megalith.train.optimizers.rates import decays, learning_rate

LR = 3e-3
SCHEDULES = ["cosine", "linear", "wsd", "1-sqrt", "constant"]
DECAY_LATE = ("wsd", "1-sqrt")


def rates(steps: int, **spec: Any) -> list[float]:
    return [learning_rate(step, spec=OptimizerSpec.model_validate({"lr": LR} | spec), steps=steps) for step in range(steps)]


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    schedule=st.sampled_from(SCHEDULES),
    steps=st.integers(1, 400),
    warmup=st.integers(0, 400),
    decay=st.floats(0, 1),
    min_lr_ratio=st.floats(0, 1),
)
def test_rates_climb_in_equal_steps_and_then_never_rise_again(schedule, steps, warmup, decay, min_lr_ratio):
    assume(
        warmup <= steps and (schedule not in DECAY_LATE or warmup + round(decay * steps) <= steps)
    )  # other values are refused beforehand
    found = rates(steps, schedule=schedule, warmup=warmup, decay=decay, min_lr_ratio=min_lr_ratio)
    assert found[:warmup] == pytest.approx([LR * (step + 1) / warmup for step in range(warmup)])
    after = found[warmup:]
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in pairwise(after))
    low = LR * min_lr_ratio
    assert all(low - 1e-15 <= rate <= LR + 1e-15 for rate in after)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(schedule=st.sampled_from(SCHEDULES), steps=st.integers(5, 400), warmup=st.integers(1, 300), min_lr_ratio=st.floats(0, 1))
def test_the_end_of_warm_up_is_the_peak_on_both_sides(schedule, steps, warmup, min_lr_ratio):
    assume(warmup < steps * 0.7)  # wsd: decay begins later
    found = rates(steps, schedule=schedule, warmup=warmup, min_lr_ratio=min_lr_ratio)
    assert found[warmup - 1] == pytest.approx(LR)
    assert found[warmup] == pytest.approx(LR)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    schedule=st.sampled_from(["cosine", "linear", "wsd", "1-sqrt"]),
    steps=st.integers(2, 400),
    warmup=st.integers(0, 200),
    min_lr_ratio=st.floats(0, 1),
)
def test_the_last_step_has_the_lowest_rate(schedule, steps, warmup, min_lr_ratio):
    assume(warmup < steps - 1)
    assert rates(steps, schedule=schedule, warmup=warmup, min_lr_ratio=min_lr_ratio)[-1] == pytest.approx(
        LR * min_lr_ratio, abs=1e-12
    )


def test_wsd_stays_on_its_plateau_and_then_falls_in_a_line():
    found = rates(100, schedule="wsd", warmup=10, decay=0.2, min_lr_ratio=0.1)
    assert found[9:79] == pytest.approx([LR] * 70)
    falls = [a - b for a, b in pairwise(found[80:])]
    assert found[80] < LR and falls == pytest.approx([falls[0]] * len(falls))


def test_cosine_is_half_way_in_the_middle_and_flat_at_its_ends():
    found = rates(101, schedule="cosine", warmup=0, min_lr_ratio=0.2)
    assert found[50] == pytest.approx(LR * 0.6)
    assert found[0] - found[1] < (found[50] - found[51]) / 10
    assert found[25] == pytest.approx(LR * (0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi / 4))))


def test_1_sqrt_falls_fast_at_first_and_is_half_way_at_a_quarter():
    found = rates(1001, schedule="1-sqrt", warmup=10, decay=0.2, min_lr_ratio=0.1)
    assert found[9:800] == pytest.approx([LR] * 791)
    assert found[850] == pytest.approx(LR * (0.1 + 0.9 * 0.5), rel=0.02)  # a quarter of the decay is over
    falls = [a - b for a, b in pairwise(found[801:])]
    assert all(later <= earlier for earlier, later in pairwise(falls))


@pytest.mark.parametrize(("share", "updates"), [("2%", 8), ("2.5%", 10), ("0%", 0), ("0.01%", 1), ("100%", 400)])
def test_a_share_of_the_steps_warms_up_as_that_number_of_updates(share: str, updates: int):
    assert rates(400, warmup=share) == rates(400, warmup=updates)


@pytest.mark.parametrize("wrong", ["2", "%", "-1%", "101%", "nan%", 2.0, True, -1, None])
def test_what_is_neither_a_number_of_updates_nor_a_share_is_refused(wrong: Any):
    with pytest.raises(ValueError):
        OptimizerSpec(warmup=wrong)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_decay_is_where_the_rate_of_a_late_decay_has_begun_to_fall(schedule: str) -> None:
    spec = OptimizerSpec.model_validate({"lr": LR, "schedule": schedule, "warmup": 10, "decay": 0.2})
    found = [decays(update, spec=spec, steps=100) for update in range(100)]
    late = schedule in DECAY_LATE
    assert found == [
        late and update >= 10 and rate < LR for update, rate in enumerate(rates(100, schedule=schedule, warmup=10, decay=0.2))
    ]


def test_a_branch_decays_from_its_first_update_on() -> None:
    spec = OptimizerSpec(lr=LR, schedule="constant")
    branch = BranchSpec(checkpoint="other", samples=0, updates=40, steps=100, decay=10)
    assert [decays(update, spec=spec, steps=50, branch=branch) for update in (39, 40, 49)] == [False, True, True]
