"""Updates of state off the device run while the next forward computes, and change no bit."""

import threading
import time
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megalith.checkpoint.shares import as_tensor, shares
from megalith.prove import fake
from megalith.prove.dryrun import CPU, single_documents
from megalith.prove.meter import Meter
from megalith.spec.run import RunSpec
from megalith.train.assemble import Trainer, assemble, mesh_groups
from megalith.train.loop import stepper_of
from megalith.train.offload.ahead import UpdatesAhead
from megalith.train.offload.slot_file import StateFileError
from megalith.train.step import train_step
from megalith.train.tally import StepResult
from tests.full import sampled
from tests.parallel.running import microbatches, trainer_of
from tests.patience import PATIENCE
from tests.prove.dry import in_a_child
from tests.ranks import run_ranks
from tests.specs import brief_run

pytestmark = pytest.mark.slow

HOST, DISK = {"optimizer": "host"}, {"optimizer": "disk"}
STREAMED = DISK | {"weights": "disk"}
STEPS = 3

Trained = tuple[list[StepResult], dict[str, Tensor]]


def _run(plan: dict[str, Any], precision: str = "bf16", layers: int = 4, **optimizer: Any) -> RunSpec:
    """Clipping is active."""
    return brief_run(plan=plan, model={"layers": layers}, train={"precision": precision}, optimizer={"clip": 0.05} | optimizer)


def _held(trainer: Trainer) -> dict[str, Tensor]:
    return {key: as_tensor(share).clone() for key, share in shares(trainer.state.laid()).items()}


def _first_forward(trainer: Trainer) -> threading.Event:
    """Return an event that is set at each forward of the rank's first part."""
    begun, runner = threading.Event(), trainer.runners[min(trainer.runners)]
    runner.parts[0].register_forward_hook(lambda *given: begun.set())
    return begun


def _held_up(rank: int, spec: RunSpec) -> Trained:
    """Train, and read the state right after the last step. In all steps but the last, the update of the rank's last part ends only after
    the next step's forward of its first part."""
    trainer, update = trainer_of(spec), UpdatesAhead._update
    if trainer.ahead is None:
        return [train_step(trainer, microbatches(trainer, step), step=step) for step in range(STEPS)], _held(trainer)
    begun, last = _first_forward(trainer), trainer.ahead._parts[-1]

    def late(self: UpdatesAhead, names: list[str], number: int, lr: float) -> None:
        if names == last and number < STEPS - 1:
            assert begun.wait(PATIENCE), "the forward waited for the update of a part that it did not need"
        update(self, names, number, lr)

    told = list[StepResult]()
    with mock.patch.object(UpdatesAhead, "_update", late):
        stepper = stepper_of(trainer)
        for step in range(STEPS):
            begun.clear()
            told += stepper.step(microbatches(trainer, step), step=step)
        return told, _held(trainer)


def _at(spec: RunSpec, state: dict[str, Any]) -> RunSpec:
    plan = spec.plan.model_validate(spec.plan.model_dump() | {"state": state})
    return spec.model_copy(update={"plan": plan})


PLANS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, HOST, "fp32"),
    ({"data": 2, "zero": 1}, DISK, "bf16"),
    ({"data": 2, "zero": 2}, HOST | {"share": 0.7}, "bf16"),
    ({"data": 2, "zero": 3}, STREAMED, "bf16"),
    ({"pipeline": 2, "microbatch": 1}, DISK, "fp32"),
    ({"pipeline": 2, "data": 2, "zero": 1, "schedule": "interleaved", "chunks": 2}, HOST, "bf16"),
]


@pytest.mark.parametrize(("plan", "state", "precision"), PLANS, ids=str)
@sampled(4, together=True)
def test_the_next_forward_waits_only_for_the_parts_that_it_needs(
    plan: dict[str, Any], state: dict[str, Any], precision: str
) -> None:
    """No bit changes, and state that is read right after a step holds the step's update."""
    resident = _run(plan, precision, layers=8)
    both = [run_ranks(_held_up, resident.plan.ranks, spec) for spec in (resident, _at(resident, state))]
    for (told, held), (expected, whole) in zip(both[1], both[0], strict=True):
        assert [(one.loss, one.grad_norm) for one in told] == [(one.loss, one.grad_norm) for one in expected]
        assert held.keys() == whole.keys() and not [key for key in whole if not torch.equal(held[key], whole[key])]
        forwards, updates = (
            [(start, end) for name, start, end in told[1].spans if name.lstrip("0123456789").startswith(kind)]
            for kind in ("F", "UPDATE")
        )
        assert any(end > forwards[0][0] for _, end in updates), "no update ran while the forward computed"
        assert sum(told[1].breakdown.values()) <= told[1].seconds * 1.01


