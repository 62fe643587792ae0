"""A run with injected faults of each kind ends with the same bits as an undisturbed one, and would not without its guards."""

import time
from pathlib import Path

import pytest

from megalith.checkpoint.folder import committed, find, read_manifest
from megalith.commands.campaign import Faultload, campaign, checked
from megalith.commands.shared.arguments import RunRequest
from megalith.events import Incident, of_kind, read
from megalith.fleet import injection
from megalith.fleet.injection import Injection
from megalith.machine import networks
from megalith.rehearse.campaign import may_mount
from megalith.rehearse.fates import EXPECTED
from megalith.rehearse.faults import KINDS, ON_DISK
from megalith.rehearse.judge import Aims, Row
from megalith.rehearse.replay import replay
from tests.full import only_full
from tests.patience import PATIENCE
from tests.processor import excuse, waited
from tests.runs import final_state, prepare_text, train
from tests.specs import tiny_run

FAULTS = 24
RUN = """
name = "hurt"
model = {{ layers = 2, dim = 32, heads = 4, kv_heads = 2, ffn = 48, vocab = 264, context = 64 }}
plan = {{ data = 4, zero = 1 }}
data = {{ path = "{data}", weights = {{ verse = 1.0, tale = 1.0 }} }}
train = {{ steps = 10, global_batch = 8, seq_len = 32, precision = "fp32" }}
optimizer.warmup = 2
checkpoint.every = 10
launch = {{ threads = 1, start_timeout = 250.0, timeout = 120.0 }}
fleet = {{ nodes = 2, spares = 1, verify_every = 4, verify = "all" }}
"""
NEEDS = dict.fromkeys(("supervisor", "agent", *ON_DISK), False) | {"full": may_mount(), "interface": networks.missing() is None}
HERE = [kind for kind in KINDS if NEEDS.get(kind, True)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_text(tmp_path_factory.mktemp("text"))


@pytest.mark.slow
@pytest.mark.timeout(2 * PATIENCE)
def test_after_24_faults_the_end_is_bit_for_bit_that_of_the_run_without_them(data: Path, tmp_path: Path) -> None:
    """Every kind of fault is also recognised, and the run recovers from it. This is one test because the campaign is run once."""
    (tmp_path / "run.toml").write_text(RUN.format(data=data))
    began, starved = time.monotonic(), waited()
    found = campaign(checked(RunRequest(tmp_path / "run.toml")), Faultload(FAULTS, seed=1), out=tmp_path / "out")
    starved = (waited() - starved) / (time.monotonic() - began)
    assert not found.problems
    rows = {row.kind: row for row in found.rows}
    for kind in HERE:
        row: Row = rows[kind]
        assert row.injected == row.handled >= 1, row
        assert set(row.seen_as.split(", ")) <= {*EXPECTED[kind], "rank_failed"}, (row, "or hidden by a death in the same step")
    gap = replay(tmp_path / "out").gap  # the simulator with the latencies of this very log
    if abs(gap) >= 0.05:
        excuse(starved)
    assert abs(gap) < 0.05


@pytest.mark.slow
@pytest.mark.timeout(2 * PATIENCE)
def test_a_run_whose_supervisor_is_killed_is_typed_again_and_its_start_timed_apart(data: Path, tmp_path: Path) -> None:
    """Two ranks have two other faults. The test also covers the judgement of a real log and real checkpoints."""
    (tmp_path / "run.toml").write_text(RUN.format(data=data))
    smaller = ("plan.data=2", "fleet.nodes=1", "fleet.spares=0")
    faultload = Faultload(2, seed=1, supervisor_kills=1)
    found = campaign(checked(RunRequest(tmp_path / "run.toml", smaller)), faultload, out=tmp_path / "out", aims=Aims(minutes=10))
    assert not found.problems
    assert found.same_end
    assert len(found.supervisor_restarts) == 1
    (row,) = [row for row in found.rows if row.kind == "supervisor"]
    assert (row.injected, row.handled, row.recovery, row.detection) == (1, 1, found.supervisor_restarts[0], None)
    assert found.recovery_p99 is not None
    assert row.recovery is not None
    assert row.recovery > found.recovery_p99, "it imports everything anew, and is in no percentile"
    whole, hurt = (read_manifest(find(tmp_path / "out" / name)).meta["rng"] for name in ("whole", "faulted"))
    assert len(whole["state"]) == 64
    assert whole == hurt


@only_full
@pytest.mark.timeout(2 * PATIENCE)
def test_faults_of_the_files_with_state_change_no_bit(data: Path, tmp_path: Path) -> None:
    """A torn or altered chunk and a full disk end the rank, and a slow disk ends nothing. What is not in memory is not hurt there."""
    (tmp_path / "run.toml").write_text(RUN.format(data=data))
    there = ("plan.data=2", "fleet.verify_every=0", 'train.precision="bf16"', 'plan.state.optimizer="disk"', "checkpoint.every=2")
    faultload = Faultload(len(ON_DISK), seed=1, kinds=ON_DISK)
    found = campaign(checked(RunRequest(tmp_path / "run.toml", there)), faultload, out=tmp_path / "out")
    assert not found.problems
    assert {"weight", "moment", "copy"} < set(found.left_out)
    seen = {row.kind: row.seen_as for row in found.rows}
    assert seen == {kind: ", ".join(EXPECTED[kind]) for kind in ON_DISK}
    reasons = [one.reason for one in of_kind(read(tmp_path / "out" / "faulted"), Incident) if one.cause == "rank_failed"]
    assert len(reasons) == 3 and all("chunk" in reason for reason in reasons)


@pytest.mark.engines
@pytest.mark.timeout(2 * PATIENCE)
def test_agents_of_nodes_are_killed_and_their_machines_join_again(data: Path, tmp_path: Path) -> None:
    """Two machines and a spare have an agent each. Two agents are killed, and once the director, in addition to other
    faults."""
    (tmp_path / "run.toml").write_text(RUN.format(data=data))
    faultload = Faultload(3, seed=2, supervisor_kills=1, agent_kills=3)
    found = campaign(checked(RunRequest(tmp_path / "run.toml", ["plan.data=2"])), faultload, out=tmp_path / "out")
    assert not found.problems
    assert found.same_end
    (row,) = [row for row in found.rows if row.kind == "agent"]
    assert row.injected == row.handled >= 2
    assert row.seen_as == "nodes_lost"
    assert {"node", "two", "interface"} < set(found.left_out)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_state_that_is_altered_when_its_checkpoint_is_due_is_not_saved(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], asynchronous: bool
) -> None:
    """The checkpoint's own digests would be correct, and it would be newer than any good copy in memory, so the run
    would use it."""
    spec = tiny_run(
        model={"vocab": 264},
        plan={"data": 2},
        data={"path": str(data)},
        train={"steps": 4, "global_batch": 2, "seq_len": 16, "precision": "fp32"},
        checkpoint={"every": 2, "asynchronous": asynchronous},
    )
    listed, folder = tmp_path / "faults.json", tmp_path / "hurt"
    injection.save(listed, [Injection(0, "weight", 1, KINDS["weight"].moment, (1,), place=0.5)])  # once two steps are done
    monkeypatch.setenv(injection.VARIABLE, str(listed))
    with pytest.raises(RuntimeError):
        train(spec, folder)  # alone, without a fleet that recovers
    assert "the state after 2 steps had the digest" in capfd.readouterr().err
    assert injection.fired(listed)
    assert committed(folder / "checkpoints") == []


def test_without_the_guards_the_same_faults_would_stay(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This shows that equality is not vacuous: without digests a flipped bit changes the result, and without re-execution a wrong
    gradient does."""
    spec = tiny_run(
        model={"vocab": 264},
        plan={"data": 2},
        data={"path": str(data)},
        train={"steps": 4, "global_batch": 2, "seq_len": 16, "precision": "fp32"},
        fleet={"digest": False},
    )
    train(spec, tmp_path / "whole")
    whole = final_state(tmp_path / "whole")
    for kind in ("weight", "once"):
        listed, folder = tmp_path / f"{kind}.json", tmp_path / kind
        injection.save(listed, [Injection(0, kind, 1, KINDS[kind].moment, (1,), place=0.5)])
        monkeypatch.setenv(injection.VARIABLE, str(listed))
        train(spec, folder)
        assert injection.fired(listed)
        hurt = final_state(folder)
        assert any(not whole[name].equal(hurt[name]) for name in whole), kind
