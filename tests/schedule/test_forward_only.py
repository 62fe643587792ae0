import pytest

from megalith.schedule.action import Action, format_row
from megalith.schedule.forward_only import forward_only
from megalith.schedule.lower import lower
from megalith.schedule.simulate import simulate
from megalith.schedule.table import SCHEDULES, build


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("microbatches", [1, 2, 5])
@pytest.mark.parametrize("zero", [0, 1])
def test_every_microbatch_goes_once_through_every_stage_where_training_has_it(name, microbatches, zero):
    like = build(name, ranks=4, microbatches=8, chunks=SCHEDULES[name].chunks.nearest(2))
    schedule = forward_only(like, microbatches)
    program = lower(schedule, zero)
    done = [(str(span.action), span.rank) for span in simulate(program, {"F": 1.0}).spans]
    assert sorted(done) == sorted(
        (str(Action("F", stage, i)), schedule.rank_of(stage, i)) for stage in range(like.stages) for i in range(microbatches)
    )
    assert all(set(schedule.holders(stage)) == set(like.holders(stage)) for stage in range(like.stages))
    assert "REDUCE" not in " ".join(map(format_row, program.rows))
