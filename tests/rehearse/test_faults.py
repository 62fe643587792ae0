"""The list of faults: reproducible, in a table's proportions, each fault once."""

import faulthandler
import itertools
import os
import shutil
import signal
import socket
import time
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

from megalith.fleet import copies
from megalith.fleet.seat import Seat, node_folder
from megalith.machine import networks
from megalith.rehearse import faults
from megalith.rehearse.campaign import EXPECTED, REPAIR_SECONDS, may_mount, mender, small_disk
from megalith.rehearse.faults import (
    ACTIONS,
    BALLAST,
    INSTEAD,
    KINDS,
    MIX,
    OF_ONE_MEMORY,
    Faults,
    Injection,
    counts,
    draw,
    happen,
)
from megalith.spec.faults import tables

TABLE = tables()["llama3"]
ALL = [kind for kind in KINDS if kind not in ("supervisor", "agent")]
OF_AGENTS = [kind for kind in KINDS if kind not in ("supervisor", "interface", *OF_ONE_MEMORY)]


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


def test_a_rank_that_is_ended_as_its_fault_comes_has_it_in_its_next_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """For the fault of another: a mark without its time would have said that it came, and never when."""
    file = tmp_path / "faults.json"
    faults.save(file, [Injection(0, "kill", 5, "step", (0,))])
    first, next_life = (Faults(file, Seat(0, 1, ("0",), None), generation) for generation in ("one", "two"))

    def ended(*_: object) -> None:
        raise SystemExit

    for last in ("os.link", "pathlib.Path.write_text"):
        with monkeypatch.context() as patch:
            patch.setattr(last, ended)
            with pytest.raises(SystemExit):
                list(first.due("step", 5))
        assert faults.fired(file) == {}
    assert list(next_life.due("step", 5))
    assert set(faults.fired(file)) == {0}


def test_a_mark_stays_what_it_was_when_the_next_is_made(tmp_path: Path):
    file = tmp_path / "faults.json"
    faults.save(file, [Injection(number, "nan", number, "gradients", (0,)) for number in range(2)])
    mine = Faults(file, Seat(0, 1, ("a",), None))
    assert list(mine.due("gradients", 0))
    before = faults.fired(file)
    assert list(mine.due("gradients", 1))
    after = faults.fired(file)
    assert before == {0: after[0]}
    assert after[1] > after[0]


def test_a_fault_of_several_ranks_comes_to_one_generation_of_them(tmp_path: Path):
    file = tmp_path / "faults.json"
    faults.save(file, [Injection(0, "node", 5, "step", (0, 1))])
    (first, second), (again, late) = (
        [Faults(file, Seat(rank, 2, ("0",), None), generation) for rank in (0, 1)] for generation in ("one", "two")
    )
    assert list(first.due("step", 5)), "its node is lost"
    assert not list(again.due("step", 5))
    assert not list(late.due("step", 5)), "the rank beside it was ended before it came there"
    assert list(second.due("step", 5)), "unless it was as quick"


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


