"""Each kind of fault has its effect on a process, its connections and its files."""

import faulthandler
import os
import shutil
import signal
import socket
import stat
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from megalith.fleet import actions, hooks, injection
from megalith.fleet.actions import ACTIONS, BALLAST, happen
from megalith.fleet.hooks import Faults
from megalith.fleet.injection import Injection
from megalith.fleet.rank_info import RankInfo, node_folder
from megalith.fleet.tiers import copies
from megalith.machine import networks
from megalith.rehearse.campaign import REPAIR_SECONDS, may_mount, mender, small_disk
from tests.keys import KEY


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
def rank_info(tmp_path: Path) -> RankInfo:
    """Rank 1 of two ranks on two nodes. Both nodes have a copy of its state after step 4."""
    placement = ("a", "b")
    for rank, node in enumerate(placement):
        layout = copies.Layout.of([("weights.w", "float32", (16,), 64)])
        folder = node_folder(tmp_path / "memory", node)
        buffer = copies.Buffer.create(folder / copies.file_name("own", rank, 0), len(layout.dump()) + layout.payload, key=KEY)
        label = copies.Label(4, 32, rank, 2, 0, len(layout.dump()), layout.payload)
        buffer.commit(label)
        buffer.close()
    shutil.copytree(tmp_path / "memory", tmp_path / "disk")
    return RankInfo(1, 2, placement, tmp_path / "memory", tmp_path / "disk", key=KEY)


def _befall(kind: str, rank_info: RankInfo, *, step: int = 4, closed: Sequence[int] = ()) -> int:
    """Return the exit status of a rank with a fault, as in `subprocess`, or 0 if it survived. Its parent is a fork server with no
    other ranks. `closed`: descriptors that both do not inherit."""
    server = os.fork()
    if server == 0:
        for descriptor in closed:
            os.close(descriptor)
        os._exit(_befall_rank(kind, rank_info, step) & 0xFF)
    end = os.waitstatus_to_exitcode(os.waitpid(server, 0)[1])
    return end if end < 0x80 else end - 0x100


def _befall_rank(kind: str, rank_info: RankInfo, step: int) -> int:
    process = os.fork()
    if process == 0:
        faulthandler.disable()
        try:
            happen(Injection(0, kind, step, "step", (rank_info.rank,)), rank_info)
        except actions.Injected:
            os._exit(7)
        finally:
            os._exit(0)
    _, status = os.waitpid(process, os.WUNTRACED)
    if os.WIFSTOPPED(status):
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        return -os.WSTOPSIG(status)
    return os.waitstatus_to_exitcode(status)


def _held(rank_info: RankInfo, *, disk: bool = False) -> dict[str, list[bool]]:
    """Return the nodes that hold copies in memory, or on disk, and whether they are intact."""
    root = rank_info.disk if disk else rank_info.memory
    assert root is not None
    found = {node: [p.intact for p in copies.pieces(node_folder(root, node), key=KEY)] for node in rank_info.placement}
    return {node: pieces for node, pieces in found.items() if pieces}


ENDS = {"kill": -9, "stop": -signal.SIGSTOP, "segfault": -11, "exception": 7, "preemption": -15}
WHOLE, NOTHING = {"a": [True], "b": [True]}, {}


@pytest.mark.parametrize("kind", ENDS)
def test_a_process_is_ended_as_the_fault_says_and_copies_in_memory_stay(kind: str, run: Path, rank_info: RankInfo):
    assert _befall(kind, rank_info) == ENDS[kind]
    assert _held(rank_info) == WHOLE


def test_a_call_that_never_returns_leaves_a_process_that_lives_and_handles_signals(run: Path, rank_info: RankInfo):
    def heard(number: int, frame: object) -> None:
        os.write(writing, b"!")

    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        signal.signal(signal.SIGTERM, heard)
        os.write(writing, b"?")
        happen(Injection(0, "stuck", 4, "step", (rank_info.rank,)), rank_info)
        os._exit(0)
    for expected in (b"?", b"!", b"!"):
        assert os.read(reading, 1) == expected
        os.kill(process, signal.SIGTERM)
    assert os.waitpid(process, os.WNOHANG) == (0, 0)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    assert _held(rank_info) == WHOLE


LEFT = {
    "checkpoint": NOTHING,
    "altered": NOTHING,
    "node": {"a": [True]},
    "two": {"a": [True]},
    "copy": {"a": [True], "b": [False]},
}
LEFT_ON_DISK = {"checkpoint": NOTHING, "altered": NOTHING, "node": {"a": [True]}, "two": WHOLE, "copy": WHOLE}


@pytest.mark.parametrize("kind", LEFT)
def test_memory_is_lost_or_altered_with_the_process(kind: str, run: Path, rank_info: RankInfo):
    assert rank_info.memory is not None
    assert _befall(kind, rank_info) == -signal.SIGKILL
    assert _held(rank_info) == LEFT[kind]
    assert _held(rank_info, disk=True) == LEFT_ON_DISK[kind]
    assert node_folder(rank_info.memory, "b").is_dir() == (kind != "node")
    whole = [run / "checkpoints" / f"step-{step:08}" / f"rank-{rank}" for step, rank in ((2, 0), (2, 1), (4, 0))]
    assert all(path.read_bytes() == bytes(range(100 + int(path.name[-1]))) for path in whole)
    newest = (run / "checkpoints" / "step-00000004" / "rank-1").read_bytes()
    wrong = sum(one != other for one, other in zip(newest, range(101), strict=False))
    assert (len(newest), wrong) == {"checkpoint": (50, 0), "altered": (101, 1)}.get(kind, (101, 0))


