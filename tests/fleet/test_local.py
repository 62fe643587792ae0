"""Files of ended runs in shared memory, and their removal."""

import os
import shutil
from pathlib import Path

import pytest

from megalith.control import leftovers
from megalith.fleet.commands import QuarantineCopy
from megalith.fleet.heartbeat import VARIABLE, Heartbeat
from megalith.fleet.job import Job
from megalith.fleet.local import HEARTBEATS, LocalNodes
from megalith.fleet.nodes import Generation
from megalith.fleet.observations import NodesLost
from megalith.fleet.rank_info import RankInfo, node_folder
from megalith.fleet.secure import key
from megalith.fleet.tiers import Copy, Tier, copies, roots
from megalith.fleet.tiers.copies import PAGE, Buffer, Label, Layout
from megalith.fleet.tiers.roots import clear_disk, clear_memory, disk_root, memory_root
from megalith.spec.fleet import FleetSpec
from tests.keys import KEY, OTHER_KEY


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(roots, "SHARED_MEMORY", folder)
    monkeypatch.setenv(key.VARIABLE, KEY.text)
    return folder


def _nodes(run: Path) -> tuple[LocalNodes, Path]:
    memory = memory_root(run, "identity")
    return LocalNodes(Job("nobody:calls", {}, ranks=1, run_dir=run), memory=memory), memory


def test_a_start_clears_what_runs_left_whose_folders_are_gone(shared: Path, tmp_path: Path) -> None:
    (alive, used), (killed, left), (resumable, kept) = (_nodes(tmp_path / name) for name in ("alive", "killed", "resumable"))
    for nodes in (killed, resumable):
        nodes.close(forget=False)  # to other processes this is a killed run: nothing holds its files any more
    for name in ("alive", "killed"):
        shutil.rmtree(tmp_path / name)
    foreign = shared / "megalith-0123-4567"
    foreign.mkdir()
    clear_memory(tmp_path / "new")
    assert sorted(path for path in (used, left, kept, foreign) if path.exists()) == sorted([used, kept, foreign])
    alive.close(forget=False)
    clear_memory(tmp_path / "new")
    assert not used.exists()


