"""The list of faults is reproducible, and has a table's proportions."""

import itertools
from collections import Counter, defaultdict

import pytest

from megalith.rehearse import faults
from megalith.rehearse.fates import EXPECTED
from megalith.rehearse.faults import INSTEAD, KINDS, MIX, OF_ONE_MEMORY, ON_DISK, counts, draw
from megalith.spec.faults import tables

TABLE = tables()["llama3"]
ALL = [kind for kind in KINDS if kind not in ("supervisor", "agent", *ON_DISK)]
OF_AGENTS = [kind for kind in KINDS if kind not in ("supervisor", "interface", *OF_ONE_MEMORY, *ON_DISK)]


def test_every_cause_of_the_table_stands_for_kinds_of_faults_with_its_whole_count():
    shares = defaultdict[str, float](float)
    for cause, kind, share in MIX:
        assert kind in KINDS
        shares[cause] += share
    assert shares == pytest.approx({cause.name: 1.0 for cause in TABLE.causes})
    assert set(EXPECTED) == set(KINDS)


def test_419_faults_have_exactly_the_counts_of_the_table():
    found = counts(419, TABLE, ALL)
    assert sum(found.values()) == 419 == TABLE.count
    known = {
        "kill": 74, "stop": 37, "stuck": 24, "weight": 36, "exception": 54, "shard": 2, "sockets": 35, "interface": 7, "preemption": 32,
        "slow": 8, "node": 3,
    }  # fmt: skip
    assert {kind: found[kind] for kind in known} == known


def test_a_cause_keeps_its_count_where_its_kind_cannot_come():
    found = counts(419, TABLE, [kind for kind in ALL if kind not in ("once", "full", "shard", "interface")])
    assert (found["kill"], found["gradient"], found["exception"]) == (76, 6, 56)
    assert sum(found.values()) == 419
    found = counts(419, TABLE, OF_AGENTS)
    assert (found["kill"], found["agent"], found["sockets"]) == (77, 5, 42)
    assert sum(found.values()) == 419
    assert set(INSTEAD) <= set(KINDS) >= set(INSTEAD.values())


def test_with_state_on_disk_a_cause_hits_its_files_and_not_what_is_not_in_memory():
    on_disk = [kind for kind in (*ALL, *ON_DISK) if kind not in ("weight", "moment", "copy")]
    found = counts(419, TABLE, on_disk)
    assert set(found) == set(on_disk)
    assert sum(found.values()) == 419
    assert found["nan"] == 72, "in place of flipped bits of weights, too"
    assert found["kill"] == 74 + 19 + 2 - 1, (
        "in place of moments and copies, too; each kind has one fault, where it has room for a half"
    )
    assert [found[kind] for kind in ("checkpoint", "altered", "torn-chunk", "altered-chunk")] == [1, 1, 1, 1]


@pytest.mark.parametrize("total", [1, 5, 16, 24, 100])
def test_a_smaller_list_has_one_of_each_kind_where_it_can(total: int):
    found = counts(total, TABLE, ALL)
    assert sum(found.values()) == total
    assert len(found) == min(total, len(ALL)) or total < len(ALL)


def test_a_seed_gives_its_list_and_steps_never_go_back():
    amounts = counts(60, TABLE, ALL)
    only_at = {"once": 4, "full": 10}
    lists = [draw(amounts, seed=seed, first=3, every=3, ranks=8, slots=4, only_at=only_at) for seed in (1, 1, 2)]
    assert lists[0] == lists[1] != lists[2]
    for one in lists:
        steps = [injection.step for injection in one]
        assert steps == sorted(steps)
        assert Counter(injection.kind for injection in one) == amounts
        assert all(0 <= rank < 8 for injection in one for rank in injection.ranks)
        assert any(injection.after is not None for injection in one)
        assert all(injection.step % only_at.get(injection.kind, 1) == 0 for injection in one)


@pytest.mark.parametrize("seed", range(1, 9))
def test_a_kind_that_comes_not_before_a_step_never_does(seed: int):
    listed = faults.draw({"altered": 2, "kill": 9}, seed=seed, first=3, every=3, ranks=4, slots=2, not_before={"altered": 22})
    assert all(one.step >= 22 for one in listed if one.kind == "altered")
    assert [one.step for one in listed] == sorted(one.step for one in listed)


@pytest.mark.parametrize("seed", range(20))
def test_what_takes_time_to_be_noticed_begins_when_the_ranks_have_started_again(seed: int) -> None:
    """A slow rank that is killed in its first step, because of another rank's fault, could not be noticed."""
    found = draw(dict.fromkeys(KINDS, 6), seed=seed, first=3, every=3, ranks=8, slots=4)
    for before, one in itertools.pairwise(found):
        if KINDS[one.kind].room:
            assert one.step > before.step + 2
        if KINDS[before.kind].room:
            assert one.step > before.step + KINDS[before.kind].room
