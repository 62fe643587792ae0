"""Leftovers of runs in memory and on disks are listed, and removed if no process uses them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megalith.control import controller
from megalith.control.outcome import Outcome
from megalith.fleet.exit_codes import ExitCode
from megalith.fleet.job import Job
from megalith.fleet.local import LocalNodes
from megalith.fleet.rank_info import node_folder
from megalith.fleet.secure import key
from megalith.fleet.tiers import roots
from megalith.fleet.tiers.copies import PAGE, Buffer, Label, Layout
from megalith.spec.fleet import FleetSpec
from tests.commands.calling import call


@pytest.fixture(autouse=True)
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(roots, "SHARED_MEMORY", folder)
    monkeypatch.setattr(FleetSpec.model_fields["disk"], "default", str(tmp_path / "disk"))
    return folder


def begin(run: Path, *, disk: Path | None = None) -> LocalNodes:
    """Begin a run that has copied its state after step 40."""
    memory = roots.memory_root(run, "spec")
    nodes = LocalNodes(Job("nobody:calls", {}, ranks=1, run_dir=run), memory=memory, disk=disk)
    secret = key.of_run(run)
    text = Layout(()).dump()
    buffer = Buffer.create(node_folder(memory, "0") / "own-0.0", len(text) + PAGE, key=secret)
    buffer.commit(Label(40, 0, 0, 1, 0, len(text), PAGE))
    buffer.close()
    return nodes


def listed(*arguments: str) -> list[dict[str, Any]]:
    result = call("clean", "--json", *arguments)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["found"]


def test_only_what_no_process_uses_is_cleared(shared: Path) -> None:
    running, ended, gone = Path("running"), Path("ended"), Path("gone")
    nodes = begin(running)
    for run in (ended, gone):
        begin(run).close(forget=False)
    shutil.rmtree(gone)
    found = {Path(one["run"]).name: one for one in listed()}
    assert {name: one["state"] for name, one in found.items()} == {"running": "in use", "ended": "ended", "gone": "abandoned"}
    assert {name: one["step"] for name, one in found.items()} == {"running": 40, "ended": 40, "gone": None}
    assert found["ended"]["bytes"] >= 3 * PAGE
    result = call("clean")
    assert result.exit_code == 0
    assert "nothing was cleared: add --yes" in result.stdout
    assert "the state after step 40" in result.stdout and "which has no checkpoint" in result.stdout
    assert len(list(shared.iterdir())) == 3
    assert [one["cleared"] for one in listed("--yes", "ended")] == [True]
    assert "cleared 1 folder" in call("clean", "--yes").stdout
    assert [path.name for path in shared.iterdir()] == [Path(found["running"]["path"]).name]
    nodes.close(forget=True)
    assert "no run has left anything" in call("clean").stdout


def test_a_run_without_anything_left_has_nothing_to_be_cleared() -> None:
    Path("fresh").mkdir()
    assert listed("fresh") == []


def test_disks_that_runs_name_are_looked_at_and_others_that_are_given(tmp_path: Path) -> None:
    named, given = tmp_path / "named", tmp_path / "given"
    for run, disk in (("one", named), ("two", given)):
        fleet = FleetSpec(disk=str(disk), disk_every=1)
        begin(Path(run), disk=roots.disk_root(Path(run), "spec", fleet)).close(forget=False)
    Path("one/spec.json").write_text(json.dumps({"fleet": {"disk": str(named)}}))
    on_disk = [one for one in listed() if one["where"] == "disk"]
    assert [Path(one["run"]).name for one in on_disk] == ["one"]
    assert len([one for one in listed("--disk", str(given)) if one["where"] == "disk"]) == 2
    listed("--yes", "--disk", str(given))
    assert not [*named.iterdir(), *given.iterdir()]


def test_foreign_and_torn_folders_are_left_alone(shared: Path, tmp_path: Path) -> None:
    (shared / "megalith-notes").mkdir()
    (shared / "megalith-torn").mkdir(mode=0o700)
    (shared / "megalith-torn" / roots.OWNER).write_text('{"run": 3')
    (shared / "megalith-link").symlink_to(tmp_path)
    assert listed("--yes") == []
    assert len(list(shared.iterdir())) == 3


@pytest.mark.parametrize("code", [ExitCode.LOST, ExitCode.FINISHED])
def test_a_run_that_ends_says_what_it_leaves(code: ExitCode, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_here(job: Job, **_: Any) -> Outcome:
        begin(job.run_dir).close(forget=False)
        return Outcome(code, False, None, (), (), (), None, "lost its node")

    monkeypatch.setattr(controller, "run_here", run_here)
    result = call("train", str(run))
    assert result.exit_code == code, result.output
    words = "the state after step 40. The same command resumes from this copy; `megalith clean runs/first` clears the copy"
    assert (words in result.stderr) == (code == ExitCode.LOST)
