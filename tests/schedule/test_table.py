from itertools import product

import pytest

from megalith.schedule.action import Overlap, parts
from megalith.schedule.lower import lower
from megalith.schedule.simulate import in_flight, simulate
from megalith.schedule.table import SCHEDULES, build, representative_microbatches, schedule_problem_texts, schedule_problems
from megalith.schedule.verify import problems

GRID = [
    (name, ranks, microbatches, chunks)
    for name, ranks, microbatches, chunks in product(SCHEDULES, range(2, 9), (1, 4, 9, 16), (1, 2, 3))
    if not schedule_problem_texts(name, ranks=ranks, microbatches=microbatches, chunks=chunks)
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
            if not schedule_problems(name, ranks=ranks, microbatches=microbatches, chunks=chunks, zero=zero):
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
    chunks = SCHEDULES[name].chunks.nearest(3)
    for microbatches in (2 * ranks, 2 * ranks + 1, 3 * ranks, 4 * ranks + 1, 6 * ranks):
        few = representative_microbatches(name, ranks=ranks, microbatches=microbatches)
        if schedule_problem_texts(name, ranks=ranks, microbatches=few, chunks=chunks):
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


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_traits_of_a_row_are_those_of_its_programs(name: str):
    row = SCHEDULES[name]
    for _, ranks, microbatches, chunks in (case for case in GRID if case[0] == name):
        schedule = build(name, ranks=ranks, microbatches=microbatches, chunks=chunks)
        kinds = {action.kind for entries in schedule.rows for entry in entries for action in parts(entry)}
        assert row.splits_backward == ("W" in kinds)
        assert row.bidirectional == (schedule.mirrored is not None)
        assert row.hides_exchange or not any(isinstance(entry, Overlap) for entries in schedule.rows for entry in entries)


@pytest.mark.parametrize("name", SCHEDULES)
def test_about_as_many_microbatches_are_in_flight_as_the_row_says(name: str):
    """The count is exact if a rank has one stage and no copy of another. Other schedules hold up to twice as many
    microbatches."""
    row = SCHEDULES[name]
    for _, ranks, microbatches, chunks in (case for case in GRID if case[0] == name):
        schedule = build(name, ranks=ranks, microbatches=microbatches, chunks=chunks)
        held = max(in_flight(schedule)) / chunks
        said = row.in_flight(ranks, microbatches)
        assert said <= held <= 2 * said, (ranks, microbatches, chunks)
        if chunks == 1 and not row.bidirectional:
            assert held == said


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, row in SCHEDULES.items() if row.idle])
def test_a_closed_form_is_what_the_simulation_finds(name: str):
    idle = SCHEDULES[name].idle
    assert idle is not None
    held = 0
    for ranks, microbatches, chunks, backward in product(range(1, 6), range(1, 12), (1, 2, 3), (1.4, 2.0, 3.0)):
        if schedule_problem_texts(name, ranks=ranks, microbatches=microbatches, chunks=chunks):
            continue
        expected = idle(ranks, microbatches, chunks, backward)
        if expected is not None:
            program = lower(build(name, ranks=ranks, microbatches=microbatches, chunks=chunks), 0)
            each = {"F": 1.0, "B": backward, "I": backward / 2, "W": backward / 2}
            line = simulate(program, {kind: seconds / chunks for kind, seconds in each.items()})
            assert line.end - max(line.busy) == pytest.approx(expected), (ranks, microbatches, chunks, backward)
            held += 1
    assert held > 10


def test_a_misspelt_name_is_answered_with_the_near_one():
    assert "Did you mean '1f1b'?" in schedule_problem_texts("1F1B", ranks=2, microbatches=4, chunks=1)[0]


def test_all_that_is_wrong_is_said_at_once():
    found = schedule_problem_texts("interleave", ranks=0, microbatches=0, chunks=0)
    assert len(found) == 4
    with pytest.raises(ValueError, match=r"(?s)interleave.*ranks = 0.*microbatches = 0.*chunks = 0"):
        build("interleave", ranks=0, microbatches=0, chunks=0)


@pytest.mark.parametrize("name", [name for name, row in SCHEDULES.items() if row.chunks.most])
def test_another_number_of_chunks_points_to_schedules_that_take_it(name):
    least, _, most = SCHEDULES[name].chunks
    for chunks in {1, 2, 3} - set(range(least, (most or 3) + 1)):
        (found,) = schedule_problem_texts(name, ranks=2, microbatches=4, chunks=chunks)
        assert f"chunks = {chunks} with schedule = {name!r}" in found
        assert f"Use chunks = {least}" in found
        for other in found.rpartition("schedule: ")[2].rstrip(".").split(", "):
            assert schedule_problem_texts(other.strip("'"), ranks=2, microbatches=4, chunks=chunks) == []


def test_dualpipe_wants_pairs_of_ranks_both_directions_and_no_sharded_gradients():
    found = schedule_problems("dualpipe", ranks=3, microbatches=1, chunks=1, zero=2)
    assert [problem.field for problem in found] == ["ranks", "microbatches", "zero"]
    assert "Use an even number, such as 4, or schedule = 'dualpipev'." in str(found[0])
    assert schedule_problems("dualpipe", ranks=4, microbatches=2, chunks=1, zero=1) == []