def test_copies_of_a_run_that_goes_on_are_kept_by_the_next_run_of_its_folder(shared: Path, tmp_path: Path) -> None:
    nodes, memory = _nodes(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    clear_memory(tmp_path / "run", keep=memory_root(tmp_path / "run", "identity"))
    assert memory.is_dir(), "a process holds them"
    nodes.close(forget=False)


def test_copies_of_a_run_whose_file_system_is_away_are_kept(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounted = {str(tmp_path / "store"), "/"}
    monkeypatch.setattr(os.path, "ismount", lambda path: str(path) in mounted)
    nodes, memory = _nodes(tmp_path / "store" / "run")
    nodes.close(forget=False)
    (tmp_path / "store").rename(tmp_path / "away")
    mounted.remove(str(tmp_path / "store"))
    clear_memory(tmp_path / "new")
    assert memory.is_dir()
    assert [one.state for one in leftovers.find(run_dir=tmp_path / "store" / "run")] == ["ended"]
    mounted.add(str(tmp_path / "store"))
    assert [one.state for one in leftovers.find(run_dir=tmp_path / "store" / "run")] == ["abandoned"]
    clear_memory(tmp_path / "new")
    assert not memory.exists(), "its file system is there, but not its folder"


def test_a_folder_that_was_made_anew_is_another_run(shared: Path, tmp_path: Path) -> None:
    nodes, memory = _nodes(tmp_path / "run")
    nodes.close(forget=False)
    shutil.rmtree(tmp_path / "run")
    assert memory_root(tmp_path / "run", "identity") != memory
    clear_memory(tmp_path / "run", keep=memory_root(tmp_path / "run", "identity"))
    assert not memory.exists()


def test_signs_of_life_are_written_to_memory_where_there_is_some(shared: Path, tmp_path: Path) -> None:
    """Ranks can send heartbeats although the shared store is unreachable."""
    nodes, memory = _nodes(tmp_path / "run")
    nodes._heartbeats = nodes._new_heartbeats()
    told = nodes._assign(Generation("g", ("0",))).variables(0)
    Heartbeat.find(told).beat("step", 3)
    assert nodes.beats()[0].step == 3
    assert Path(told[VARIABLE]).parent == memory
    (memory / HEARTBEATS).unlink()
    (memory / HEARTBEATS).mkdir()  # no other folder can be put in its place
    assert nodes._new_heartbeats().path == tmp_path / "run" / "ranks" / HEARTBEATS
    nodes.close(forget=True)
    without = LocalNodes(Job("nobody:calls", {}, ranks=1, run_dir=tmp_path / "run"))
    assert without._new_heartbeats().path == tmp_path / "run" / "ranks" / HEARTBEATS
    without.close(forget=True)


# --- copies on disk


def _on_disk(tmp_path: Path, *, disk_every: int) -> tuple[LocalNodes, Path | None]:
    """Return two nodes with a rank each, and the root of their copies on disk."""
    run = tmp_path / "run"
    job = Job("nobody:calls", {}, ranks=2, run_dir=run, fallback=Job("nobody:calls", {}, ranks=1, run_dir=run))
    disk = disk_root(run, "identity", FleetSpec(disk=str(tmp_path / "scratch"), disk_every=disk_every))
    both = LocalNodes(job, names=("a", "b"), memory=memory_root(run, "identity"), disk=disk)
    return both, disk


def _write(root: Path, rank: int, step: int) -> None:
    layout = Layout.of([("w", "F32", (4,), 16)])
    folder = node_folder(root, "ab"[rank])
    buffer = Buffer.create(folder / copies.file_name("own", rank, step), len(layout.dump()) + layout.payload, key=KEY)
    label = Label(step, step, rank, 2, 0, len(layout.dump()), layout.payload)
    buffer.commit(label)
    buffer.close()


def test_copies_on_disk_are_found_set_aside_and_forgotten(shared: Path, tmp_path: Path) -> None:
    nodes, disk = _on_disk(tmp_path, disk_every=4)
    assert disk is not None
    for rank in range(2):
        _write(disk, rank, 4)
        _write(disk, rank, 8)
    assert nodes.survey(("a", "b")) == (Copy(Tier.DISK, 8), Copy(Tier.DISK, 4))
    assert {(piece.tier, piece.step) for piece in copies.held("a", memory=None, disk=disk, key=KEY)} == {
        (Tier.DISK, 4),
        (Tier.DISK, 8),
    }
    assert copies.corrupt_piece(node_folder(disk, "b"), key=KEY, rank=1, step=4)
    assert nodes.survey(("a", "b"))[1] == Copy(Tier.DISK, 4), "who loads it reads it: to ask what is there must not take minutes"
    os.truncate(node_folder(disk, "b") / copies.file_name("own", 1, 8), PAGE + 1)
    assert nodes.survey(("a", "b"))[0] == Copy(Tier.DISK, 8, frozenset({1})), "cut off"
    _write(disk, 1, 8)
    nodes._assignment = nodes._assign(Generation("g", ("a", "b")))
    nodes.set_aside(QuarantineCopy(Tier.DISK, 8, 1))
    assert [path.name for path in node_folder(disk, "b").glob("aside-*")] == ["aside-own-1.8"]
    shutil.rmtree(node_folder(memory_root(tmp_path / "run", "identity"), "b"))
    nodes.forget()
    assert nodes.survey(("a", "b")) == (), "also on the disk of a node whose memory is gone"
    nodes.close(forget=True)
    assert not disk.exists()


def test_ranks_are_told_of_the_disk_only_where_copies_go_there(shared: Path, tmp_path: Path) -> None:
    around = {"MEGALITH_DISK": "/of/a/run/around/this/one"}
    for every, shrunk in ((4, False), (4, True), (0, False)):
        nodes, disk = _on_disk(tmp_path, disk_every=every)
        told = nodes._assign(Generation("g", ("a", "b"), shrunk=shrunk)).variables(0)
        assert RankInfo.find(around | told).disk == (None if shrunk else disk)
        assert (disk is None) == (every == 0)
        nodes.close(forget=False)


def test_a_start_clears_disks_as_it_clears_memory(shared: Path, tmp_path: Path) -> None:
    nodes, disk = _on_disk(tmp_path, disk_every=4)
    assert disk is not None
    nodes.close(forget=False)
    fleet = FleetSpec(disk=str(disk.parent))
    clear_disk(tmp_path / "other", fleet)
    clear_disk(tmp_path / "run", fleet, keep=disk)
    assert disk.is_dir()
    clear_disk(tmp_path / "run", fleet)
    assert not disk.exists()


def test_copies_on_a_disk_outlive_a_share_that_is_not_mounted_yet(shared: Path, tmp_path: Path) -> None:
    nodes, disk = _on_disk(tmp_path, disk_every=4)
    assert disk is not None
    nodes.close(forget=False)
    (tmp_path / "run").rename(tmp_path / "not mounted")
    clear_disk(tmp_path / "other", FleetSpec(disk=str(disk.parent)))
    assert disk.is_dir()


def test_a_disk_that_cannot_be_written_to_keeps_no_node_from_joining(shared: Path, tmp_path: Path) -> None:
    (tmp_path / "scratch").touch()
    nodes, _ = _on_disk(tmp_path, disk_every=4)
    assert nodes.there() == ("a", "b")
    assert nodes.survey(("a", "b")) == ()
    nodes.close(forget=True)


# --- another user's folders


def _planted(run: Path) -> Path:
    """Make a folder as an attacker would who predicted the name of a run's folder: everybody may write to it."""
    folder = memory_root(run, "identity")
    folder.mkdir()
    folder.chmod(0o777)
    return folder


def test_a_folder_that_others_may_write_to_is_named_and_another_is_taken(
    shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    planted = _planted(run)
    nodes, memory = _nodes(run)
    assert memory != planted and memory.parent == planted.parent
    told = capsys.readouterr().err
    assert (
        f"{planted}: other users may write to it (mode 0777)" in told and f"Copies of the state are written to {memory}" in told
    )
    nodes.close(forget=False)
    assert memory_root(run, "identity") == memory, "so the next command finds the copies"
    clear_memory(run)
    assert planted.is_dir() and not memory.exists()
    assert not list(planted.iterdir())


def test_a_folder_of_another_user_is_neither_used_nor_cleared(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    nodes, theirs = _nodes(run)
    nodes.close(forget=False)
    stat, number = os.fstat, theirs.stat().st_ino

    def fstat(descriptor: int) -> os.stat_result:
        found = stat(descriptor)
        return os.stat_result((*found[:4], 54321, *found[5:])) if found.st_ino == number else found

    monkeypatch.setattr(os, "fstat", fstat)
    again, mine = _nodes(run)
    assert f"{theirs}: it belongs to user 54321, not to user {os.geteuid()}" in capsys.readouterr().err
    assert mine != theirs and mine.is_dir()
    again.close(forget=False)
    clear_memory(run)
    assert not mine.exists()
    shutil.rmtree(run)
    clear_memory(tmp_path / "new")
    assert theirs.is_dir()


def test_a_folder_that_others_take_while_a_run_goes_on_loses_no_node_and_is_left_at_the_next_start(
    shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job("nobody:calls", {}, ranks=2, run_dir=tmp_path / "run")
    taken = memory_root(job.run_dir, "identity")
    nodes = LocalNodes(job, names=("a", "b"), memory=taken)
    shutil.rmtree(taken)
    taken.mkdir()
    taken.chmod(0o777)
    assert not nodes.wait(0.0), "nobody is lost: another one's folder says nothing of this run's nodes"
    assert nodes.there() == ("a", "b") and not list(taken.iterdir())
    nodes._move_memory()
    mine = nodes.memory
    assert mine is not None and mine != taken and nodes.there() == ("a", "b")
    assert f"{taken}: other users may write to it (mode 0777)" in capsys.readouterr().err
    shutil.rmtree(node_folder(mine, "b"))
    assert [(observation.kind, observation.nodes) for observation in nodes.wait(0.0) if isinstance(observation, NodesLost)] == [
        ("nodes_lost", ("b",))
    ]
    nodes.close(forget=True)
    assert taken.is_dir() and not mine.exists()
    assert memory_root(job.run_dir, "identity") not in (taken, mine)


def test_a_pipe_that_somebody_left_in_shared_memory_is_not_waited_for(shared: Path, tmp_path: Path) -> None:
    foreign = shared / "megalith-0123-4567"
    foreign.mkdir()
    os.mkfifo(foreign / roots.OWNER)
    (shared / "megalith-0123-89ab").symlink_to(foreign)
    clear_memory(tmp_path / "new")
    assert foreign.is_dir()


def test_copies_made_under_another_key_are_none(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes, disk = _on_disk(tmp_path, disk_every=4)
    assert disk is not None
    for rank in range(2):
        _write(disk, rank, 4)
    assert nodes.survey(("a", "b")) == (Copy(Tier.DISK, 4),)
    nodes.close(forget=False)
    monkeypatch.setenv(key.VARIABLE, OTHER_KEY.text)
    nodes, _ = _on_disk(tmp_path, disk_every=4)
    assert nodes.survey(("a", "b")) == ()
    nodes.close(forget=False)


def test_ranks_get_the_key_from_their_environment_and_no_file_holds_it(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(key.VARIABLE)
    nodes, _ = _nodes(tmp_path / "run")
    nodes._assign(Generation("g", ("0",))).save(tmp_path / "run" / "ranks" / "job.json")
    text = key.path_in(tmp_path / "run").read_text().strip()
    assert nodes._secret() == {key.VARIABLE: text}
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert [path.name for path in files if text in path.read_text()] == ["key"]
    nodes.close(forget=True)


def test_memory_that_somebody_removes_is_made_anew_and_loses_no_node(
    shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A cleaner of temporary files may remove the folder, or systemd when its user logs out. A rehearsed node without its
    own folder is lost."""
    for names, removed, lost in (("0",), "", ()), (("0",), "node-0", ()), (("0", "1"), "", ()), (("0", "1"), "node-1", ("1",)):
        run = tmp_path / f"run-{len(names)}{removed}"
        memory = roots.memory_root(run, "spec")
        nodes = LocalNodes(Job("nobody:calls", {}, ranks=2, run_dir=run), names=names, memory=memory)
        assert nodes.wait(0) == []
        shutil.rmtree(memory / removed)
        gone = [name for observation in nodes.wait(0) if isinstance(observation, NodesLost) for name in observation.nodes]
        assert tuple(gone) == lost
        assert nodes.there() == tuple(name for name in names if name not in lost)
        assert capsys.readouterr().err.count(f"{memory} was removed by another process") == (not lost)
        assert not roots._is_abandoned(memory), "it is in use"
        shutil.rmtree(run)
        assert not roots._is_abandoned(memory)
        assert not run.exists()
        nodes.close(forget=True)


def test_another_users_folder_in_the_place_of_the_copies_loses_no_node_and_is_named_once(
    shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = roots.memory_root(tmp_path / "run", "spec")
    nodes = LocalNodes(Job("nobody:calls", {}, ranks=2, run_dir=tmp_path / "run"), names=("0",), memory=memory)
    shutil.rmtree(memory)
    memory.mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: memory.stat().st_uid + 1)
    assert [observation for _ in range(5) for observation in nodes.wait(0)] == []
    assert nodes.there() == ("0",)
    said = capsys.readouterr().err
    assert said.count("cannot be written") == 1
    assert f"{memory}" in said and "belongs to user" in said
    monkeypatch.undo()
    nodes.close(forget=True)
