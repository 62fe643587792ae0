import pytest

from megalith.schedule.action import format_row
from megalith.schedule.gpipe import gpipe
from megalith.schedule.simulate import in_flight


def test_all_forwards_come_before_all_backwards():
    assert format_row(gpipe(2, 3).rows[1]) == "1F0 1F1 1F2 1B0 1B1 1B2"


def test_with_chunks_a_rank_finishes_a_stage_before_the_next():
    assert format_row(gpipe(2, 2, 2).rows[0]) == "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1"


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("microbatches", [1, 4, 7])
def test_every_microbatch_is_in_flight_at_once(ranks, microbatches):
    assert in_flight(gpipe(ranks, microbatches)) == [microbatches] * ranks
