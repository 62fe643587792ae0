"""A checkpoint is the same from GPU and CPU."""

from pathlib import Path

import pytest
import torch

from megalith.checkpoint.checkpointer import Checkpointer
from megalith.parallel.gradients import local
from megalith.train.assemble import Trainer, assemble, mesh_groups
from megalith.train.step import train_step
from tests.parallel.running import microbatches
from tests.specs import tiny_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.any_device,
    pytest.mark.usefixtures("alone"),
    pytest.mark.filterwarnings("default::UserWarning"),
]

PLAN = {"microbatch": 2, "zero": 3}


def trainer_on(device: torch.device, *, steps: int, precision: str = "bf16", seed: int = 0) -> Trainer:
    spec = tiny_run(plan=PLAN, train={"precision": precision, "seed": seed}, model={"dim": 64, "head_dim": 16})
    trainer = assemble(spec, groups=mesh_groups(spec, device), device=device)
    for step in range(steps):
        train_step(trainer, microbatches(trainer, step), step=step)
    return trainer


def values(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: local(tensor).detach().cpu().clone() for name, tensor in trainer.state.tensors().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("begins", ["cpu", "cuda"])
def test_a_state_saved_on_one_device_loads_on_the_other_bit_for_bit(begins, gpu, tmp_path: Path):
    here, there = (torch.device("cpu"), gpu) if begins == "cpu" else (gpu, torch.device("cpu"))
    first, second = trainer_on(here, steps=2), trainer_on(there, steps=0, seed=1)
    saver = Checkpointer(tmp_path / "checkpoints")
    saver.save(2, first.state.tensors(), {"from": begins}, asynchronous=False)
    saver.wait()
    assert not same(values(second), values(first))
    loaded = saver.load(second.state.tensors())
    second.state.loaded()
    assert loaded is not None and loaded.step == 2 and loaded.meta["from"] == begins
    assert same(values(second), values(first))
    train_step(second, microbatches(second, 2), step=2)  # and training continues


def test_a_save_under_way_keeps_the_values_it_began_with(gpu, tmp_path: Path):
    trainer, saver = trainer_on(gpu, steps=1), Checkpointer(tmp_path / "checkpoints")
    before = values(trainer)
    saver.save(1, trainer.state.tensors(), {}, asynchronous=True)
    for step in (1, 2):
        train_step(trainer, microbatches(trainer, step), step=step)
    saver.wait()
    assert not same(values(trainer), before)
    assert saver.load(trainer.state.tensors()) is not None
    assert same(values(trainer), before)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_training_that_was_resumed_on_the_gpu_is_bitwise_the_one_that_was_not(precision, gpu, tmp_path: Path):
    straight, saver = trainer_on(gpu, steps=1, precision=precision), Checkpointer(tmp_path / "checkpoints")
    saver.save(1, straight.state.tensors(), {}, asynchronous=False)
    saver.wait()
    train_step(straight, microbatches(straight, 1), step=1)
    resumed = trainer_on(gpu, steps=0, precision=precision, seed=1)
    saver.load(resumed.state.tensors())
    resumed.state.updates = 1  # a part of a run's position, which its checkpoint's meta holds
    resumed.state.loaded()
    train_step(resumed, microbatches(straight, 1), step=1)
    assert same(values(resumed), values(straight))
