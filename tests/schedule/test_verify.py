"""Every kind of mistake is planted in a correct program and must be found."""

from dataclasses import replace

import pytest

from megalith.schedule.action import Schedule, format_row, parse_row
from megalith.schedule.lower import Program, lower
from megalith.schedule.table import SCHEDULES, build
from megalith.schedule.verify import problems


def program(zero: int = 0, microbatches: int = 3) -> Program:
    return lower(build("1f1b", ranks=2, microbatches=microbatches), zero)


def edited(good: Program, rank: int, old: str, new: str) -> Program:
    """Return the program with consecutive actions of one row replaced."""
    text = format_row(good.rows[rank])
    assert f" {old} " in f" {text} ", (old, text)
    row = parse_row(f" {text} ".replace(f" {old} ", f" {new} ", 1))
    return replace(good, rows=(*good.rows[:rank], row, *good.rows[rank + 1 :]))


def test_a_good_program_has_no_problems():
    assert problems(program()) == []


@pytest.mark.parametrize(
    ("zero", "rank", "old", "new", "said"),
    [
        (0, 0, "0SEND_F1", "", ["rank 0: 0SEND_F1 is missing; its other end is 1RECV_F1"]),
        (0, 1, "1RECV_F1", "", ["rank 1: 1RECV_F1 is missing; its other end is 0SEND_F1"]),
        (0, 1, "1RECV_F1 1B0 1SEND_B0 1F1", "1B0 1SEND_B0 1F1 1RECV_F1", ["rank 1: 1F1 comes before 1RECV_F1"]),
        (0, 0, "0SEND_F1", "0SEND_F1 0SEND_F1", ["0SEND_F1 must occur once, but occurs 2 times"]),
        (0, 1, "1SEND_B1", "1SEND_B1 1SEND_F1", ["rank 1: 1SEND_F1 has no counterpart"]),
        (0, 1, "1F2", "1F2 1F2", ["1F2: forward happens 2 times"]),
        (0, 1, "1B2", "1I2", ["backward of stage 1, microbatch 2: B 0, I 1, W 0 times"]),
        (0, 1, "1B2", "1B2 1W2", ["backward of stage 1, microbatch 2: B 1, I 0, W 1 times"]),
        (0, 1, "1F2", "1F7", ["1F7 is outside 2 stages and 3 microbatches"]),
        (0, 1, "1F2", "0F2", ["0F2 belongs on rank 0", "1F2: forward happens 0 times"]),
        (0, 1, "1B0 1SEND_B0", "1SEND_B0 1B0", ["rank 1: 1SEND_B0 comes before 1B0, which it needs"]),
        (0, 0, "0B2 0REDUCE", "0B2", ["rank 0: 0REDUCE is missing after the backward of its stage"]),
        (0, 0, "0B1", "0B1 0REDUCE", ["rank 0: 0REDUCE does not directly follow a backward whose gradients are due"]),
        (2, 1, "1B0 1REDUCE 1SEND_B0", "1B0 1SEND_B0 1REDUCE", ["1REDUCE is missing", "1REDUCE does not directly follow"]),
        (1, 0, "0GATHER", "", ["rank 0: 0F0 needs a GATHER of stage 0 before it (ZeRO 1)"]),
        (3, 0, "0GATHER 0B1", "0B1", ["rank 0: 0B1 needs a GATHER of stage 0 before it (ZeRO 3)"]),
        (0, 0, "0F0", "0GATHER 0F0", ["gathers weights that are already whole (ZeRO 0)"]),
    ],
)
def test_a_mistake_is_found_and_named(zero, rank, old, new, said):
    found = problems(edited(program(zero), rank, old, new))
    for text in said:
        assert any(text in problem for problem in found), (text, found)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("0FETCH1", "", "rank 0: 0F1 0OFFLOAD1 0B1 is not the order F, OFFLOAD, FETCH, backward"),
        ("0OFFLOAD1", "", "rank 0: 0F1 0FETCH1 0B1 is not"),
        ("0OFFLOAD0", "0OFFLOAD0 0OFFLOAD0", "rank 0: 0F0 0OFFLOAD0 0OFFLOAD0 0FETCH0 0B0 is not"),
        ("0B0", "0B0 0FETCH0", "rank 0: 0F0 0OFFLOAD0 0FETCH0 0B0 0FETCH0 is not"),
        ("0B0", "1FETCH0 0B0", "rank 0: 1FETCH0 moves tensors of stage 1, but none of its tensors leave the device"),
    ],
)
def test_what_leaves_and_does_not_come_back_in_order_is_found(old, new, said):
    good = lower(build("1f1b", ranks=2, microbatches=3), 0, retained={0})
    assert problems(good) == []
    assert any(said in problem for problem in problems(edited(good, 0, old, new))), problems(edited(good, 0, old, new))


