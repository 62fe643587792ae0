"""The decision about an update, as a pure function."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalith.spec.run import OptimizerSpec, StabilitySpec
from megalith.train.decide import Rerun, Skip, Stop, Update, Vitals, decide

STOP, SKIP = StabilitySpec(), StabilitySpec(not_finite="skip", skips=2)
BAD = (math.nan, math.inf, -math.inf)


@given(norm=st.floats(0, 1e6), clip=st.just(0.0) | st.floats(1e-9, 10), tries=st.integers(0, 1), skipped=st.integers(0, 5))
def test_finite_numbers_are_clipped_to_the_limit_and_never_stop(norm: float, clip: float, tries: int, skipped: int) -> None:
    vitals = Vitals(1.0, norm, skipped=skipped, tries=tries, repeatable=True)
    found = decide(vitals, optimizer=OptimizerSpec(clip=clip), stability=SKIP)
    assert isinstance(found, Update)
    assert found.factor == 1.0 if clip == 0 or norm <= clip else found.factor * norm <= clip
    assert found.factor * norm == pytest.approx(min(norm, clip or norm), rel=1e-5, abs=2e-6)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("where", ["loss", "norm"])
def test_numbers_that_are_not_finite_are_answered_in_turn(bad: float, where: str) -> None:
    numbers = {"loss": 1.0, "norm": 1.0} | {where: bad}

    def answer(stability: StabilitySpec, **rest: int) -> object:
        return decide(Vitals(**numbers, **rest), optimizer=OptimizerSpec(), stability=stability)  # pyright: ignore[reportArgumentType]

    assert answer(STOP, repeatable=True) == answer(SKIP, repeatable=True) == Rerun()
    assert isinstance(answer(STOP, repeatable=True, tries=1), Stop)
    assert isinstance(answer(STOP), Stop)
    assert isinstance(answer(SKIP), Skip)
    assert isinstance(answer(SKIP, skipped=1), Skip)
    full = answer(SKIP, skipped=2)
    assert isinstance(full, Stop) and "stability.skips = 2" in full.reason
