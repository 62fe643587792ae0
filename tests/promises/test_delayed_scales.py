"""FP8 with delayed scaling: the maxima behind the scales are state, and equal on every rank that holds the layer."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megalith.checkpoint.checkpointer import Checkpointer
from megalith.checkpoint.load import load
from megalith.kernels.narrow import HISTORY
from megalith.spec.run import RunSpec
from megalith.train.assemble import Trainer
from megalith.train.measure.aside import buckets_of
from megalith.train.reexecution import GradientProbe, GradientVerifier
from megalith.train.step import accumulate, train_step
from tests.parallel.running import microbatches, trainer_of
from tests.ranks import everyone, run_ranks
from tests.runs import final_state, prepare_text, train
from tests.specs import tiny_run

pytestmark = pytest.mark.slow

PLANS: list[dict[str, Any]] = [{"data": 2, "zero": 1}, {"pipeline": 2, "schedule": "dualpipe", "tensor": 2, "zero": 1}]


def delayed(plan: dict[str, Any], **rest: dict[str, Any]) -> RunSpec:
    choices = {"granularity": "tensor", "history": 3}
    train = {"global_batch": 8, "seq_len": 16, "precision": "fp8", "steps": 4}
    return tiny_run(plan=plan, train=train, precision=choices, **rest)


def state_of(trainer: Trainer) -> dict[str, Tensor]:
    found = trainer.state.tensors()
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for name, t in found.items()}


def histories(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if name.endswith(HISTORY)}


def saved(rank: int, spec: RunSpec, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    trainer, checkpointer = trainer_of(spec), Checkpointer(folder)
    for step in range(2):
        train_step(trainer, microbatches(trainer, step), step=step)
    halfway = state_of(trainer)
    checkpointer.save(2, trainer.state.laid(), {}, asynchronous=False)
    for step in (2, 3):
        train_step(trainer, microbatches(trainer, step), step=step)
    return halfway, state_of(trainer)


def resumed(rank: int, spec: RunSpec, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    trainer = trainer_of(spec)
    load(folder, trainer.state.laid(), group=everyone())
    trainer.state.updates = 2
    trainer.state.loaded()
    halfway = state_of(trainer)
    for step in (2, 3):
        train_step(trainer, microbatches(trainer, step), step=step)
    return halfway, state_of(trainer)


def test_a_history_is_state_of_the_run_and_not_of_its_plan(tmp_path: Path) -> None:
    first, other = (delayed(plan) for plan in PLANS)
    halfway, straight = run_ranks(saved, first.plan.ranks, first, tmp_path)[0]
    assert len(histories(straight)) == 14 and all((tensor > 0).all() for tensor in histories(straight).values())
    begun, again = run_ranks(resumed, first.plan.ranks, first, tmp_path)[0]
    assert all(torch.equal(begun[name], tensor) for name, tensor in histories(halfway).items())
    assert again.keys() == straight.keys() and all(torch.equal(again[name], tensor) for name, tensor in straight.items())
    for begun, _ in run_ranks(resumed, other.plan.ranks, other, tmp_path):
        held = histories(begun)
        assert held and all(torch.equal(tensor, halfway[name]) for name, tensor in held.items())


def left_as_it_is(rank: int, spec: RunSpec) -> None:
    """Compute two steps that must not change the history: one for a comparison, and one whose update is skipped."""
    trainer = trainer_of(spec)
    train_step(trainer, microbatches(trainer), step=0)
    before = histories(state_of(trainer))
    probe = GradientProbe(buckets_of(trainer))
    verifier = GradientVerifier(trainer, probe, read=lambda step, rank: microbatches(trainer, step), microbatches="all")
    accumulate(trainer, microbatches(trainer, 1))
    counted = [tensor.clone() for tensor in trainer.counted()]
    assert counted and all((tensor > 0).all() for tensor in counted)
    verifier.again(7)
    assert all(torch.equal(tensor, count) for tensor, count in zip(trainer.counted(), counted, strict=True))
    trainer.drop()
    assert not any(tensor.any() for tensor in trainer.counted())
    spoilt = trainer.parameters["blocks.1.mlp.up.weight"]
    kept = spoilt.detach().clone()
    with torch.no_grad():
        spoilt.fill_(np.nan)
    assert train_step(trainer, microbatches(trainer, 1), step=1).outcome.skipped
    with torch.no_grad():
        spoilt.copy_(kept)
    after = histories(state_of(trainer))
    assert after.keys() == before.keys() and all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert not any(tensor.any() for tensor in trainer.counted())
    train_step(trainer, microbatches(trainer, 2), step=2)
    assert all((tensor[:, :2] > 0).all() for tensor in histories(state_of(trainer)).values())


def test_a_step_that_is_compared_or_left_out_leaves_the_history_as_it_is() -> None:
    spec = delayed({"data": 2, "zero": 0}, stability={"not_finite": "skip", "skips": 3})
    run_ranks(left_as_it_is, 2, spec)


def test_weights_of_a_run_in_another_precision_come_without_a_history(tmp_path: Path) -> None:
    text, model = {"path": str(prepare_text(tmp_path))}, {"vocab": 264}
    begun, folder = {"global_batch": 8, "seq_len": 16, "steps": 1, "precision": "bf16"}, tmp_path / "begun"
    train(tiny_run(model=model, data=text, train=begun), folder)
    spec = delayed({}, model=model, data=text)
    going_on = spec.train.model_copy(update={"steps": 1, "init_from": str(folder)})
    train(spec.model_copy(update={"train": going_on}), tmp_path / "on")
    found = histories(final_state(tmp_path / "on"))
    assert len(found) == 14 and all((tensor[:, 0] > 0).all() and not tensor[:, 1:].any() for tensor in found.values())