def test_a_backward_before_its_forward_is_found():
    rows = (parse_row("0B0 0F0"),)
    found = problems(lower(Schedule("wrong", rows, 1, 1, (0,)), 0))
    assert "rank 0: 0B0 comes before 0F0, which it needs" in found


def test_crossed_messages_are_found():
    good = lower(build("gpipe", ranks=2, microbatches=2), 0)
    found = problems(edited(good, 0, "0SEND_F0 0RECV_B0 0F1 0SEND_F1", "0RECV_B0 0F1 0SEND_F1 0SEND_F0"))
    assert found == ["channel 0 -> 1 (F): rank 0 sends 0SEND_F1 where rank 1 receives 1RECV_F0"]


def test_a_deadlock_is_shown_as_the_circle_of_ranks():
    rows = (parse_row("0F0 0B0 0F1 0B1"), parse_row("1F0 1F1 1B0 1B1"))  # rank 1 waits for 1F1 before it returns 1B0
    (found,) = problems(lower(Schedule("stuck", rows, 2, 2, (0, 1)), 0))
    assert found == "deadlock: rank 0 at 0B0 waits for 0RECV_B0 of rank 1; rank 1 at 1F1 waits for 1RECV_F1 of rank 0"


def test_a_rank_that_waits_for_its_own_later_action_is_found():
    found = problems(lower(Schedule("own", (parse_row("1F0 0F0 1B0 0B0"),), 2, 1, (0, 0)), 0))
    assert found == ["deadlock: rank 0 at 1F0 waits for 0F0 of rank 0"]


@pytest.mark.parametrize(
    ("zero", "rank", "old", "new"),
    [
        (0, 1, "0REDUCE 1REDUCE", "1REDUCE 0REDUCE"),
        (0, 1, "0REDUCE 1REDUCE", "1REDUCE"),
        (1, 0, "0GATHER 1GATHER", "1GATHER 0GATHER"),
        (1, 0, "1GATHER 1RECV_F2", "1RECV_F2 1GATHER"),
    ],
)
def test_the_two_ranks_of_a_pair_must_gather_and_reduce_in_one_order(zero, rank, old, new):
    good = lower(build("dualpipe", ranks=2, microbatches=4), zero)
    assert problems(good) == []
    (found,) = problems(edited(good, rank, old, new))
    assert f"rank {rank}: a bidirectional schedule begins with" in found


def test_a_mirrored_microbatch_on_the_rank_of_the_other_direction_is_found():
    good = build("dualpipe", ranks=2, microbatches=4)
    found = problems(lower(replace(good, rows=good.rows[::-1]), 0))
    assert any("rank 0: 0F2 belongs on rank 1" in problem for problem in found)


def test_a_bidirectional_program_that_exchanges_for_each_microbatch_is_found():
    good = lower(build("dualpipe", ranks=2, microbatches=4), 1)
    assert any("the two copies of a stage run in different orders" in problem for problem in problems(replace(good, zero=2)))


@pytest.mark.parametrize("name", ["zb-h1", "zb-v", "dualpipev", "dualpipe"])
def test_any_computation_left_out_is_found(name):
    good = build(name, ranks=2, microbatches=4, chunks=SCHEDULES[name].chunks.usual)
    for rank, row in enumerate(good.rows):
        for i in range(len(row)):
            rows = [*good.rows]
            rows[rank] = row[:i] + row[i + 1 :]
            assert problems(lower(replace(good, rows=tuple(rows)), 0)), (rank, str(row[i]))
