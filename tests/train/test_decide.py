"""The decision about an update, as a pure function."""

import json
import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalith.events import EarlyUpdatesPaused
from megalith.spec.run import LossScaleSpec, OptimizerSpec, StabilitySpec
from megalith.train.decide import (
    MAXIMUM,
    WINDOW,
    Decision,
    EarlyUpdates,
    Rerun,
    Rewind,
    Skip,
    Stop,
    Update,
    Vitals,
    decide,
    known_after,
)
from megalith.train.stability.history import History, room
from megalith.train.stability.loss_scale import Scale

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


# --- spikes ---

LADDER = StabilitySpec(answers=("skip", "rewind", "lower", "stop"), window=32, patience=2, rewinds=2, margin=3)
KNOWN = History(losses=(3.0,) * 32, norms=(1.0,) * 32)


def answer(history: History, stability: StabilitySpec = LADDER, **vitals: Any) -> Decision:
    known = {"loss": 9.0, "norm": 1.0, "step": 40, "updates": 40, "tries": 1, "attended": True} | vitals
    return decide(Vitals(**known), optimizer=OptimizerSpec(clip=0), stability=stability, history=history)


def test_the_first_step_of_a_spike_is_computed_again() -> None:
    assert answer(KNOWN, tries=0) == Rerun("spike")
    assert isinstance(answer(KNOWN.strayed(39), tries=0), Skip)
    assert isinstance(answer(KNOWN, tries=0, attended=False), Skip), "there is nobody to compute it again"


def test_a_step_little_outside_is_answered_if_the_next_one_is_outside_too() -> None:
    """It is computed again at once, because its numbers may be a computing error; two steps in a row go back before the first."""
    assert answer(KNOWN, loss=3.9, tries=0) == Rerun("spike")
    assert answer(KNOWN, loss=3.9) == answer(KNOWN, loss=3.9, sound=False) == Update()
    once = known_after(Update(), Vitals(3.9, 1.0, step=40, updates=40), stability=LADDER, history=KNOWN)
    assert once.suspects
    assert answer(once, loss=3.9, step=41, tries=0) == Rerun("spike")
    assert isinstance(answer(once, loss=3.9, step=41), Skip)
    found = answer(once, loss=3.4, step=41, sound=False)
    assert isinstance(found, Rewind) and found.at_most == 37, "three steps before the first number outside"
    calm = known_after(Update(), Vitals(3.1, 1.0, step=41, updates=41), stability=LADDER, history=once)
    assert calm.began == -1 and answer(calm, loss=3.9, step=42) == Update(), "with a calm step between, they are single again"


def answers(numbers: list[tuple[float, float]], *, kill: int = -1) -> list[tuple[Decision, History]]:
    """Return the decisions and histories of steps with these numbers. Before step `kill` the run restarts from its copy."""
    history, told = KNOWN, list[tuple[Decision, History]]()
    for step, (loss, norm) in enumerate(numbers, start=40):
        if step == kill:
            history = History.load(json.loads(history.dump()))
        found = answer(history, loss=loss, norm=norm, step=step, updates=step)
        vitals = Vitals(loss, norm, step=step, updates=step, lr=1e-3)
        history = known_after(found, vitals, stability=LADDER, history=history)
        if isinstance(found, Rewind):
            history = history.rewound(KNOWN, step=step, to=found.at_most, undone=step - found.at_most)
        told.append((found, history))
    return told


@pytest.mark.slow
@given(st.lists(st.tuples(st.sampled_from([3.0, 3.4, 3.9, 9.0, math.nan]), st.sampled_from([1.0, 20.0, 1e4])), max_size=8))
def test_a_run_that_is_killed_between_any_two_steps_makes_the_same_decisions(numbers: list[tuple[float, float]]) -> None:
    straight = answers(numbers)
    for step in range(40, 40 + len(numbers)):
        assert answers(numbers, kill=step) == straight
    high = [(loss > 3.3) + (norm > 3.2) for loss, norm in numbers]
    far = any(not loss < 4.0 or norm > 100.0 for loss, norm in numbers)
    if not far and max(high, default=0) < 2 and all(before + after < 2 for before, after in pairwise(high)):
        assert all(found == Update() for found, _ in straight), "each is single"


