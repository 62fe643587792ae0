"""What runs leave in shared memory, and who clears it away."""

import os
import shutil
from pathlib import Path

import pytest

from megalith.fleet import copies, local
from megalith.fleet.commands import QuarantineCopy
from megalith.fleet.copies import PAGE, Buffer, Label, Layout
from megalith.fleet.heartbeat import VARIABLE, Heartbeat
from megalith.fleet.job import Job
from megalith.fleet.local import HEARTBEATS, LocalNodes, clear_disk, clear_memory, disk_root, memory_root
from megalith.fleet.nodes import Generation
from megalith.fleet.seat import Seat, node_folder
from megalith.fleet.tiers import Copy, Tier
from megalith.spec.fleet import FleetSpec


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(local, "SHARED_MEMORY", folder)
    return folder


def _nodes(run: Path) -> tuple[LocalNodes, Path]:
    memory = memory_root(run, "identity")
    return LocalNodes(Job("nobody:calls", {}, ranks=1, run_dir=run), memory=memory), memory


def test_a_start_clears_what_runs_left_whose_folders_are_gone(shared: Path, tmp_path: Path) -> None:
    (alive, used), (killed, left), (resumable, kept) = (_nodes(tmp_path / name) for name in ("alive", "killed", "resumable"))
    for nodes in (killed, resumable):
        nodes.close(forget=False)  # as far as another process can tell: all that holds them is gone with the process
    for name in ("alive", "killed"):
        shutil.rmtree(tmp_path / name)
    foreign = shared / "megalith-0123-4567"
    foreign.mkdir()
    clear_memory(tmp_path / "new")
    assert sorted(path for path in (used, left, kept, foreign) if path.exists()) == sorted([used, kept, foreign])
    alive.close(forget=False)
    clear_memory(tmp_path / "new")
    assert not used.exists()


def test_a_folder_that_was_made_anew_is_another_run(shared: Path, tmp_path: Path) -> None:
    nodes, memory = _nodes(tmp_path / "run")
    nodes.close(forget=False)
    shutil.rmtree(tmp_path / "run")
    assert memory_root(tmp_path / "run", "identity") != memory
    clear_memory(tmp_path / "run", keep=memory_root(tmp_path / "run", "identity"))
    assert not memory.exists()


def test_signs_of_life_are_written_to_memory_where_there_is_some(shared: Path, tmp_path: Path) -> None:
    """A store that is away keeps no rank from saying that it lives."""
    nodes, memory = _nodes(tmp_path / "run")
    nodes._heartbeats = nodes._new_heartbeats()
    told = nodes._assign(Generation("g", ("0",))).variables(0)
    Heartbeat.find(told).beat("step", 3)
    assert nodes.beats()[0].step == 3
    assert Path(told[VARIABLE]).parent == memory
    (memory / HEARTBEATS).unlink()
    (memory / HEARTBEATS).mkdir()  # nothing can be put in its place
    assert nodes._new_heartbeats().path == tmp_path / "run" / "ranks" / HEARTBEATS
    nodes.close(forget=True)
    without = LocalNodes(Job("nobody:calls", {}, ranks=1, run_dir=tmp_path / "run"))
    assert without._new_heartbeats().path == tmp_path / "run" / "ranks" / HEARTBEATS
    without.close(forget=True)


# --- copies on disk


def _on_disk(tmp_path: Path, *, disk_every: int) -> tuple[LocalNodes, Path | None]:
    """Two nodes with a rank each, and the root of their copies on disk."""
    run = tmp_path / "run"
    job = Job("nobody:calls", {}, ranks=2, run_dir=run, fallback=Job("nobody:calls", {}, ranks=1, run_dir=run))
    disk = disk_root(run, "identity", FleetSpec(disk=str(tmp_path / "scratch"), disk_every=disk_every))
    both = LocalNodes(job, names=("a", "b"), memory=memory_root(run, "identity"), disk=disk)
    return both, disk


def _write(root: Path, rank: int, step: int) -> None:
    layout = Layout.of([("w", "F32", (4,), 16)])
    folder = node_folder(root, "ab"[rank])
    buffer = Buffer.create(folder / copies.file_name("own", rank, step), len(layout.dump()) + layout.payload)
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
    assert {(piece.tier, piece.step) for piece in copies.held("a", memory=None, disk=disk)} == {(Tier.DISK, 4), (Tier.DISK, 8)}
    assert copies.corrupt_piece(node_folder(disk, "b"), rank=1, step=4)
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
        assert Seat.find(around | told).disk == (None if shrunk else disk)
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
