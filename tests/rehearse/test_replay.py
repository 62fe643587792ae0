"""The simulator compared with a real campaign. `campaign/` has its list of faults and the parts of its log that are read here (24 faults,
seed 3, four ranks as two nodes and a spare, on two cores)."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megalith import events
from megalith.rehearse.faults import KINDS
from megalith.rehearse.replay import SHOWS, measured, replay

CAMPAIGN = Path(__file__).parent / "campaign"


def _changed(folder: Path, change: Any) -> Path:
    """Return the campaign with another specification."""
    out = shutil.copytree(CAMPAIGN, folder / "campaign")
    file = out / "faulted" / "spec.json"
    spec = json.loads(file.read_text())
    change(spec)
    file.write_text(json.dumps(spec))
    return out


def test_the_simulator_predicts_a_campaigns_goodput_from_its_own_latencies() -> None:
    found = replay(CAMPAIGN)
    assert abs(found.gap) < 0.05
    for what, recorded, predicted in found.rows():
        assert predicted == pytest.approx(recorded, rel=0.25), what
    assert sum(recorded for _, recorded, _ in found.rows()) == pytest.approx(found.recorded.wall)
    assert found.as_json() == json.loads(json.dumps(found.as_json()))


def test_and_not_that_of_a_run_with_another_policy(tmp_path: Path) -> None:
    """This shows that agreement is not vacuous: without copies in memory the same faults, noticed as quickly, would have cost
    far more."""
    found = replay(_changed(tmp_path, lambda spec: spec["fleet"].update(memory_every=0)))
    assert found.gap < -0.15


def test_without_faults_only_the_steps_take_time(tmp_path: Path) -> None:
    folder = shutil.copytree(CAMPAIGN, tmp_path / "campaign")
    (folder / "faults.json").write_text("[]")
    found = replay(folder)
    figures, steps = found.figures, found.recorded.steps
    assert found.restarts == 0
    assert found.wall == pytest.approx(steps * figures.step * (1 + figures.overhead) + figures.first)


@pytest.mark.slow
def test_every_kind_of_fault_can_be_played(tmp_path: Path) -> None:
    """Each fault comes alone, at step 20. The run ends, and has a restart if the fault needs one."""
    in_place = {"nan", "full", "shard", "slow-disk"}
    for kind, what in KINDS.items():
        folder = shutil.copytree(CAMPAIGN, tmp_path / kind)
        one = {
            "number": 0,
            "kind": kind,
            "step": 20,
            "moment": what.moment,
            "ranks": [1],
            "place": 0.5,
            "lasts": 1,
            "after": None,
        }
        (folder / "faults.json").write_text(json.dumps([one]))
        assert replay(folder).restarts == (0 if kind in in_place else 2 if kind in ("checkpoint", "altered") else 1), kind
    assert set(SHOWS) < set(KINDS)


def test_a_fault_during_recovery_costs_another_start(tmp_path: Path) -> None:
    folder = shutil.copytree(CAMPAIGN, tmp_path / "campaign")
    kill = {"number": 0, "kind": "kill", "step": 20, "moment": "step", "ranks": [1], "place": 0.5, "lasts": 1, "after": None}
    again = kill | {"number": 1, "moment": "building", "ranks": [2], "after": 0}
    (folder / "faults.json").write_text(json.dumps([kill, again]))
    assert replay(folder).restarts == 2


def test_figures_are_read_from_a_log() -> None:
    def step(number: int, at: float, seconds: float = 1.0) -> dict[str, Any]:
        return {"type": "step", "step": number, "time": at, "seconds": seconds}

    log: list[dict[str, Any]] = [
        {"type": "run_started", "time": 0.0, "resumed_step": 0}, step(1, 1.0), step(2, 2.1), step(3, 3.2),
        {"type": "incident", "incident": 1, "began": 3.5, "time": 3.6, "cause": "rank_failed", "commands": [{"kind": "restart"}]},
        {"type": "incident", "incident": 2, "began": 3.9, "time": 4.0, "cause": "rank_failed", "commands": [{"kind": "restart"}]},
        {"type": "run_started", "time": 4.4, "resumed_step": 3},
        {"type": "recovery", "incident": 1, "time": 4.5, "restored": "step 3 in memory", "lost_steps": 0},
        {"type": "recovery", "incident": 2, "time": 4.5, "restored": "step 3 in memory", "lost_steps": 0},
        step(4, 6.5, 2.0), step(5, 7.6),
    ]  # fmt: skip
    found = measured([event for event in map(events.load, log) if event is not None])
    assert (found.step, found.overhead, found.first) == pytest.approx((1.0, 0.1, 1.0))
    assert (found.partial, found.failed, found.slow) == pytest.approx((0.3, 0.4, 0.0))
    assert (found.latencies.restart, found.latencies.crash) == pytest.approx((0.5, 0.1))


def test_what_is_no_campaign_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no campaign"):
        replay(tmp_path)
