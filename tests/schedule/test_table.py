import pytest

from megalith.schedule.table import SCHEDULES, build, refusals


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_of_the_table_can_be_built(name):
    built = build(name, ranks=2, microbatches=4)
    assert (built.name, built.ranks, built.stages, built.microbatches) == (name, 2, 2, 4)


def test_a_misspelt_name_is_answered_with_the_near_one():
    assert "Did you mean '1f1b'?" in refusals("1F1B", ranks=2, microbatches=4, chunks=1)[0]


def test_all_that_is_wrong_is_said_at_once():
    found = refusals("interleave", ranks=0, microbatches=0, chunks=0)
    assert len(found) == 4
    with pytest.raises(ValueError, match=r"(?s)interleave.*ranks = 0.*microbatches = 0.*chunks = 0"):
        build("interleave", ranks=0, microbatches=0, chunks=0)


def test_1f1b_with_chunks_points_to_interleaved():
    (found,) = refusals("1f1b", ranks=2, microbatches=4, chunks=2)
    assert "schedule = 'interleaved'" in found
