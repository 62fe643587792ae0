"""Faults that a campaign can inject into a run, and processes that its runs leave behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megalith.fleet import injection
from megalith.rehearse.campaign import LISTED, aimed, clear, data_of, may_copy, may_mount, possible, ruled_out, run, small_disk
from megalith.rehearse.faults import OF_ONE_MEMORY, ON_DISK
from megalith.spec.fleet import FleetSpec
from megalith.spec.run import DataSpec
from tests.commands.calling import call, write_run
from tests.fleet.conftest import is_alive, until
from tests.patience import PATIENCE
from tests.specs import tiny_run


def test_what_a_run_is_not_made_for_is_left_out_with_the_reason():
    out, kinds = possible(FleetSpec(), own_disk=False, own_data=False, no_network="needs root")
    assert out == {
        "gradient": "fleet.verify_every is off",
        "once": "fleet.verify_every is off",
        "node": "fleet.nodes = 1",
        "full": "the run makes no checkpoints, or the user may not mount a small disk for them",
        "interface": "fleet.nodes = 1",
        "agent": "one process runs all nodes; with --agent-kills each node has an agent",
        "shard": "the data is larger than the 1 GiB that a campaign copies in order to damage the copy",
    }
    assert "kill" in kinds
    assert "gradient" not in kinds
    some = FleetSpec(nodes=2, verify_every=4)
    once = 'fleet.verify = "one": verification computes the step again, so it misses a one-off error in the first pass'
    there = {"own_disk": True, "own_data": True, "no_network": None}
    assert possible(some, **there)[0].items() >= {"once": once}.items()
    whole = some.model_copy(update={"verify": "all"})
    assert list(possible(whole, **there)[0]) == ["agent"]
    left = possible(whole, **there | {"no_network": "needs root, who alone may make network namespaces"})[0]
    assert list(left) == ["interface", "agent"]
    assert "root" in left["interface"]
    left, kinds = possible(whole, **there, agents=True)
    assert set(left) == {*OF_ONE_MEMORY, "interface"}
    assert "agent" in kinds


def test_faults_of_state_are_those_that_its_place_allows():
    def left(precision: str = "bf16", *, state: dict[str, object] | None = None, **optimizer: object) -> dict[str, str]:
        return ruled_out(tiny_run(plan={"state": state or {}}, train={"precision": precision}, optimizer=optimizer))

    resident = dict.fromkeys(ON_DISK, 'plan.state.optimizer = "device": no state is on disk')
    assert left() == left("fp32") == resident
    assert left(master="split16") == resident | {"weight": 'optimizer.master = "split16" keeps no fp32 weights in memory'}
    disk: dict[str, object] = {"optimizer": "disk"}
    moment, copy = "all moments are on disk", "state on disk has no copies in memory"
    assert left(state=disk) == {"copy": copy, "moment": moment, "weight": "all fp32 weights are on disk"}
    assert left("fp32", state=disk) == {"copy": copy, "moment": moment}
    assert left(state=disk | {"share": 0.5}) == {"copy": copy}
    out, kinds = possible(FleetSpec(), own_disk=True, own_data=True, no_network=None, elsewhere=left(state=disk))
    assert out["weight"] == "all fp32 weights are on disk"
    assert set(ON_DISK) < set(kinds) and not {"weight", "moment", "copy"} & set(kinds)


def test_faults_that_come_at_chosen_steps_alone_are_named_with_what_that_means():
    told = aimed(FleetSpec(verify_every=4, verify="all"), checkpoint_every=10, kinds=("once", "full", "kill"))
    assert told["full"] == "when a checkpoint is due, every 10th step"
    assert "with probability 1/4" in told["once"]
    assert "detected at whichever step it comes" in aimed(FleetSpec(verify_every=1), checkpoint_every=0, kinds=("once",))["once"]
    assert aimed(FleetSpec(), checkpoint_every=0, kinds=("kill",)) == {}


def test_the_run_that_is_hurt_has_data_of_its_own_and_that_of_the_other_behind_it(tmp_path: Path):
    theirs = tmp_path / "data"
    theirs.mkdir()
    (theirs / "shard").write_text("tokens")
    assert may_copy(theirs)
    spec = data_of(DataSpec(path=str(theirs), copies=("far",)), tmp_path / "out")
    assert (spec.path, spec.copies) == (str(tmp_path / "out"), (str(theirs), "far"))
    assert (tmp_path / "out" / "shard").read_text() == "tokens"
    assert (tmp_path / "out" / injection.OWN_DATA).exists()
    assert not (theirs / injection.OWN_DATA).exists()


@pytest.mark.skipif(not may_mount(), reason="needs the right to mount a file system")
def test_what_was_written_to_a_small_disk_is_there_afterwards(tmp_path: Path):
    with small_disk(tmp_path / "disk", size=1 << 20):
        (tmp_path / "disk" / "kept").write_text("words")
        with pytest.raises(OSError, match="No space left"):
            (tmp_path / "disk" / "large").write_bytes(bytes(1 << 21))
        (tmp_path / "disk" / "large").unlink()
    assert [(path.name, path.read_text()) for path in (tmp_path / "disk").iterdir()] == [("kept", "words")]
    assert not (tmp_path / "disk").is_mount()


@pytest.mark.skipif(not may_mount(), reason="needs the right to mount a file system")
def test_a_campaign_that_was_killed_leaves_no_disk_behind_for_the_next(tmp_path: Path):
    disk = tmp_path / "out" / "faulted" / "checkpoints"
    disk.mkdir(parents=True)
    (tmp_path / "out" / LISTED).touch()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "test", str(disk)], check=True)
    clear(tmp_path / "out")
    assert (tmp_path / "out").is_dir()
    assert not list((tmp_path / "out").iterdir())


def test_a_refused_command_leaves_an_earlier_campaign_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    write_run()
    (tmp_path / "out" / "whole").mkdir(parents=True)
    (tmp_path / "out" / LISTED).touch()
    result = call("campaign", "run.toml", "--kind", "typo", "--out", "out")
    assert result.exit_code == 2
    assert "--kind 'typo' is not known" in " ".join(result.stderr.split())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [LISTED, "whole"]


@pytest.mark.parametrize("name", ["run.toml", "data", "events.jsonl"])
def test_a_campaign_takes_no_folder_with_files_of_others(tmp_path: Path, name: str):
    (tmp_path / name).touch()
    with pytest.raises(FileExistsError, match=r"has files, but no campaign.*Give a new folder, or empty this one first"):
        clear(tmp_path)
    assert (tmp_path / name).exists()


@pytest.mark.parametrize("name", ["faults.json", "whole.log"])
def test_a_campaign_replaces_the_one_before(tmp_path: Path, name: str):
    (tmp_path / name).touch()
    clear(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal")
def test_a_campaign_that_is_killed_leaves_no_run_behind(tmp_path: Path) -> None:
    """Its ranks would otherwise continue to train, for nobody."""
    said = tmp_path / "pid"
    waits = f"import os, time; open({str(said)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    campaign = os.fork()
    if not campaign:
        run([sys.executable, "-c", waits], tmp_path / "faulted")
        os._exit(0)
    until(lambda: said.exists() and said.read_text() != "", seconds=PATIENCE)
    os.kill(campaign, signal.SIGKILL)
    os.waitpid(campaign, 0)
    until(lambda: not is_alive(int(said.read_text())), seconds=PATIENCE)
