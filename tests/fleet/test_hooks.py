"""Each fault of a list happens once, in its rank and at its time."""

from pathlib import Path

import pytest

from megalith.fleet import hooks, injection
from megalith.fleet.hooks import Faults
from megalith.fleet.injection import Injection
from megalith.fleet.rank_info import RankInfo


def test_a_fault_comes_once_and_marks_when_and_where(tmp_path: Path):
    file = tmp_path / "faults.json"
    injection.save(file, [Injection(0, "kill", 5, "step", (1,)), Injection(1, "slow", 6, "gradients", (1,), lasts=3)])
    rank_info = RankInfo(1, 2, ("a", "b"), None)
    mine, again = Faults(file, rank_info), Faults(file, rank_info)
    assert not list(mine.due("step", 4))
    assert [one.number for one in mine.due("step", 5)] == [0]
    assert not list(again.due("step", 5)), "another life of the same rank"
    assert not list(Faults(file, RankInfo(0, 2, ("a", "b"), None)).due("step", 5)), "another rank"
    assert [[one.number for one in mine.due("gradients", step)] for step in (5, 6, 7, 8, 9)] == [[], [1], [1], [1], []]
    assert not list(again.due("gradients", 7)), "what lasts, lasts in the process that it befell"
    assert {number: node for number, (_, node) in injection.fired(file).items()} == {0: "b", 1: "b"}


def test_a_rank_that_is_ended_as_its_fault_comes_has_it_in_its_next_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The rank ends because of another rank's fault. A mark without a time would record the fault, but not its time."""
    file = tmp_path / "faults.json"
    injection.save(file, [Injection(0, "kill", 5, "step", (0,))])
    first, next_life = (Faults(file, RankInfo(0, 1, ("0",), None), generation) for generation in ("one", "two"))

    def ended(*_: object) -> None:
        raise SystemExit

    for last in ("os.link", "pathlib.Path.write_text"):
        with monkeypatch.context() as patch:
            patch.setattr(last, ended)
            with pytest.raises(SystemExit):
                list(first.due("step", 5))
        assert injection.fired(file) == {}
    assert list(next_life.due("step", 5))
    assert set(injection.fired(file)) == {0}


def test_a_mark_stays_what_it_was_when_the_next_is_made(tmp_path: Path):
    file = tmp_path / "faults.json"
    injection.save(file, [Injection(number, "nan", number, "gradients", (0,)) for number in range(2)])
    mine = Faults(file, RankInfo(0, 1, ("a",), None))
    assert list(mine.due("gradients", 0))
    before = injection.fired(file)
    assert list(mine.due("gradients", 1))
    after = injection.fired(file)
    assert before == {0: after[0]}
    assert after[1] > after[0]


def test_a_fault_of_several_ranks_comes_to_one_generation_of_them(tmp_path: Path):
    file = tmp_path / "faults.json"
    injection.save(file, [Injection(0, "node", 5, "step", (0, 1))])
    (first, second), (again, late) = (
        [Faults(file, RankInfo(rank, 2, ("0",), None), generation) for rank in (0, 1)] for generation in ("one", "two")
    )
    assert list(first.due("step", 5)), "its node is lost"
    assert not list(again.due("step", 5))
    assert not list(late.due("step", 5)), "the rank beside it was ended before it came there"
    assert list(second.due("step", 5)), "unless it was as quick"


def test_a_fault_during_recovery_waits_for_the_fault_before_it(tmp_path: Path):
    file = tmp_path / "faults.json"
    injection.save(file, [Injection(0, "kill", 5, "step", (0,)), Injection(1, "kill", 5, "building", (1,), after=0)])
    first, second = (Faults(file, RankInfo(rank, 2, ("0",), None)) for rank in (0, 1))
    assert not list(second.due("building", None))
    assert list(first.due("step", 5))
    assert [one.number for one in second.due("building", None)] == [1]


def test_without_a_list_the_hooks_find_nothing():
    assert hooks.find({}) is None
    hooks.at("step", 3)
