"""The list of faults: reproducible, in a table's proportions, each fault once."""

from collections import Counter
from pathlib import Path

import pytest

from megalith.fleet import faults
from megalith.fleet.campaign import EXPECTED
from megalith.fleet.faults import KINDS, MIX, Faults, Injection, counts, draw
from megalith.fleet.seat import Seat
from megalith.spec.faults import tables

TABLE = tables()["llama3"]
ALL = [kind for kind in KINDS if kind != "supervisor"]


def test_every_cause_of_the_table_stands_for_kinds_of_faults_with_its_whole_count():
    shares = Counter()
    for cause, kind, share in MIX:
        assert kind in KINDS
        shares[cause] += share
    assert shares == pytest.approx({cause.name: 1.0 for cause in TABLE.causes})
    assert set(EXPECTED) == set(KINDS)


def test_419_faults_have_exactly_the_counts_of_the_table():
    found = counts(419, TABLE, ALL)
    assert sum(found.values()) == 419 == TABLE.count
    assert {kind: found[kind] for kind in ("kill", "stop", "weight", "exception", "sockets", "preemption", "slow", "node")} == {
        "kill": 76, "stop": 61, "weight": 36, "exception": 56, "sockets": 42, "preemption": 32, "slow": 8, "node": 3,
    }  # fmt: skip


@pytest.mark.parametrize("total", [1, 5, 16, 24, 100])
def test_a_smaller_list_has_one_of_each_kind_where_it_can(total: int):
    found = counts(total, TABLE, ALL)
    assert sum(found.values()) == total
    assert len(found) == min(total, len(ALL)) or total < len(ALL)


def test_a_seed_gives_its_list_and_steps_never_go_back():
    amounts = counts(60, TABLE, ALL)
    lists = [draw(amounts, seed=seed, first=3, every=3, ranks=8, slots=4) for seed in (1, 1, 2)]
    assert lists[0] == lists[1] != lists[2]
    for one in lists:
        steps = [injection.step for injection in one]
        assert steps == sorted(steps)
        assert Counter(injection.kind for injection in one) == amounts
        assert all(0 <= rank < 8 for injection in one for rank in injection.ranks)
        assert any(injection.after is not None for injection in one)


def test_a_fault_comes_once_and_marks_when_and_where(tmp_path: Path):
    file = tmp_path / "faults.json"
    faults.save(file, [Injection(0, "kill", 5, "step", (1,)), Injection(1, "slow", 6, "gradients", (1,), lasts=3)])
    seat = Seat(1, 2, ("a", "b"), None)
    mine, again = Faults(file, seat), Faults(file, seat)
    assert not list(mine.due("step", 4))
    assert [one.number for one in mine.due("step", 5)] == [0]
    assert not list(again.due("step", 5)), "another life of the same rank"
    assert not list(Faults(file, Seat(0, 2, ("a", "b"), None)).due("step", 5)), "another rank"
    assert [[one.number for one in mine.due("gradients", step)] for step in (5, 6, 7, 8, 9)] == [[], [1], [1], [1], []]
    assert not list(again.due("gradients", 7)), "what lasts, lasts in the process that it befell"
    assert {number: node for number, (_, node) in faults.fired(file).items()} == {0: "b", 1: "b"}


def test_a_fault_during_recovery_waits_for_the_fault_before_it(tmp_path: Path):
    file = tmp_path / "faults.json"
    faults.save(file, [Injection(0, "kill", 5, "step", (0,)), Injection(1, "kill", 5, "building", (1,), after=0)])
    first, second = (Faults(file, Seat(rank, 2, ("0",), None)) for rank in (0, 1))
    assert not list(second.due("building", None))
    assert list(first.due("step", 5))
    assert [one.number for one in second.due("building", None)] == [1]


def test_without_a_list_the_hooks_find_nothing():
    assert faults.find({}) is None
    faults.at("step", 3)
