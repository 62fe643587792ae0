"""A step whose update is skipped consumes its samples and changes nothing else, under any plan, through kills, rewinds and changes of
plan."""

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from megalith.checkpoint.checkpointer import Checkpointer
from megalith.events import EventLog, Skipped, Step, of_kind, read
from megalith.fleet.heartbeat import Heartbeat
from megalith.fleet.tiers import Source, Tier
from megalith.parallel.gradients import NotFinite
from megalith.spec.run import RunSpec
from megalith.train.assemble import Trainer
from megalith.train.loop import Loop, stepper_of
from megalith.train.measure.peak import Yardstick
from megalith.train.restore import Position, restore
from megalith.train.step_hooks import Attendants, StepHook
from megalith.train.stream import open_stream
from tests.full import sampled
from tests.parallel.running import microbatches, trainer_of
from tests.ranks import run_ranks
from tests.specs import tiny_run
from tests.train.prepared import VOCAB, small_data

PLANS: list[dict[str, Any]] = [
    {},
    {"data": 2, "zero": 3},
    {"tensor": 2},
    {"pipeline": 2},
    {"pipeline": 2, "schedule": "zb-h2", "post_validation": True},
    {"data": 2, "pipeline": 2, "zero": 1, "schedule": "zb-h2", "post_validation": True},
]
EXPERTS = {"preset": "deepseek-tiny"}


class Poison(StepHook):
    """Makes one gradient of every rank NaN in some steps, each time they are computed."""

    def __init__(self, *steps: int) -> None:
        self.steps, self._hook = steps, None

    def before_step(self, trainer: Trainer, step: int) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        if step in self.steps:
            stage = trainer.runners[max(trainer.runners)].stage
            parameter = next(p for p in stage.parameters() if p.requires_grad)
            self._hook = parameter.register_hook(lambda grad: grad * torch.nan)


def run(plan: dict[str, Any], **rest: Any) -> RunSpec:
    optimizer = {"warmup": 4, "schedule": "cosine", "lr": 1e-3}  # so that the rate shows the number of updates that were counted
    return tiny_run(plan=plan, stability={"not_finite": "skip", "skips": 3}, optimizer=optimizer, **rest)


def _state(trainer: Trainer) -> dict[str, Tensor]:
    found = trainer.state.tensors()
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for name, t in found.items()}


def _poisoned(rank: int, spec: RunSpec, bad: tuple[int, ...]) -> tuple[dict[str, Tensor], list[bool], int]:
    """Return the state after four steps, of which the `bad` ones give NaN, with the skipped steps and the number of updates."""
    trainer = trainer_of(spec)
    step_hooks = [Poison(*bad)]
    stepper, told = stepper_of(trainer, Attendants(step_hooks)), []
    for step in range(4):
        Attendants(step_hooks).notify("before_step", trainer, step)
        told += stepper.step(microbatches(trainer, step), step=step)
    told += stepper.settle()
    return _state(trainer), [bool(one.skipped) for one in told], trainer.state.updates


def _without(rank: int, spec: RunSpec, chosen: tuple[int, ...]) -> dict[str, Tensor]:
    """Return the state after training on the samples of the `chosen` steps alone."""
    trainer = trainer_of(spec)
    stepper = stepper_of(trainer)
    for step in chosen:
        stepper.step(microbatches(trainer, step), step=step)
    stepper.settle()
    return _state(trainer)


@sampled(3, together=True)
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_skipped_step_leaves_weights_moments_and_rate_as_they_were(plan: dict[str, Any]) -> None:
    """The run has the same bits as one that never saw those samples: bias correction, warm-up and router biases do not advance
    either."""
    for model in ({}, EXPERTS) if plan in ({}, PLANS[-2]) else ({},):
        spec = run(plan, model=model, train={"global_batch": 8})
        found = run_ranks(_poisoned, spec.plan.ranks, spec, (0, 2))
        expected = run_ranks(_without, spec.plan.ranks, spec, (1, 3))
        for (state, left_out, updates), other in zip(found, expected, strict=True):
            assert left_out == [True, False, True, False] and updates == 2
            assert all(torch.equal(state[name], other[name]) for name in other)


