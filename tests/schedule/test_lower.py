from collections import Counter, defaultdict
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalith.schedule.action import MESSAGES, Action, Overlap, Schedule, computations, format_row, parse_row
from megalith.schedule.lower import channel_of, lower, partner
from megalith.schedule.table import SCHEDULES, build, schedule_problems
from megalith.schedule.verify import problems


@st.composite
def schedules(draw):
    """Draw any schedule of the table, with a ZeRO stage that it allows."""
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    sizes = {"ranks": draw(st.integers(1, 6)), "microbatches": draw(st.integers(1, 12)), "chunks": draw(st.integers(1, 3))}
    zero = draw(st.sampled_from([0, 1, 2, 3]))
    for problem in schedule_problems(name, **sizes, zero=zero):  # replace an incompatible draw
        if problem.field == "zero":
            zero = 1
        elif problem.field == "chunks":
            sizes["chunks"] = SCHEDULES[name].chunks.nearest(sizes["chunks"])
        else:
            sizes[problem.field] += 1
    return build(name, **sizes), zero


@pytest.mark.slow
@given(schedules(), st.integers(0, 3))
@settings(deadline=None, max_examples=150)
def test_a_lowered_schedule_has_no_problems(case, ahead):
    schedule, zero = case
    assert problems(lower(schedule, zero, ahead=ahead)) == []


@pytest.mark.slow
@given(schedules(), st.integers(0, 3), st.integers(1, 3))
@settings(deadline=None, max_examples=100)
def test_a_lowered_schedule_with_stages_that_move_what_they_keep_has_no_problems(case, ahead, every):
    schedule, zero = case
    retained = range(0, schedule.stages, every)
    program = lower(schedule, zero, ahead=ahead, retained=retained)
    assert problems(program) == []
    moved = [
        a for row in program.rows for entry in row if isinstance(entry, Action) and (a := entry).kind in ("OFFLOAD", "FETCH")
    ]
    assert Counter(moved) == Counter(
        Action(kind, stage, i) for kind in ("OFFLOAD", "FETCH") for stage in retained for i in range(schedule.microbatches)
    )


def test_what_a_stage_keeps_leaves_after_its_forward_and_is_fetched_one_computation_before_its_backward():
    program = lower(build("1f1b", ranks=2, microbatches=2), 0, retained={0})
    assert format_row(program.rows[0]) == (
        "0F0 0OFFLOAD0 0SEND_F0 0RECV_B0 0FETCH0 0F1 0OFFLOAD1 0SEND_F1 0RECV_B1 0FETCH1 0B0 0B1 0REDUCE"
    )
    assert "FETCH" not in format_row(program.rows[1])


@given(schedules())
@settings(deadline=None)
def test_lowering_keeps_the_computations_and_their_order(case):
    schedule, zero = case
    rows = [tuple(computations(row)) for row in lower(schedule, zero).rows]
    assert rows == [tuple(computations(row)) for row in schedule.rows]


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize(("zero", "gathers", "reduces"), [(0, 0, 1), (1, 1, 1), (2, 1, 5), (3, 10, 5)])
def test_a_stage_gathers_and_reduces_as_often_as_its_zero_stage_says(zero, gathers, reduces, chunks):
    program = lower(build("interleaved", ranks=2, microbatches=5, chunks=chunks), zero)
    for stage in range(program.stages):
        count = Counter(chain.from_iterable(program.rows))
        assert (count[Action("GATHER", stage)], count[Action("REDUCE", stage)]) == (gathers, reduces)


def test_one_rank_sends_nothing():
    program = lower(build("gpipe", ranks=1, microbatches=3, chunks=2), 0)
    assert format_row(program.rows[0]) == "0F0 0F1 0F2 1F0 1F1 1F2 1B0 1B1 1B2 1REDUCE 0B0 0B1 0B2 0REDUCE"


def test_a_receive_starts_one_computation_before_its_use():
    program = lower(build("1f1b", ranks=2, microbatches=2), 0)
    assert format_row(program.rows[1]) == "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1REDUCE 1SEND_B1"


def test_stages_of_one_rank_hand_over_without_messages():
    v = Schedule("v", (parse_row("0F0 3F0 3B0 0B0"), parse_row("1F0 2F0 2B0 1B0")), 4, 1, (0, 1, 1, 0))
    program = lower(v, 0)
    assert problems(program) == []
    assert Counter(str(entry) for row in program.rows for entry in row if "SEND" in str(entry)) == Counter(
        ["0SEND_F0", "2SEND_F0", "3SEND_B0", "1SEND_B0"]
    )


def test_a_split_backward_sends_after_its_first_half_and_reduces_after_its_second():
    split = Schedule("split", (parse_row("0F0 0I0 0W0"), parse_row("1F0 1I0 1W0")), 2, 1, (0, 1))
    program = lower(split, 3)
    assert format_row(program.rows[1]) == "1RECV_F0 1GATHER 1F0 1GATHER 1I0 1SEND_B0 1W0 1REDUCE"
    assert problems(program) == []


def test_an_overlap_gets_the_messages_of_both_its_computations():
    rows = (parse_row("0F0 (0F1;0B0) 0B1"), parse_row("1F0 1B0 1F1 1B1"))
    program = lower(Schedule("overlap", rows, 2, 2, (0, 1)), 0)
    overlap = program.rows[0].index(Overlap(Action("F", 0, 1), Action("B", 0, 0)))
    assert program.rows[0][overlap + 1] == Action("SEND_F", 0, 1)
    assert problems(program) == []


def test_receives_follow_the_senders_order_even_if_they_are_used_in_another():
    rows = (parse_row("0F0 0F1 0B0 0B1"), parse_row("1F1 1F0 1B0 1B1"))
    program = lower(Schedule("crossed", rows, 2, 2, (0, 1)), 0)
    assert format_row(program.rows[1][:2]) == "1RECV_F0 1RECV_F1"
    assert problems(program) == []


@pytest.mark.slow
@given(schedules())
@settings(deadline=None)
def test_both_ends_of_a_message_name_the_same_channel_and_stand_on_its_ranks(case):
    schedule, _ = case
    program = lower(schedule, 0)
    for rank, row in enumerate(program.rows):
        for message in (entry for entry in row if isinstance(entry, Action) and entry.kind in MESSAGES):
            assert partner(partner(message)) == message
            assert channel_of(message, schedule) == channel_of(partner(message), schedule)
            channel = program.channel(message)
            assert rank == (channel.source if message.kind.startswith("SEND") else channel.destination)
            assert program.peer(message) == schedule.rank_of(partner(message).stage, message.microbatch or 0)


def test_the_two_directions_of_a_bidirectional_schedule_have_channels_of_their_own():
    schedule = build("dualpipe", ranks=4, microbatches=8)
    program = lower(schedule, 0)
    found = defaultdict(set)
    for message in (entry for row in program.rows for entry in row if isinstance(entry, Action) and entry.kind in MESSAGES):
        found[program.channel(message)].add((message.microbatch or 0) >= 4)
    assert len(found) == 3 * 4  # for each pair of neighbours: both directions, activations and gradients
    assert all(len(directions) == 1 for directions in found.values())


def test_another_zero_stage_is_refused():
    with pytest.raises(ValueError, match="zero = 4"):
        lower(build("1f1b", ranks=1, microbatches=1), 4)
