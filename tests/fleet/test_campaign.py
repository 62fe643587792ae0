"""What a campaign concludes from two event logs, without processes; and what it leaves of those it starts."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megalith import events
from megalith.fleet import faults
from megalith.fleet.campaign import (
    Judgement,
    Ran,
    clear,
    data_of,
    fates_of,
    judge,
    may_copy,
    may_mount,
    possible,
    run,
    small_disk,
)
from megalith.fleet.faults import Injection
from megalith.spec.fleet import FleetSpec
from megalith.spec.run import DataSpec
from tests.fleet.conftest import is_alive, until
from tests.patience import PATIENCE

KILL, STOP = Injection(0, "kill", 3, "step", (1,)), Injection(1, "stop", 6, "step", (2,))
STATE = {"weights": "abc", "samples": 80}


def _incident(number: int, at: float, cause: str, rank: int | None, **evidence: Any) -> events.Incident:
    return events.Incident(
        incident=number, began=at - 0.1, step=3, cause=cause, reason="because", node="0", rank=rank,
        evidence={"kind": cause, "rank": rank} | evidence, commands=[], time=at,
    )  # fmt: skip


def _step(number: int, at: float, loss: float | None = None) -> events.Step:
    return events.Step(
        step=number, loss=loss or 1 / number, grad_norm=1.0, lr=1.0, tokens=8, tokens_seen=8 * number, seconds=0.5,
        tokens_per_second=16.0, mfu=None, breakdown={}, memory={}, time=at,
    )  # fmt: skip


def _log(folder: Path, *records: events.Event) -> Path:
    log = events.EventLog(folder)
    for record in records:
        log.write(record)
    log.close()
    return folder


def _started(at: int) -> events.RunStarted:
    return events.RunStarted(
        spec={}, device="cpu", world=4, resumed_step=at, versions={}, peak_flops=None, peak_source="", flops_per_token=1.0,
        flops_convention="", parameters=1,
    )  # fmt: skip


def _runs(folder: Path, *, blamed: int = 1, loss: float | None = None) -> tuple[Ran, Ran, Path]:
    """A run of ten steps, and the same with a kill and a hang: steps 4 and 7 were done again."""
    whole = _log(folder / "whole", _started(0), *(_step(i, 100.0 + i) for i in range(1, 11)))
    hurt = _log(
        folder / "faulted",
        _started(0),
        *(_step(i, 200.0 + i) for i in range(1, 4)),
        _incident(1, 204.5, "rank_failed", blamed),
        _started(3),
        events.Recovery(incident=1, step=3, restored="step 3 in memory", lost_steps=0, time=205.0),
        *(_step(i, 202.0 + i) for i in range(4, 7)),
        _incident(2, 210.0, "hang", 2),
        _started(5),
        events.Recovery(incident=2, step=5, restored="step 5 in memory", lost_steps=1, time=211.0),
        *(_step(i, 206.0 + i, loss if i == 8 else None) for i in range(6, 11)),
    )
    file = folder / "faults.json"
    faults.save(file, [KILL, STOP])
    for number, rank, at in ((0, 1, 204.2), (1, 2, 208.5)):
        (folder / "faults.came" / f"{number}-{rank}").write_text(f"{at} 0 ")
    return Ran(whole, 10.0, 0, ()), Ran(hurt, 20.0, 0, ()), file


def _judged(folder: Path, **changes: Any) -> Judgement:
    whole, faulted, file = _runs(folder, **changes)
    return judge(whole, faulted, injections=file, states=(STATE, dict(STATE)), left_out={})


def test_a_run_that_ended_like_the_other_has_passed(tmp_path: Path):
    found = _judged(tmp_path)
    assert found.passed, found.problems
    assert (found.injected, found.handled, found.blamed, found.lost_steps, found.false_alarms) == (2, 2, (2, 2), 1, 0)
    kill, stop = found.rows
    assert (kill.seen_as, round(kill.detection or 0, 3), kill.recovery) == ("rank_failed", 0.3, 0.5)
    assert (stop.seen_as, stop.detection, stop.recovery) == ("hang", 1.5, 1.0)


def test_another_end_state_is_not_passed(tmp_path: Path):
    whole, faulted, file = _runs(tmp_path)
    found = judge(whole, faulted, injections=file, states=(STATE, STATE | {"weights": "abd"}), left_out={})
    assert found.problems == ("the end state differs from that of the run without faults",)
    assert not judge(whole, faulted, injections=file, states=(None, None), left_out={}).passed, "nothing was compared"


def test_another_loss_in_one_step_is_not_passed(tmp_path: Path):
    assert _judged(tmp_path, loss=0.5).problems == ("steps with other losses: 1, first 8",)


def test_the_wrong_rank_blamed_is_not_passed(tmp_path: Path):
    found = _judged(tmp_path, blamed=3)
    assert found.blamed == (1, 2)
    assert "fewer than 98 %" in found.problems[0]


def test_a_fault_that_never_came_is_not_passed(tmp_path: Path):
    whole, faulted, file = _runs(tmp_path)
    next((tmp_path / "faults.came").glob("1-*")).unlink()
    found = judge(whole, faulted, injections=file, states=(STATE, STATE), left_out={})
    assert found.problems == ("fault 1 (stop at step 6) never came",)
    assert found.false_alarms == 1, "an incident that no fault explains"


def test_an_unexpected_end_is_not_passed(tmp_path: Path):
    whole, faulted, file = _runs(tmp_path)
    found = judge(whole, replace(faulted, by_hand=1), injections=file, states=(STATE, STATE), left_out={})
    assert not found.passed


def test_faults_that_overlap_share_an_incident_which_may_name_either(tmp_path: Path):
    both = [KILL, replace(STOP, kind="segfault", step=3)]
    records: list[dict[str, Any]] = [
        {"type": "incident", "incident": 1, "time": 5.0, "cause": "rank_failed", "rank": 2, "node": "0", "evidence": {}},
        {"type": "recovery", "incident": 1, "time": 6.0},
    ]
    fates = fates_of(both, {0: (4.0, "0"), 1: (4.1, "0")}, records)
    assert [fate.blamed for fate in fates] == [True, True]
    assert all(fate.handled for fate in fates)


def test_what_a_run_is_not_made_for_is_left_out_with_the_reason():
    out, kinds = possible(FleetSpec(), own_disk=False, own_data=False, no_network="needs root")
    assert out == {
        "gradient": "fleet.verify_every is off",
        "once": "fleet.verify_every is off",
        "node": "fleet.nodes = 1",
        "full": "no checkpoints, or no right to mount a small disk for them",
        "interface": "fleet.nodes = 1",
        "shard": "the data is larger than the 1 GiB that a campaign copies, to hurt the copy",
    }
    assert "kill" in kinds
    assert "gradient" not in kinds
    some = FleetSpec(nodes=2, verify_every=4)
    assert possible(some, own_disk=True, own_data=True, no_network=None)[0] == {"once": 'fleet.verify = "one"'}
    whole = some.model_copy(update={"verify": "all"})
    assert not possible(whole, own_disk=True, own_data=True, no_network=None)[0]
    left = possible(whole, own_disk=True, own_data=True, no_network="needs root, who alone may make network namespaces")[0]
    assert list(left) == ["interface"]
    assert "root" in left["interface"]


def test_the_run_that_is_hurt_has_data_of_its_own_and_that_of_the_other_behind_it(tmp_path: Path):
    theirs = tmp_path / "data"
    theirs.mkdir()
    (theirs / "shard").write_text("tokens")
    assert may_copy(theirs)
    spec = data_of(DataSpec(path=str(theirs), copies=("far",)), tmp_path / "out")
    assert (spec.path, spec.copies) == (str(tmp_path / "out"), (str(theirs), "far"))
    assert (tmp_path / "out" / "shard").read_text() == "tokens"
    assert (tmp_path / "out" / faults.OWN_DATA).exists()
    assert not (theirs / faults.OWN_DATA).exists()


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
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "test", str(disk)], check=True)
    clear(tmp_path / "out")
    assert (tmp_path / "out").is_dir()
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal")
def test_a_campaign_that_is_killed_leaves_no_run_behind(tmp_path: Path) -> None:
    """Whose ranks would go on training, for nobody."""
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