@pytest.mark.parametrize("kind", ["checkpoint", "altered"])
def test_memory_stays_lost_though_another_rank_was_copying(kind: str, run: Path, rank_info: RankInfo):
    """Otherwise the run would continue from memory, and the damage to its newest checkpoint would show only at the next fault."""
    assert rank_info.memory is not None
    server = os.fork()
    if server == 0:
        busy = os.fork()
        while busy == 0:
            (node_folder(rank_info.memory, "a") / "own-0-1").write_bytes(b"copy")
        time.sleep(0.1)
        end = _befall_rank(kind, rank_info, 4)
        time.sleep(0.1)
        left = [path for node in rank_info.placement for path in node_folder(rank_info.memory, node).iterdir()]
        os.kill(busy, signal.SIGKILL)
        os._exit(0 if end == -signal.SIGKILL and not left else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(server, 0)[1]) == 0


def test_torn_connections_end_for_both_sides_and_the_process_lives(run: Path, rank_info: RankInfo):
    # a connection that an earlier test has left open, in this process, is not the rank's to tear: torch aborts on some of them
    with socket.create_server(("127.0.0.1", 0)) as left, socket.create_connection(left.getsockname()) as other:
        sockets = [number for number in (int(entry.name) for entry in Path("/proc/self/fd").iterdir()) if _is_socket(number)]
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as mine:
            theirs, _ = server.accept()
            assert _befall("sockets", rank_info, closed=sockets) == 0
            assert (mine.recv(1), theirs.recv(1)) == (b"", b"")
            theirs.close()
        with left.accept()[0] as end:
            end.sendall(b"still there")
        assert other.recv(11) == b"still there"


def _is_socket(descriptor: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(descriptor).st_mode)
    except OSError:  # that of the folder that was listed
        return False


@pytest.mark.slow
def test_the_supervisor_is_the_process_that_holds_the_run_the_agent_that_which_keeps_the_rank(
    run: Path, rank_info: RankInfo, monkeypatch: pytest.MonkeyPatch
):
    supervisor, agent = _waiting(), _waiting()
    (run / "ranks").mkdir()
    (run / "ranks" / "lock").write_text(str(supervisor))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    for kind, process in (("agent", agent), ("supervisor", supervisor)):
        assert os.waitpid(process, os.WNOHANG) == (0, 0)
        assert _befall(kind, replace(rank_info, agent=agent)) == 0
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL


def _waiting() -> int:
    """Start a process that does nothing."""
    process = os.fork()
    if process == 0:
        signal.pause()
        os._exit(0)
    return process


@pytest.mark.skipif(not may_mount(), reason="needs the right to mount a file system")
def test_a_full_disk_has_room_again_at_the_next_checkpoint(run: Path, rank_info: RankInfo, monkeypatch: pytest.MonkeyPatch):
    shutil.rmtree(run / "checkpoints")
    injection.save(run.parent / "faults.json", [Injection(0, "full", 10, "saving", (0,))])
    monkeypatch.setenv(injection.VARIABLE, str(run.parent / "faults.json"))
    with small_disk(run / "checkpoints", size=1 << 20):
        assert _befall("full", rank_info, step=10) == 0
        file = run / "checkpoints" / "file"
        for step, room in ((10, False), (20, True)):
            hooks.at("saving", step)
            if room:
                file.write_bytes(bytes(1 << 19))
            else:
                with pytest.raises(OSError, match="No space left"):
                    file.write_bytes(bytes(1 << 19))


@pytest.mark.skipif(networks.missing() is not None, reason=networks.missing() or "")
def test_a_nodes_interface_goes_down_and_comes_up_when_the_campaign_mends_it(
    run: Path, rank_info: RankInfo, monkeypatch: pytest.MonkeyPatch
):
    file = run.parent / "faults.json"
    injection.save(file, [Injection(0, "interface", 4, "step", (1,))])
    with networks.joined(("a", "b")) as network:
        monkeypatch.setenv(networks.VARIABLE, network.family)
        process = os.fork()
        if process == 0:
            try:
                networks.enter("b")
                happen(next(Faults(file, rank_info).due("step", 4)), rank_info)
            finally:
                os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
        assert [network.is_connected(node) for node in rank_info.placement] == [True, False]
        mend, came = mender(file, network), injection.fired(file)[0][0]
        for passed, connected in ((REPAIR_SECONDS - 1, False), (REPAIR_SECONDS + 1, True)):
            monkeypatch.setattr(time, "time", lambda passed=passed: came + passed)
            mend()
            assert network.is_connected("b") == connected


def test_no_interface_that_others_need_is_taken_down(run: Path, rank_info: RankInfo):
    with pytest.raises(AssertionError, match="the campaign did not create"):
        happen(Injection(0, "interface", 10, "step", (1,)), rank_info)


def test_no_disk_that_others_need_is_filled(run: Path, rank_info: RankInfo):
    with pytest.raises(AssertionError, match="not a separate file system"):
        happen(Injection(0, "full", 10, "saving", (1,)), rank_info)
    assert not list((run / "checkpoints").glob(f"{BALLAST}*"))


def test_every_kind_that_befalls_a_process_is_tested_here():
    assert {*ENDS, *LEFT, "stuck", "sockets", "interface", "agent", "supervisor", "full"} == set(ACTIONS)