# --- each kind, as it befalls a process ---


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder with two checkpoints of two parts."""
    for step in (2, 4):
        folder = tmp_path / "run" / "checkpoints" / f"step-{step:08}"
        folder.mkdir(parents=True)
        for rank in range(2):
            (folder / f"rank-{rank}").write_bytes(bytes(range(100 + rank)))
    monkeypatch.setenv("MEGALITH_RUN_DIR", str(tmp_path / "run"))
    return tmp_path / "run"


@pytest.fixture
def seat(tmp_path: Path) -> Seat:
    """Rank 1 of two on two nodes; each has a copy of its state after step 4."""
    placement = ("a", "b")
    for rank, node in enumerate(placement):
        layout = copies.Layout.of([("weights.w", "float32", (16,), 64)])
        folder = node_folder(tmp_path / "memory", node)
        buffer = copies.Buffer.create(folder / copies.file_name("own", rank, 0), len(layout.dump()) + layout.payload)
        label = copies.Label(4, 32, rank, 2, 0, len(layout.dump()), layout.payload)
        buffer.commit(label)
        buffer.close()
    shutil.copytree(tmp_path / "memory", tmp_path / "disk")
    return Seat(1, 2, placement, tmp_path / "memory", tmp_path / "disk")


def _befall(kind: str, seat: Seat, *, step: int = 4) -> int:
    """How a process ended that a fault came to, as in `subprocess`; 0 if it outlived it."""
    process = os.fork()
    if process == 0:
        faulthandler.disable()
        try:
            happen(Injection(0, kind, step, "step", (seat.rank,)), seat)
        except faults.Injected:
            os._exit(7)
        finally:
            os._exit(0)
    _, status = os.waitpid(process, os.WUNTRACED)
    if os.WIFSTOPPED(status):
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        return -os.WSTOPSIG(status)
    return os.waitstatus_to_exitcode(status)


def _held(seat: Seat, *, disk: bool = False) -> dict[str, list[bool]]:
    """Which nodes hold copies in memory, or on disk, and whether they are intact."""
    root = seat.disk if disk else seat.memory
    assert root is not None
    found = {node: [p.intact for p in copies.pieces(node_folder(root, node))] for node in seat.placement}
    return {node: pieces for node, pieces in found.items() if pieces}


ENDS = {"kill": -9, "stop": -signal.SIGSTOP, "segfault": -11, "exception": 7, "preemption": -15}
WHOLE, NOTHING = {"a": [True], "b": [True]}, {}


@pytest.mark.parametrize("kind", ENDS)
def test_a_process_is_ended_as_the_fault_says_and_copies_in_memory_stay(kind: str, run: Path, seat: Seat):
    assert _befall(kind, seat) == ENDS[kind]
    assert _held(seat) == WHOLE


def test_a_call_that_never_returns_leaves_a_process_that_lives_and_hears_signals(run: Path, seat: Seat):
    def heard(number: int, frame: object) -> None:
        os.write(writing, b"!")

    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        signal.signal(signal.SIGTERM, heard)
        os.write(writing, b"?")
        happen(Injection(0, "stuck", 4, "step", (seat.rank,)), seat)
        os._exit(0)
    for expected in (b"?", b"!", b"!"):
        assert os.read(reading, 1) == expected
        os.kill(process, signal.SIGTERM)
    assert os.waitpid(process, os.WNOHANG) == (0, 0)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    assert _held(seat) == WHOLE


LEFT = {
    "checkpoint": NOTHING,
    "altered": NOTHING,
    "node": {"a": [True]},
    "two": {"a": [True]},
    "copy": {"a": [True], "b": [False]},
}
LEFT_ON_DISK = {"checkpoint": NOTHING, "altered": NOTHING, "node": {"a": [True]}, "two": WHOLE, "copy": WHOLE}


@pytest.mark.parametrize("kind", LEFT)
def test_memory_is_lost_or_altered_with_the_process(kind: str, run: Path, seat: Seat):
    assert seat.memory is not None
    assert _befall(kind, seat) == -signal.SIGKILL
    assert _held(seat) == LEFT[kind]
    assert _held(seat, disk=True) == LEFT_ON_DISK[kind]
    assert node_folder(seat.memory, "b").is_dir() == (kind != "node")
    whole = [run / "checkpoints" / f"step-{step:08}" / f"rank-{rank}" for step, rank in ((2, 0), (2, 1), (4, 0))]
    assert all(path.read_bytes() == bytes(range(100 + int(path.name[-1]))) for path in whole)
    newest = (run / "checkpoints" / "step-00000004" / "rank-1").read_bytes()
    wrong = sum(one != other for one, other in zip(newest, range(101), strict=False))
    assert (len(newest), wrong) == {"checkpoint": (50, 0), "altered": (101, 1)}.get(kind, (101, 0))


def test_torn_connections_end_for_both_sides_and_the_process_lives(run: Path, seat: Seat):
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as mine:
        theirs, _ = server.accept()
        assert _befall("sockets", seat) == 0
        assert (mine.recv(1), theirs.recv(1)) == (b"", b"")
        theirs.close()


def test_the_supervisor_is_the_process_that_holds_the_run_the_agent_that_which_keeps_the_rank(
    run: Path, seat: Seat, monkeypatch: pytest.MonkeyPatch
):
    supervisor, agent = _waiting(), _waiting()
    (run / "ranks").mkdir()
    (run / "ranks" / "lock").write_text(str(supervisor))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    for kind, process in (("agent", agent), ("supervisor", supervisor)):
        assert os.waitpid(process, os.WNOHANG) == (0, 0)
        assert _befall(kind, replace(seat, agent=agent)) == 0
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL


def _waiting() -> int:
    """A process that does nothing."""
    process = os.fork()
    if process == 0:
        signal.pause()
        os._exit(0)
    return process


@pytest.mark.skipif(not may_mount(), reason="needs the right to mount a file system")
def test_a_full_disk_has_room_again_at_the_next_checkpoint(run: Path, seat: Seat, monkeypatch: pytest.MonkeyPatch):
    shutil.rmtree(run / "checkpoints")
    faults.save(run.parent / "faults.json", [Injection(0, "full", 10, "saving", (0,))])
    monkeypatch.setenv(faults.VARIABLE, str(run.parent / "faults.json"))
    with small_disk(run / "checkpoints", size=1 << 20):
        assert _befall("full", seat, step=10) == 0
        file = run / "checkpoints" / "file"
        for step, room in ((10, False), (20, True)):
            faults.at("saving", step)
            if room:
                file.write_bytes(bytes(1 << 19))
            else:
                with pytest.raises(OSError, match="No space left"):
                    file.write_bytes(bytes(1 << 19))


@pytest.mark.skipif(networks.missing() is not None, reason=networks.missing() or "")
def test_a_nodes_interface_goes_down_and_comes_up_when_the_campaign_mends_it(
    run: Path, seat: Seat, monkeypatch: pytest.MonkeyPatch
):
    file = run.parent / "faults.json"
    faults.save(file, [Injection(0, "interface", 4, "step", (1,))])
    with networks.joined(("a", "b")) as network:
        monkeypatch.setenv(networks.VARIABLE, network.family)
        process = os.fork()
        if process == 0:
            try:
                networks.enter("b")
                happen(next(Faults(file, seat).due("step", 4)), seat)
            finally:
                os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
        assert [network.is_connected(node) for node in seat.placement] == [True, False]
        mend, came = mender(file, network), faults.fired(file)[0][0]
        for passed, connected in ((REPAIR_SECONDS - 1, False), (REPAIR_SECONDS + 1, True)):
            monkeypatch.setattr(time, "time", lambda passed=passed: came + passed)
            mend()
            assert network.is_connected("b") == connected


def test_no_interface_that_others_need_is_taken_down(run: Path, seat: Seat):
    with pytest.raises(AssertionError, match="others need"):
        happen(Injection(0, "interface", 10, "step", (1,)), seat)


def test_no_disk_that_others_need_is_filled(run: Path, seat: Seat):
    with pytest.raises(AssertionError, match="not a file system of its own"):
        happen(Injection(0, "full", 10, "saving", (1,)), seat)
    assert not list((run / "checkpoints").glob(f"{BALLAST}*"))


def test_every_kind_that_befalls_a_process_is_tested_here():
    assert {*ENDS, *LEFT, "stuck", "sockets", "interface", "agent", "supervisor", "full"} == set(ACTIONS)


@pytest.mark.parametrize("seed", range(20))
def test_what_takes_time_to_be_noticed_begins_when_the_ranks_have_started_again(seed: int) -> None:
    """A slow rank that is killed for another's fault in its first step was never to be seen."""
    found = draw(dict.fromkeys(KINDS, 6), seed=seed, first=3, every=3, ranks=8, slots=4)
    for before, one in itertools.pairwise(found):
        if KINDS[one.kind].room:
            assert one.step > before.step + 2
        if KINDS[before.kind].room:
            assert one.step > before.step + KINDS[before.kind].room