def test_answers_come_in_their_order() -> None:
    assert isinstance(answer(KNOWN), Skip)
    tired = KNOWN.strayed(38).strayed(39)
    assert answer(tired) == Rewind("loss 9 above 3.6 (median 3)", 35, Update(lowered=True))
    damaged = answer(KNOWN, sound=False)
    assert isinstance(damaged, Rewind) and damaged.at_most == 37
    used = replace(tired, rewinds=((10, 5), (20, 15)))
    assert answer(used) == Update(lowered=True)
    assert answer(replace(used, lowered=50)) == Update(), "a lower rate is given its time"
    assert answer(replace(used, lowerings=2)) == Stop("loss 9 above 3.6 (median 3)", spike=True)


def test_after_a_jump_of_the_learning_rate_the_run_goes_back_before_it() -> None:
    """The jump damages weights little by little, so that a batch before the spike may seem as it was."""
    jumped = replace(KNOWN, rates=((36, 1e-3), (37, 1e-3), (38, 2e-2), (39, 2e-2)))
    found = answer(jumped, sound=True, lr=2e-2)
    assert isinstance(found, Rewind) and found.at_most == 37, "by the margin, which is before the jump"
    early = replace(KNOWN, rates=((33, 1e-3), (34, 2e-2), (39, 2e-2)))
    found = answer(early, sound=True, lr=2e-2)
    assert isinstance(found, Rewind) and found.at_most == 34
    assert isinstance(answer(early, asked(answers=("skip",)), sound=True, lr=2e-2), Skip), "it may not rewind"
    assert isinstance(answer(replace(KNOWN, rates=((29, 1e-3), (30, 2e-2), (39, 2e-2))), sound=True, lr=2e-2), Skip), "long ago"
    assert isinstance(answer(replace(KNOWN, rates=((38, 2e-2), (39, 1e-3))), sound=True, lr=1e-3), Skip), "it fell"
    assert isinstance(answer(replace(KNOWN, rates=((38, 1e-3), (39, 1.1e-3))), sound=True, lr=1.2e-3), Skip), "a warm-up"


def test_the_learning_rates_of_updates_are_part_of_the_history() -> None:
    vitals = Vitals(3.0, 1.0, step=40, updates=40, lr=1e-3)
    known = known_after(Update(), vitals, stability=LADDER, history=KNOWN)
    assert known.rates == ((40, 1e-3),)
    assert known_after(Skip("", spike=True), vitals, stability=LADDER, history=KNOWN).rates == ()
    assert History.load(json.loads(known.dump())) == known
    old = {name: value for name, value in json.loads(known.dump()).items() if name != "rates"}
    assert History.load(old).rates == (), "a history from before they were kept"
    full = known
    for step in range(100):
        full = known_after(Update(), replace(vitals, step=10**6 + step, lr=1 / 3e5), stability=LADDER, history=full)
    assert len(full.rates) == 16 and len(full.dump()) < room(LADDER)


def test_a_second_spike_nearby_goes_further_back() -> None:
    found = answer(replace(KNOWN, rewinds=((30, 20),)), sound=False)
    assert isinstance(found, Rewind) and found.at_most == 19
    found = answer(replace(KNOWN, rewinds=((5, 2),)), sound=False)
    assert isinstance(found, Rewind) and found.at_most == 37


def test_numbers_that_are_not_finite_go_back_before_they_stop() -> None:
    found = answer(KNOWN, loss=math.nan)
    assert isinstance(found, Rewind) and isinstance(found.otherwise, Stop)
    assert isinstance(answer(KNOWN, asked(not_finite="skip"), loss=math.nan), Skip)
    assert isinstance(answer(KNOWN, StabilitySpec(), loss=math.nan), Stop)


