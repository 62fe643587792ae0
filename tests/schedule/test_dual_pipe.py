import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalith.schedule.action import Overlap, computations, format_row
from megalith.schedule.dual_pipe import dualpipe, dualpipev
from megalith.schedule.lower import lower
from megalith.schedule.simulate import in_flight, simulate
from megalith.schedule.verify import problems

fractions = st.floats(0.05, 1.0)


def timed(schedule, f, w, hidden):
    """Return the timeline if I takes as long as F. `hidden`: the share of the possible overlap, which shortens F + B down
    to B."""
    overlap = f + (f + w) - hidden * f
    return overlap, simulate(lower(schedule, 0), {"F": f, "B": f + w, "I": f, "W": w, "OVERLAP": overlap})


@pytest.mark.slow
@given(st.integers(1, 6), st.integers(0, 9), fractions, st.floats(0.0, 1.0))
@settings(deadline=None)
def test_the_bubble_of_dualpipev_is_the_published_one(ranks, more, w, hidden):
    """The idle time up to the end of the step is (p / 2 - 1)(F&B + B - 3 W) for p = 2 * ranks stages; F = I = 1 >= W, B <=
    F&B <= F + B."""
    overlap, timeline = timed(dualpipev(ranks, 2 * ranks + more), 1.0, w, hidden)
    published = (ranks - 1) * (overlap + (1 + w) - 3 * w)
    assert max(timeline.idle) == pytest.approx(published, abs=1e-9)
    inside = published - max(ranks - 2, 0) * hidden  # an overlap hides F + B - F&B
    assert timeline.bubble_seconds == pytest.approx(inside, abs=1e-9)


@pytest.mark.slow
@given(st.integers(1, 4), st.integers(0, 6), fractions, st.floats(0.0, 1.0))
@settings(deadline=None)
def test_the_bubble_of_dualpipe_is_the_published_one(half, more, w, hidden):
    ranks = 2 * half
    overlap, timeline = timed(dualpipe(ranks, 2 * (ranks + more)), 1.0, w, hidden)
    assert max(timeline.idle) == pytest.approx((ranks / 2 - 1) * (overlap + (1 + w) - 3 * w), abs=1e-9)


@pytest.mark.parametrize("ranks", [2, 4, 6, 8])
@pytest.mark.parametrize("more", [0, 1, 5])
def test_memory_in_flight_is_one_more_than_the_stages(ranks, more):
    assert in_flight(dualpipe(ranks, 2 * (ranks + more))) == [ranks + 1] * ranks
    assert in_flight(dualpipev(ranks, 2 * ranks + more)) == [2 * ranks + 1] * ranks


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("each_way", [8, 11])
def test_both_ranks_of_a_pair_do_the_same_as_the_rank_of_the_half_pipeline(ranks, each_way):
    """DualPipe on p ranks is twice DualPipeV on p / 2 (the "cut in half")."""
    whole, half = dualpipe(ranks, 2 * each_way), dualpipev(ranks // 2, each_way)
    for rank, row in enumerate(whole.rows):
        pair = min(rank, ranks - 1 - rank)
        kinds = [(a.kind, a.stage, (a.microbatch or 0) % each_way) for a in computations(row)]
        assert kinds == [(a.kind, a.stage, a.microbatch) for a in computations(half.rows[pair])]
        assert [isinstance(entry, Overlap) for entry in row] == [isinstance(entry, Overlap) for entry in half.rows[pair]]


def test_each_direction_visits_all_ranks_and_every_stage_has_two_copies():
    schedule = dualpipe(4, 8)
    assert [schedule.rank_of(stage, 0) for stage in range(4)] == [0, 1, 2, 3]
    assert [schedule.rank_of(stage, 7) for stage in range(4)] == [3, 2, 1, 0]
    assert [schedule.stages_of(rank) for rank in range(4)] == [(0, 3), (1, 2), (1, 2), (0, 3)]
    assert schedule.holders(1) == (1, 2)


@pytest.mark.slow
@given(st.integers(1, 4), st.integers(2, 14), st.sampled_from([0, 1]))
@settings(deadline=None)
def test_any_number_of_microbatches_runs_in_two_directions(half, microbatches, zero):
    schedule = dualpipe(2 * half, microbatches)
    assert problems(lower(schedule, zero)) == []
    assert schedule.mirrored == (microbatches + 1) // 2
    assert not schedule.accumulates_in_order


@pytest.mark.slow
@given(st.integers(1, 6), st.integers(1, 14))
@settings(deadline=None)
def test_dualpipev_accumulates_in_order_for_any_number_of_microbatches(ranks, microbatches):
    schedule = dualpipev(ranks, microbatches)
    assert problems(lower(schedule, 2)) == []
    assert schedule.accumulates_in_order


def test_the_steady_state_is_made_of_overlaps():
    schedule = dualpipev(2, 20)
    overlapped = [sum(isinstance(entry, Overlap) for entry in row) for row in schedule.rows]
    assert min(overlapped) > 2 * 20 - 2 * 4


def test_dualpipe_begins_with_its_gathers_and_ends_with_its_reductions_in_the_order_of_stages():
    program = lower(dualpipe(2, 4), 1)
    for row in program.rows:
        text = format_row(row).split()
        assert text[:2] == ["0GATHER", "1GATHER"]
        assert text[-2:] == ["0REDUCE", "1REDUCE"]
        assert sum("GATHER" in word or "REDUCE" in word for word in text) == 4


def test_what_is_exchanged_for_each_microbatch_is_refused():
    with pytest.raises(ValueError, match=r"zero = 3 with schedule = 'dualpipe'.*Use zero = 0 or 1"):
        lower(dualpipe(2, 4), 3)
