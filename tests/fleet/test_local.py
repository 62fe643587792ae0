"""What runs leave in shared memory, and who clears it away."""

import shutil
from pathlib import Path

import pytest

from megalith.fleet import local
from megalith.fleet.job import Job
from megalith.fleet.local import LocalNodes, clear_memory, memory_root


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
