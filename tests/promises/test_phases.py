"""Mixture, sequence length and batch follow the samples consumed, so the run is the same under any plan, after any restart
or kill."""

import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.check.resume import check_checkpoint
from megalith.checkpoint.folder import read_manifest
from megalith.events import PhaseBegan, Step, of_kind, read
from megalith.spec.run import RunSpec
from tests import runs
from tests.full import FULL, sampled
from tests.specs import tiny_run
from tests.train.prepared import VOCAB, small_data

PHASES = [
    {"begin": 24, "seq_len": 16, "weights": {"letters": 0.2, "digits": 0.8}},
    {"begin": 60, "seq_len": 48, "global_batch": 4},
]
RAMP = [{"begin": 8, "global_batch": 8}]
SHAPES = [(4, 32), (4, 32), (8, 32), (8, 32), (8, 16), (8, 16), (8, 16), (8, 16), (8, 16), (4, 48), (4, 48)]
"""Batch size and sequence length of each step."""


PLANS: list[dict[str, Any]] = [
    {"pipeline": 2, "schedule": "zb-h2", "post_validation": True},
    {"data": 2, "zero": 3},
    {"pipeline": 2, "tensor": 2, "schedule": "1f1b"},
    {"context": 2},
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return small_data(tmp_path_factory.mktemp("data"))


def run(data: str, plan: dict[str, Any], phases: list[dict[str, Any]] = PHASES, **train: Any) -> RunSpec:
    return tiny_run(
        model={"layers": 2, "vocab": VOCAB},
        plan=plan,
        data={"path": data, "phases": phases},
        train={"steps": len(SHAPES), "global_batch": 4, "batch_ramp": RAMP} | train,
        validation={"every": 5, "samples": 8},
        checkpoint={"every": 1, "keep": 20, "asynchronous": False},
        fleet={"verify_every": 3},
    )


@pytest.fixture(scope="module")
def alone(data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run in one process, from beginning to end."""
    folder = tmp_path_factory.mktemp("alone")
    runs.train(run(data, {}), folder)
    return folder


def losses(folder: Path) -> dict[int, float]:
    return {event.step: event.loss for event in of_kind(read(folder), Step)}


def test_each_phase_has_its_batch_and_its_length_and_the_log_says_from_which_sample(alone: Path):
    steps = of_kind(read(alone), Step)
    assert [step.tokens for step in steps] == [batch * length for batch, length in SHAPES]
    assert steps[-1].tokens_seen == sum(step.tokens for step in steps)
    began = [(event.step, event.samples, event.global_batch, event.seq_len) for event in of_kind(read(alone), PhaseBegan)]
    assert began == [(1, 0, 4, 32), (3, 8, 8, 32), (5, 24, 8, 16), (10, 64, 4, 48)]


@sampled(1, together=True)
@pytest.mark.parametrize("plan", PLANS if FULL else PLANS[:2], ids=str)
def test_any_plan_trains_like_one_process(plan: dict[str, Any], data: str, alone: Path, tmp_path: Path):
    runs.train(run(data, plan), tmp_path)
    expected, found = losses(alone), losses(tmp_path)
    assert found.keys() == expected.keys()
    assert all(abs(found[step] - loss) < 1e-5 for step, loss in expected.items())
    for name, tensor in runs.final_state(alone).items():
        assert torch.allclose(runs.final_state(tmp_path)[name], tensor, atol=2e-5), name


@sampled(1, together=True)
@pytest.mark.parametrize(("plan", "kill"), [({"data": 2}, 4), (PLANS[0], 9)][not FULL :], ids=str)
def test_a_run_killed_at_the_first_step_of_a_phase_ends_in_the_same_bits(
    plan: dict[str, Any], kill: int, data: str, tmp_path: Path
):
    whole, killed, spec = tmp_path / "whole", tmp_path / "killed", run(data, plan)
    runs.train(spec, whole)
    phase = "step of {} x {}".format(*SHAPES[kill])
    with runs.when(phase, kill, rank=1, act=partial(runs.signal_yourself, signal.SIGKILL)):
        assert -signal.SIGKILL in runs.finish(runs.start(spec, killed))
    runs.train(spec, killed)
    runs.assert_same_bits(runs.final_state(whole), runs.final_state(killed))
    assert runs.position(whole) == runs.position(killed)


def test_a_run_goes_on_under_another_plan_inside_the_ramp(data: str, alone: Path, tmp_path: Path):
    runs.train(run(data, {"data": 2}, steps=4), tmp_path)
    runs.train(run(data, {"pipeline": 2, "schedule": "1f1b"}, steps=len(SHAPES)), tmp_path)
    assert all(abs(losses(tmp_path)[step] - loss) < 1e-5 for step, loss in losses(alone).items())


def test_a_phase_may_come_between_two_commands_and_one_that_has_begun_stays(data: str, alone: Path, tmp_path: Path):
    """The run begins without its last phase, which is added to the file once the phase before has begun."""
    runs.train(run(data, {}, PHASES[:1], steps=8), tmp_path)
    runs.train(run(data, {}), tmp_path)
    assert losses(tmp_path) == losses(alone)
    runs.assert_same_bits(runs.final_state(tmp_path), runs.final_state(alone))
    newest = max((tmp_path / "checkpoints").glob("step-*"))
    altered = run(data, {}, [PHASES[0] | {"seq_len": 8}, PHASES[1]])
    (problem,) = check_checkpoint("here", read_manifest(newest).meta, altered)
    assert problem.key == "data.phases[0]" and "can no longer change" in problem.reason
    with pytest.raises(RuntimeError):
        runs.train(altered.model_copy(update={"train": altered.train.model_copy(update={"steps": 20})}), tmp_path)