def asked(**changed: Any) -> StabilitySpec:
    return LADDER.model_copy(update=changed)


@given(loss=st.floats(1e-3, 1e6), norm=st.floats(1e-6, 1e9), step=st.integers(0, 1000), sound=st.none() | st.booleans())
def test_without_answers_a_spike_changes_nothing(loss: float, norm: float, step: int, sound: bool | None) -> None:
    found = answer(KNOWN, StabilitySpec(window=32), loss=loss, norm=norm, step=step, sound=sound, tries=0)
    assert found == Update()


def test_only_updates_make_the_band() -> None:
    vitals = Vitals(9.0, 1.0, step=40, updates=40)
    made = known_after(Update(), vitals, stability=LADDER, history=KNOWN)
    left = known_after(Skip("", spike=True), vitals, stability=LADDER, history=KNOWN)
    assert made.losses[-1] == 9.0 and made.began == left.began == 40
    assert left.losses == KNOWN.losses and left.left_out == 1
    lowered = known_after(Update(lowered=True), vitals, stability=LADDER, history=KNOWN)
    assert (lowered.lowered, lowered.lowerings) == (240, 1)


@pytest.mark.parametrize("stability", [STOP, SKIP])
def test_an_overflow_is_skipped_with_a_smaller_scale_until_that_is_at_its_floor(stability: StabilitySpec) -> None:
    """This holds however many updates the run has skipped, and without a second try. A loss that is not finite does not concern
    the scale."""
    specs = {"optimizer": OptimizerSpec(), "stability": stability, "loss_scale": LossScaleSpec(hysteresis=1, floor=2)}
    found = decide(Vitals(1.0, math.inf, skipped=9, repeatable=True, scale=Scale(3)), **specs)
    assert isinstance(found, Skip) and found.scale == Scale(2, spent=1, overflows=1)
    assert decide(Vitals(math.nan, math.nan, repeatable=True, scale=Scale(3)), **specs) == Rerun()
    assert decide(Vitals(1.0, math.inf, repeatable=True, scale=Scale(1)), **specs) == Rerun()
    last = decide(Vitals(1.0, math.inf, repeatable=True, tries=1, scale=Scale(1)), **specs)
    assert isinstance(last, Stop if stability is STOP else Skip) and "floor" in last.reason
    assert not isinstance(last, Skip) or last.scale is None


def test_an_overflow_is_no_spike() -> None:
    vitals = Vitals(3.0, math.inf, step=40, updates=40, attended=True, scale=Scale(3))
    decision = decide(vitals, optimizer=OptimizerSpec(clip=0), stability=LADDER, history=KNOWN)
    assert isinstance(decision, Skip) and decision.scale is not None
    assert known_after(decision, vitals, stability=LADDER, history=KNOWN) == KNOWN


# --- updates before the norm is known ---


@pytest.mark.parametrize("key", ["plan.post_validation", "plan.state.release"])
def test_updates_wait_for_the_norm_while_most_are_clipped(key: str) -> None:
    early, told, paused = EarlyUpdates(key), list[EarlyUpdatesPaused](), list[bool]()
    for step in range(1, 40):
        paused.append(early.paused)
        told += early.note(step <= 12, step=step)
    end = 12 + WINDOW - MAXIMUM
    assert [(each.step, each.paused, each.window) for each in told] == [(MAXIMUM + 1, True, MAXIMUM + 1), (end, False, WINDOW)]
    assert [step for step, waits in enumerate(paused, 1) if waits] == [*range(MAXIMUM + 2, end + 1)]
    assert all(each.words.endswith(f"({key}).") for each in told)


def test_no_update_that_could_not_be_undone_is_early() -> None:
    early = EarlyUpdates("plan.state.release", undone=False)
    told = [event for step in range(30) for event in early.note(step < 12, step=step)]
    assert early.paused and not told
