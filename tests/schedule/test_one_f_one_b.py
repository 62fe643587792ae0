import pytest

from megalith.schedule.action import format_row
from megalith.schedule.one_f_one_b import one_f_one_b
from megalith.schedule.simulate import in_flight


def test_one_rank_is_plain_gradient_accumulation():
    assert format_row(one_f_one_b(1, 3).rows[0]) == "0F0 0B0 0F1 0B1 0F2 0B2"


def test_the_first_rank_warms_up_alternates_and_drains():
    assert format_row(one_f_one_b(3, 4).rows[0]) == "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3"


@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
@pytest.mark.parametrize("microbatches", [1, 2, 4, 9])
def test_a_rank_holds_no_more_than_its_distance_from_the_end(ranks, microbatches):
    assert in_flight(one_f_one_b(ranks, microbatches)) == [min(ranks - rank, microbatches) for rank in range(ranks)]
