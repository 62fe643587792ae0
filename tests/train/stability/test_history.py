"""Bands, spikes and their history, without a model."""

import json
import math
import random
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalith.spec.run import StabilitySpec
from megalith.train.stability.history import CALM, MINIMUM, Departure, History, PastUpdate, band, room

SPEC = StabilitySpec(window=32)
LARGE = st.floats(1e-300, 1e300)


def steady(count: int = 32, *, seed: int = 0) -> History:
    draw, known = random.Random(seed), History()
    for _ in range(count):
        known = known.accepted(3.0 * math.exp(draw.gauss(0, 0.02)), math.exp(draw.gauss(0, 0.2)), SPEC)
    return known


@given(values=st.lists(LARGE, min_size=2, max_size=50), factor=st.floats(0.1, 10))
def test_a_band_holds_its_median_and_scales_with_its_numbers(values: list[float], factor: float) -> None:
    middle, end = band(values, width=8.0, least=0.1)
    assert min(values) * 0.999 <= middle <= max(values) * 1.001 and end >= middle
    scaled = [value * factor for value in values]
    if max(scaled) < 1e300 and min(scaled) > 1e-300:
        assert band(scaled, width=8.0, least=0.1)[0] == pytest.approx(middle * factor, rel=1e-6)


def test_wild_numbers_and_a_falling_loss_do_not_hide_the_next_one() -> None:
    losses = [3.0 + 0.01 * (i % 7) for i in range(20)]
    assert band(losses + [300.0] * 7, width=8.0, least=0.1)[1] < 5.0
    falling = [9.0 * 0.97**i for i in range(32)]
    assert band(falling, width=8.0, least=0.1)[1] < falling[-1] * 1.7


def test_nothing_is_judged_before_there_are_numbers() -> None:
    assert not steady(15).departures(1e9, 1e9, SPEC)
    found = steady(16).departures(1e9, 1e9, SPEC)
    assert [one.name for one in found] == ["loss", "norm"]
    assert not steady(16).departures(1e9, 1e9, StabilitySpec(window=32, watch=False))


def test_clean_numbers_stay_inside_and_those_above_leave() -> None:
    known = steady()
    assert not known.departures(3.1, 1.5, SPEC)
    assert [one.name for one in known.departures(4.5, 1.5, SPEC)] == ["loss"]
    assert [one.name for one in known.departures(3.1, 60.0, SPEC)] == ["norm"]
    assert not known.departures(1e-3, 1e-6, SPEC), "a low number is no spike"


def test_one_step_outside_is_suspected_and_two_in_a_row_are_a_spike() -> None:
    known = steady()
    found = known.departures(3.8, 1.0, SPEC)
    assert [one.name for one in found] == ["loss"] and not known.spikes(found)
    suspected = known.suspected(40)
    assert suspected.suspects and suspected.began == 40
    assert suspected.stayed() == known, "it was one batch"
    (near,) = suspected.departures(3.4, 1.0, SPEC)
    assert not known.departures(3.4, 1.0, SPEC) and suspected.spikes((near,)), "it stays above half of the band"
    assert not suspected.departures(3.2, 1.0, SPEC)
    noticed = suspected.strayed(41)
    assert (noticed.began, noticed.outside, noticed.suspects) == (40, 1, False), "it began in the first step outside"
    assert not noticed.departures(3.4, 1.0, SPEC), "after that, bands have their width"
    assert noticed.spikes(found)


def test_a_step_far_outside_or_with_both_numbers_outside_is_a_spike_at_once() -> None:
    known = steady()
    assert known.spikes(known.departures(3.8, 60.0, SPEC)), "both"
    assert not known.spikes(known.departures(3.0, 60.0, SPEC))
    assert known.spikes(known.departures(3.0, 1000.0, SPEC)) and known.spikes(known.departures(1e300, 1.0, SPEC))
    for name, numbers in (("loss", known.losses), ("norm", known.norms)):
        middle, end = band(numbers, width=SPEC.width, least=MINIMUM[name])
        twice = end * end / middle
        assert not Departure(name, twice * 0.999, middle, end).gross and Departure(name, twice * 1.001, middle, end).gross


def test_the_update_before_a_spike_is_known() -> None:
    known = History()
    for step in range(20):
        known = known.accepted(3.0 + step, 1.0 + step, SPEC).updated(step, 1e-3)
    assert known.before(20) == PastUpdate(19, 22.0, 20.0) and known.before(17) == PastUpdate(16, 19.0, 17.0)
    assert known.suspected(19).before(20) == PastUpdate(18, 21.0, 19.0), "the suspected step is part of the spike"
    assert known.of_text(1).before(20) is None and History().before(20) is None


def test_a_spike_is_over_after_calm_steps() -> None:
    known = steady().strayed(40).strayed(41)
    assert (known.began, known.outside) == (40, 2)
    for _ in range(CALM - 1):
        known = known.stayed()
    assert known.began == 40
    assert known.stayed().began == -1
    assert known.strayed(50).calm == 0


def test_what_a_rewind_leaves_behind_is_never_gone_back_to() -> None:
    known = steady().strayed(40).rewound(steady(20), step=41, to=30, undone=11)
    assert known.rewinds == ((42, 30),) and known.began == -1 and known.left_out == 12
    assert known.losses == steady(20).losses, "numbers are those of the copy"
    assert [step for step in range(28, 45) if known.may_go_back_to(step)] == [28, 29, 30, 42, 43, 44]
    assert known.nearby(50, SPEC) == 30
    assert known.nearby(80, SPEC) is None


@pytest.mark.slow
@given(
    numbers=st.lists(st.tuples(LARGE, LARGE), max_size=40),
    rewinds=st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**9)), max_size=5),
)
def test_it_comes_back_from_text_that_fits_into_its_room(
    numbers: list[tuple[float, float]], rewinds: list[tuple[int, int]]
) -> None:
    known = History(rewinds=tuple(rewinds), lowered=10**9, left_out=10**9)
    for loss, norm in numbers:
        known = known.accepted(loss, norm, SPEC)
    assert History.load(json.loads(known.dump())) == History.load(asdict(known)) == known
    assert len(known.dump()) <= room(SPEC)


def test_numbers_of_other_text_make_no_band() -> None:
    known = steady()
    assert known.departures(300.0, 1.0, SPEC) and known.of_text(0) is known
    changed = known.of_text(2)
    assert not changed.departures(300.0, 1.0, SPEC)
    assert changed.of_text(2) is changed and History.load(json.loads(changed.dump())) == changed
