"""The rank for which the others wait is found from the number of collectives that each rank has begun."""

from hypothesis import given
from hypothesis import strategies as st

from megalith.fleet import collective_progress
from megalith.fleet.evidence import main_stack
from megalith.fleet.nodes import RankInspection


def test_whoever_has_not_begun_what_the_others_have_is_behind() -> None:
    found = collective_progress.behind({0: {"a": 7}, 1: {"a": 7}, 2: {"a": 6}})
    assert list(found) == [2]
    assert "6 collectives in group a, but another rank has begun 7" in found[2]


def test_who_waits_for_another_is_not_the_one() -> None:
    """Rank 0 waits for 1, which waits for 2 in another group. Rank 3 waits for nobody, and nobody waits for it."""
    assert list(collective_progress.behind({0: {"a": 5}, 1: {"a": 4, "b": 9}, 2: {"b": 8, "c": 1}, 3: {"c": 1}})) == [2]


def test_equal_numbers_say_nothing() -> None:
    assert collective_progress.behind({0: {"a": 5}, 1: {"a": 5}}) == {}
    assert collective_progress.behind({0: {"a": 5}, 1: {"b": 3}}) == {}, "no group in common"
    assert collective_progress.behind({0: {"a": 5, "b": 4}, 1: {"a": 4, "b": 5}}) == {}, "each waits for the other"


@given(st.lists(st.integers(1, 40), min_size=2, max_size=8), st.data())
def test_a_rank_that_stops_in_a_program_that_all_run_is_behind(steps: list[int], data: st.DataObject) -> None:
    """The ranks of a grid run the same collectives in order, over rows or columns, until one stops and the others wait for it."""
    ranks = 4
    groups = {"row 0": (0, 1), "row 1": (2, 3), "column 0": (0, 2), "column 1": (1, 3)}
    program = [("row", "column")[number % 2] for number in steps for _ in range(number)]
    stuck, at = data.draw(st.integers(0, ranks - 1)), data.draw(st.integers(0, len(program) - 1))
    mine = {
        rank: {axis: f"{axis} {rank // 2 if axis == 'row' else rank % 2}" for axis in ("row", "column")} for rank in range(ranks)
    }
    done, going = dict.fromkeys(range(ranks), 0), True
    while going:  # a rank continues once all of its group have begun the same collective
        going = False
        for rank in range(ranks):
            if (rank == stuck and done[rank] == at) or done[rank] == len(program):
                continue
            group = groups[mine[rank][program[done[rank] - 1]]] if done[rank] else (rank,)
            if all(done[other] >= done[rank] for other in group):
                done[rank], going = done[rank] + 1, True
    begun = {rank: {name: program[: done[rank]].count(axis) for axis, name in mine[rank].items()} for rank in range(ranks)}
    assert list(collective_progress.behind(begun)) == [stuck]


def test_an_answer_is_read_from_a_log_and_is_no_part_of_the_stack() -> None:
    stack = 'Current thread 0x01 (most recent call first):\n  File "a.py", line 1 in wait\n'
    log = stack + collective_progress.line({"0 (2 ranks, 0 to 1)": 21}, ["gloo:all_reduce 21 of group 0: scheduled"])
    assert RankInspection.of(log, stopped=False) == RankInspection(
        main_stack(stack), False, {"0 (2 ranks, 0 to 1)": 21}, ("gloo:all_reduce 21 of group 0: scheduled",)
    )
    assert RankInspection.of(log, stopped=False).where == 'File "a.py", line 1 in wait'
    assert collective_progress.read(stack) == ({}, ())
    assert collective_progress.read(log[: log.index("scheduled")]) == ({}, ()), "half an answer is none"