def _too_many(rank: int, spec: RunSpec) -> tuple[str, int]:
    trainer = trainer_of(spec)
    step_hooks = [Poison(*range(10))]
    stepper = stepper_of(trainer, Attendants(step_hooks))

    def train() -> None:
        for step in range(10):
            Attendants(step_hooks).notify("before_step", trainer, step)
            stepper.step(microbatches(trainer, step), step=step)

    with pytest.raises(NotFinite) as caught:
        train()
    return str(caught.value), trainer.state.skipped


@pytest.mark.parametrize("late", [False, True])
def test_a_run_leaves_out_only_so_many(late: bool) -> None:
    plan = {"pipeline": 2, "schedule": "zb-h2", "post_validation": True} if late else {"data": 2}
    for message, skipped in run_ranks(_too_many, 2, run(plan, train={"global_batch": 8})):
        assert "stability.skips = 3" in message and "step 4:" in message
        assert skipped == 3


# --- positions: kill -9, rewind, change of plan ---


def _loop(rank: int, spec: RunSpec, folder: Path, bad: tuple[int, ...], kill: int | None, from_step: int | None) -> Any:
    trainer, stream = trainer_of(spec), open_stream(spec, "train")
    checkpointer = Checkpointer(folder / "checkpoints", keep=20)
    source = None if from_step is None else Source(from_step, Tier.STORE)
    position = restore(trainer, checkpointer, stream, group=None, warn=print, source=source)
    loop = Loop(
        trainer,
        stream,
        checkpointer,
        position,
        validator=None,
        yardstick=Yardstick(1.0, None, ""),
        log=EventLog(folder) if rank == 0 else None,
        heartbeat=Heartbeat.find(),
        step_hooks=[Poison(*bad)],
    )

    def after_step(done: int) -> None:
        if done == kill:
            loop.checkpointer.wait()
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)

    assert loop.run(stop=False, after_step=after_step) == "finished"
    return _state(trainer), loop.position


def _train(spec: RunSpec, folder: Path, *, kill: int | None = None, from_step: int | None = None) -> Any:
    folder.mkdir(exist_ok=True)
    return run_ranks(_loop, spec.plan.ranks, spec, folder, (1, 4), kill, from_step)[0]


@sampled(3, together=True)
def test_positions_hold_over_kill_rewind_and_a_change_of_plan(tmp_path: Path) -> None:
    """Five updates in seven steps, of which the second and the fifth are skipped. Every path ends with the same bits and
    position."""
    (tmp_path / "data").mkdir()
    data = small_data(tmp_path / "data")
    rest = {
        "model": {"layers": 2, "vocab": VOCAB},
        "data": {"path": data},
        "train": {"steps": 5, "global_batch": 8},
        "checkpoint": {"every": 1, "keep": 20, "asynchronous": False},
    }
    spec = run({"data": 2, "zero": 1}, **rest)
    straight, position = _train(spec, tmp_path / "straight")
    assert position == Position(step=7, samples=56, updates=5)
    told = [*read(tmp_path / "straight")]
    assert [one.step for one in of_kind(told, Skipped)] == [2, 5]
    assert [(one.step, one.updates) for one in of_kind(told, Step)] == [(1, 1), (3, 2), (4, 3), (6, 4), (7, 5)]
    assert (tmp_path / "straight" / "checkpoints" / "step-00000007").exists()

    with pytest.raises(RuntimeError):
        _train(spec, tmp_path / "killed", kill=5)  # right after a skipped step
    for again in (partial(_train, spec, tmp_path / "killed"), partial(_train, spec, tmp_path / "straight", from_step=2)):
        state, found = again()
        assert found == position
        assert all(torch.equal(state[name], tensor) for name, tensor in straight.items())
    state, found = _train(run({"tensor": 2}, **rest), tmp_path / "killed", from_step=3)
    assert found == position
    assert all(torch.allclose(state[name], tensor, atol=1e-5) for name, tensor in straight.items())
