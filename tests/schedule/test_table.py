from itertools import product

import pytest

from megalith.schedule.lower import lower
from megalith.schedule.simulate import in_flight, simulate
from megalith.schedule.table import CHUNKS, SCHEDULES, build, enough, misfits, refusals
from megalith.schedule.verify import problems

GRID = [
    (name, ranks, microbatches, chunks)
    for name, ranks, microbatches, chunks in product(SCHEDULES, range(2, 9), (1, 4, 9, 16), (1, 2, 3))
    if not refusals(name, ranks=ranks, microbatches=microbatches, chunks=chunks)
]


def test_the_grid_has_every_schedule():
    assert {name for name, *_ in GRID} == set(SCHEDULES)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_over_the_grid_every_schedule_has_no_problems_under_any_zero_stage_it_allows(name):
    for _, ranks, microbatches, chunks in (case for case in GRID if case[0] == name):
        schedule = build(name, ranks=ranks, microbatches=microbatches, chunks=chunks)
        assert (schedule.name, schedule.ranks, schedule.stages, schedule.microbatches) == (
            name,
            ranks,
            ranks * chunks,
            microbatches,
        )
        for zero in range(4) if ranks < 6 else (microbatches % 4,):
            if not misfits(name, ranks=ranks, microbatches=microbatches, chunks=chunks, zero=zero):
                assert problems(lower(schedule, zero)) == [], (name, ranks, microbatches, chunks, zero)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_rank_does_the_same_amount_of_work(name):
    for _, ranks, microbatches, chunks in (case for case in GRID if case[0] == name):
        schedule = build(name, ranks=ranks, microbatches=microbatches, chunks=chunks)
        work = simulate(lower(schedule, 0), {"F": 1, "B": 2, "I": 1, "W": 1}).busy
        assert work == (3 * chunks * microbatches,) * ranks


@pytest.mark.parametrize("name", SCHEDULES)
def test_all_schedules_but_dualpipe_accumulate_in_order(name):
    for _, ranks, microbatches, chunks in (case for case in GRID if case[0] == name):
        schedule = build(name, ranks=ranks, microbatches=microbatches, chunks=chunks)
        assert schedule.accumulates_in_order == (name != "dualpipe")


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
def test_more_microbatches_than_enough_change_neither_what_is_in_flight_nor_idling(name: str, ranks: int):
    chunks = CHUNKS.get(name, (1, 3))[1]
    for microbatches in (2 * ranks, 2 * ranks + 1, 3 * ranks, 4 * ranks + 1, 6 * ranks):
        few = enough(name, ranks=ranks, microbatches=microbatches)
        if refusals(name, ranks=ranks, microbatches=few, chunks=chunks):
            continue
        schedules = [build(name, ranks=ranks, microbatches=count, chunks=chunks) for count in (few, microbatches)]
        one, other = map(in_flight, schedules)
        assert one == other, microbatches
        if name == "interleaved" and microbatches % ranks:
            continue
        for times in ({"F": 2, "B": 2, "I": 1, "W": 1}, {"F": 2, "B": 4, "I": 2, "W": 2}, {"F": 2, "B": 6, "I": 3, "W": 3}):
            lines = [simulate(lower(schedule, 0), times) for schedule in schedules]
            one, other = ([line.end - busy for busy in line.busy] for line in lines)
            assert one == pytest.approx(other), (microbatches, times)


def test_a_misspelt_name_is_answered_with_the_near_one():
    assert "Did you mean '1f1b'?" in refusals("1F1B", ranks=2, microbatches=4, chunks=1)[0]


def test_all_that_is_wrong_is_said_at_once():
    found = refusals("interleave", ranks=0, microbatches=0, chunks=0)
    assert len(found) == 4
    with pytest.raises(ValueError, match=r"(?s)interleave.*ranks = 0.*microbatches = 0.*chunks = 0"):
        build("interleave", ranks=0, microbatches=0, chunks=0)


@pytest.mark.parametrize("name", CHUNKS)
def test_another_number_of_chunks_points_to_schedules_that_take_it(name):
    least, most = CHUNKS[name]
    for chunks in {1, 2, 3} - set(range(least, most + 1)):
        (found,) = refusals(name, ranks=2, microbatches=4, chunks=chunks)
        assert f"chunks = {chunks} with schedule = {name!r}" in found
        assert f"Use chunks = {least}" in found
        for other in found.rpartition("schedule: ")[2].rstrip(".").split(", "):
            assert refusals(other.strip("'"), ranks=2, microbatches=4, chunks=chunks) == []


def test_dualpipe_wants_pairs_of_ranks_both_directions_and_no_sharded_gradients():
    found = misfits("dualpipe", ranks=3, microbatches=1, chunks=1, zero=2)
    assert [misfit.field for misfit in found] == ["ranks", "microbatches", "zero"]
    assert "Use an even number, such as 4, or schedule = 'dualpipev'." in str(found[0])
    assert misfits("dualpipe", ranks=4, microbatches=2, chunks=1, zero=1) == []
