import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalith.schedule.action import format_row
from megalith.schedule.lower import lower
from megalith.schedule.simulate import in_flight, simulate
from megalith.schedule.verify import problems
from megalith.schedule.zero_bubble_v import zb_v

EVEN = {"F": 1, "I": 1, "W": 1}


def test_the_first_rank_holds_the_first_stage_and_the_last():
    schedule = zb_v(4, 8)
    assert [schedule.stages_of(rank) for rank in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]


@pytest.mark.slow
@given(st.integers(1, 8), st.integers(0, 12))
@settings(deadline=None)
def test_no_rank_waits_when_f_i_and_w_take_the_same_time(ranks, more):
    assert simulate(lower(zb_v(ranks, 2 * ranks - 1 + more), 0), EVEN).gaps == (0,) * ranks


@pytest.mark.slow
@given(st.integers(1, 8), st.integers(0, 12))
@settings(deadline=None)
def test_every_rank_holds_as_much_as_the_first_of_1f1b(ranks, more):
    """Each rank holds 2 p chunks of half a rank's work: p microbatches."""
    assert in_flight(zb_v(ranks, 2 * ranks - 1 + more)) == [2 * ranks] * ranks


@pytest.mark.slow
@given(st.integers(1, 6), st.integers(1, 12))
@settings(deadline=None)
def test_any_number_of_microbatches_runs_and_accumulates_in_order(ranks, microbatches):
    schedule = zb_v(ranks, microbatches)
    assert problems(lower(schedule, 3)) == []
    assert schedule.accumulates_in_order


def test_where_the_v_turns_nothing_is_sent():
    program = lower(zb_v(2, 3), 0)
    assert not [str(entry) for entry in program.rows[1] if str(entry).startswith(("1SEND_F", "2RECV_F", "2SEND_B", "1RECV_B"))]


def test_one_rank_goes_down_and_up():
    assert format_row(zb_v(1, 2).rows[0]) == "0F0 1F0 1I0 1W0 0F1 0I0 0W0 1F1 1I1 1W1 0I1 0W1"


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_uneven_times_leave_a_bubble_that_more_microbatches_do_not_fill_with_wrong_work(ranks):
    """The order is made for equal times. With other times it remains valid, and the work stays the same."""
    timeline = simulate(lower(zb_v(ranks, 4 * ranks), 0), {"F": 1.0, "I": 1.5, "W": 0.5})
    assert timeline.busy == pytest.approx([4 * ranks * 2 * 3.0] * ranks)
    assert timeline.bubble_seconds > 0