def _slow(rank: int, spec: RunSpec) -> Trained:
    """Train with slow updates; the state is read while they run."""
    update = UpdatesAhead._update

    def later(self: UpdatesAhead, *given: Any) -> None:
        time.sleep(0.1)
        update(self, *given)

    with mock.patch.object(UpdatesAhead, "_update", later):
        trainer = trainer_of(spec)
        told = [train_step(trainer, microbatches(trainer), step=0)]
        assert trainer.ahead is None or any(parameter.grad is not None for parameter in trainer.parameters.values())
        return told, _held(trainer)


def test_state_that_is_read_while_updates_run_holds_all_of_them() -> None:
    spec = _run({})
    ((_, plain),), *others = (run_ranks(_slow, 1, _at(spec, state)) for state in ({}, HOST, DISK))
    for ((_, held),) in others:
        assert not [key for key in plain if not torch.equal(held[key], plain[key])]


def _failing(rank: int, spec: RunSpec, settles: bool) -> list[str]:
    """Return the error of the next step, or of reading the state, after an update failed; and the parts whose updates ran."""
    trainer, ran = trainer_of(spec), list[str]()
    assert trainer.ahead is not None
    failing = trainer.ahead._parts[2]

    def fails(self: UpdatesAhead, names: list[str], number: int, lr: float) -> None:
        if names == failing:
            raise StateFileError(28, "the disk is full")
        ran.extend(names)

    with mock.patch.object(UpdatesAhead, "_update", fails):
        stepper = stepper_of(trainer)
        stepper.step(microbatches(trainer), step=0)
        then = stepper.settle if settles else partial(stepper.step, microbatches(trainer, 1), step=1)
        with pytest.raises(StateFileError) as raised:
            then()
        with pytest.raises(StateFileError):  # so nobody takes the state for a whole one
            trainer.state.complete()
    return [str(raised.value), *ran]


@pytest.mark.parametrize("settles", [True, False])
def test_an_error_of_an_update_ends_the_rank_and_all_later_updates(settles: bool) -> None:
    ((text, *ran),) = run_ranks(_failing, 1, _at(_run({}), DISK), settles)
    assert "the disk is full" in text
    assert {name.split(".")[0] for name in ran} == {"embedding", "blocks"} and not any("blocks.1" in name for name in ran)


def test_updates_that_need_all_parts_end_before_the_next_step() -> None:
    assert run_ranks(_ahead, 1, [_at(_run({}, kind=kind, nesterov=False), HOST) for kind in ("adamw", "lion", "lamb", "muon")])[
        0
    ] == [True, True, False, False]
    clipped = [_at(_run({}, qk_clip=100.0), HOST), _run({})]
    assert run_ranks(_ahead, 1, clipped)[0] == [False, False]


def _ahead(rank: int, specs: list[RunSpec]) -> list[bool]:
    return [trainer_of(spec).ahead is not None for spec in specs]


def _peak(spec: RunSpec, rank: int, steps: int) -> int:
    """Return the most bytes that a rank holds in this many steps of a dry run, in which a part is updated only when it is needed."""
    meter = Meter()
    with fake.groups_of(spec.plan.ranks, rank=rank):
        groups = mesh_groups(spec, CPU)
        with fake.Fakes(), meter:
            trainer = assemble(spec, groups=groups, device=CPU, target="cuda")
            meter.follow(trainer)
            meter.begin_step()
            for step in range(steps):
                train_step(trainer, [single_documents(spec)] * spec.microbatches, step=step)
            trainer.state.complete()
    return sum(meter.memory().peak.values())


LARGE = {"layers": 8, "dim": 256, "heads": 4, "kv_heads": 4, "head_dim": 64, "ffn": 768, "vocab": 1024}
SIZED: list[tuple[dict[str, Any], int]] = [
    ({}, 8),
    ({"microbatch": 1, "recompute": "full"}, 1),
    ({"data": 2, "zero": 2, "recompute": "full"}, 8),
    ({"pipeline": 2, "schedule": "interleaved", "chunks": 2}, 8),
    ({"pipeline": 2, "schedule": "gpipe"}, 4),
]


@pytest.mark.parametrize(("plan", "batch"), SIZED, ids=str)
@sampled(4, together=True)
def test_gradients_that_wait_for_the_next_forward_do_not_raise_the_peak(plan: dict[str, Any], batch: int) -> None:
    spec = brief_run(plan=plan | {"state": HOST}, model=LARGE, train={"precision": "bf16", "global_batch": batch})
    for rank in {0, spec.plan.ranks - 1}:
        one, two = (in_a_child(partial(_peak, spec, rank, steps)) for steps in (1, 2))
        assert two == one
