import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalith.schedule.action import format_row
from megalith.schedule.lower import lower
from megalith.schedule.one_f_one_b import one_f_one_b
from megalith.schedule.simulate import activations, in_flight, simulate
from megalith.schedule.zero_bubble import zb_h1, zb_h2

ranks_and_more = (st.integers(1, 8), st.integers(0, 12))
seconds = st.integers(1, 9)


def bubble(schedule, **times):
    return simulate(lower(schedule, 0), times).bubble_seconds


def test_w_falls_behind_by_the_rank():
    first, last = (format_row(row) for row in zb_h1(2, 4).rows)
    assert first == "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0F3 0I2 0W2 0I3 0W3"
    assert last == "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1F3 1I3 1W2 1W3"


def test_h2_warms_up_until_the_first_gradient_is_back():
    assert format_row(zb_h2(2, 4).rows[0]) == "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3"


@pytest.mark.slow
@given(*ranks_and_more, seconds, seconds, seconds)
@settings(deadline=None)
def test_the_bubble_of_h1_is_the_papers(ranks, more, f, i, w):
    """The idle time is (p - 1)(T_F + T_B - T_W), where T_B is our I: from p microbatches on, if W is no longer than F and I."""
    w = min(f, i, w)
    expected = (ranks - 1) * (f + i - w)
    assert bubble(zb_h1(ranks, ranks + more), F=f, I=i, W=w) == pytest.approx(expected)
    assert expected == (ranks - 1) * (f + (i + w) - 2 * w)  # in DeepSeek's notation: F + B - 2 W


@pytest.mark.slow
@given(*ranks_and_more, seconds, seconds, seconds)
@settings(deadline=None)
def test_the_bubble_of_h2_is_the_papers(ranks, more, f, i, w):
    """The idle time is (p - 1)(T_F + T_B - 2 T_W) from 2 p - 1 microbatches on, if W is no longer than F and I."""
    w = min(f, i, w)
    assert bubble(zb_h2(ranks, 2 * ranks - 1 + more), F=f, I=i, W=w) == pytest.approx((ranks - 1) * (f + i - 2 * w))


@pytest.mark.slow
@given(*ranks_and_more)
@settings(deadline=None)
def test_h2_has_no_bubble_when_all_three_take_the_same_time(ranks, more):
    assert bubble(zb_h2(ranks, 2 * ranks - 1 + more), F=1, I=1, W=1) == 0


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_third_of_1f1bs_bubble_is_left(ranks):
    whole = bubble(one_f_one_b(ranks, 16), F=1, B=2)
    assert bubble(zb_h1(ranks, 16), F=1, I=1, W=1) == pytest.approx(whole / 3)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_h2_gains_nothing_where_a_step_waits_for_its_last_rank(ranks):
    h1, h2 = (simulate(lower(schedule(ranks, 20), 0), {"F": 1, "I": 1, "W": 1}) for schedule in (zb_h1, zb_h2))
    assert h1.end == h2.end
    assert max(h2.gaps) < max(h1.gaps)


@given(*ranks_and_more)
@settings(deadline=None)
def test_memory_in_flight_is_the_papers_on_every_rank(ranks, more):
    assert in_flight(zb_h1(ranks, ranks + more)) == [ranks] * ranks
    assert in_flight(zb_h2(ranks, 2 * ranks - 1 + more)) == [2 * ranks - 1] * ranks


@given(st.integers(2, 8), st.integers(1, 99))
@settings(deadline=None)
def test_what_only_i_needs_is_free_while_w_waits(ranks, waiting):
    """Rank r holds p - r whole microbatches, and r that wait for W: the paper's M_B and M_W."""
    held = activations(zb_h1(ranks, 3 * ranks), [100.0] * ranks, [float(waiting)] * ranks)
    assert held == [(ranks - rank) * 100 + rank * waiting for rank in range(ranks)]


@pytest.mark.parametrize("schedule", [zb_h1, zb_h2])
@pytest.mark.parametrize("ranks", [1, 3, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 5, 16])
def test_gradients_accumulate_in_the_order_of_microbatches(schedule, ranks, microbatches):
    assert schedule(ranks, microbatches).accumulates_in_order
