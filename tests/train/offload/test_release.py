"""Gradients released inside the backward give the bits of a run that holds them all, whether a step is clipped, skipped or repeated, with
less memory."""

import threading
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megalith.checkpoint.shares import as_tensor, shares
from megalith.cost.predicted import predict, workload_of
from megalith.events import EarlyUpdatesPaused
from megalith.parallel.gradients import NotFinite
from megalith.planner.compared import compare
from megalith.prove.dryrun import count, single_documents
from megalith.prove.meter import CATEGORIES
from megalith.spec.run import RunSpec
from megalith.train.assemble import Trainer
from megalith.train.decide import MAXIMUM
from megalith.train.loop import stepper_of
from megalith.train.offload.release import Release, UnequalPassesError
from megalith.train.offload.slots import Slots
from megalith.train.step import train_step
from megalith.train.tally import StepResult
from tests.full import FULL, sampled
from tests.parallel.running import microbatches, trainer_of
from tests.patience import PATIENCE
from tests.prove.dry import dry
from tests.ranks import run_ranks
from tests.specs import TINY_EXPERTS, tiny_run
from tests.train.offload.killed import chunks

DISK = {"optimizer": "disk"}
RELEASED = DISK | {"release": True}
Trained = tuple[list[StepResult], dict[str, Tensor]]


def _run(
    plan: dict[str, Any], model: dict[str, Any] | None = None, *, optimizer: dict[str, Any] | None = None, **train: Any
) -> RunSpec:
    """One microbatch a step."""
    batch = plan.get("data", 1) * plan.get("replicate", 1) * plan.get("microbatch", 1)
    asked = {"global_batch": batch, "precision": "bf16", "steps": 12} | train
    return tiny_run(plan=plan, model={"layers": 3} | (model or {}), train=asked, optimizer=optimizer or {})


def _placed(spec: RunSpec, state: dict[str, Any], clip: float | None = None) -> RunSpec:
    plan = spec.plan.model_validate(spec.plan.model_dump() | {"state": state})
    optimizer = spec.optimizer if clip is None else spec.optimizer.model_copy(update={"clip": clip})
    return spec.model_copy(update={"plan": plan, "optimizer": optimizer})


def _held(trainer: Trainer) -> dict[str, Tensor]:
    return {key: as_tensor(share).clone() for key, share in shares(trainer.state.laid()).items()}


def _trained(rank: int, specs: list[RunSpec], steps: int) -> list[Trained]:
    found = []
    for spec in specs:
        trainer = trainer_of(spec)
        stepper, told = stepper_of(trainer), []
        for step in range(steps):
            told += stepper.step(microbatches(trainer, step), step=step)
        stepper.settle()
        assert all(parameter.grad is None for parameter in trainer.parameters.values())
        found.append((told, _held(trainer)))
    return found


def _assert_same(found: list[Trained]) -> None:
    (told, state), *others = found
    for other, held in others:
        for one, two in zip(told, other, strict=True):
            assert (one.loss, one.grad_norm, one.lr, one.updates) == (two.loss, two.grad_norm, two.lr, two.updates)
        assert held.keys() == state.keys()
        assert not [key for key in state if not torch.equal(held[key], state[key])]


PLANS: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ({}, {"tied": True}, {}),
    ({"data": 2, "zero": 3}, {}, {}),
    ({"data": 2, "tensor": 2, "zero": 1}, {}, {}),
    ({"pipeline": 2}, {"tied": True}, {}),
    ({"data": 2, "expert": 2, "zero": 2}, {"preset": "deepseek-tiny"}, {}),
    ({"data": 2, "zero": 0}, {}, {"precision": "fp16"}),
]
PLANS += [
    ({"recompute": "sqrt"}, {}, {"gradients": "bf16"}),
    ({"pipeline": 2, "schedule": "zb-h1", "data": 2, "zero": 2}, {}, {}),
    ({"context": 2}, TINY_EXPERTS, {"precision": "fp8"}),
] * FULL


def _compared(rank: int, spec: RunSpec, steps: int) -> list[Trained]:
    """Compare a run that holds its gradients with one that releases them, when no step is clipped, when some are, and
    when all are."""
    (free,) = _trained(rank, [_placed(spec, {}, clip=0.0)], steps)
    norms = sorted(each.grad_norm for each in free[0])
    some = (norms[steps // 2] + norms[steps // 2 - 1]) / 2
    made = [_placed(spec, place, clip) for clip in (0.0, some, 0.05) for place in ({}, RELEASED)]
    return _trained(rank, made, steps)


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "model", "train"), PLANS, ids=str)
@sampled(2, together=True)
def test_no_bit_changes_under_any_plan(plan: dict[str, Any], model: dict[str, Any], train: dict[str, Any]) -> None:
    """A clipped step takes two passes, any other step one."""
    spec = _run(plan, model, **train)
    for found in run_ranks(_compared, spec.plan.ranks, spec, 4):
        for one, passes in enumerate(({1}, {1, 2}, {2})):
            pair = found[2 * one : 2 * one + 2]
            _assert_same(pair)
            assert {each.passes for each in pair[1][0]} == passes


IN_MEMORY: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ({}, {"recompute": "segments:2"}, {"precision": "fp32"}, {}),
    ({}, {"data": 2, "zero": 1}, {}, {"master": "split8", "moments": "fp8"}),
    ({"optimizer": "host"}, {"data": 2, "zero": 3}, {}, {}),
    ({"optimizer": "host", "weights": "host"}, {"zero": 3}, {"precision": "fp16"}, {}),
    ({"optimizer": "disk", "share": 0.5}, {}, {"gradients": "bf16"}, {"master": "split16"}),
    ({}, {"pipeline": 2}, {}, {"kind": "lion"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("place", "plan", "train", "optimizer"), IN_MEMORY, ids=str)
@sampled(3, together=True)
def test_without_an_undo_each_step_measures_first_and_no_bit_changes(
    place: dict[str, Any], plan: dict[str, Any], train: dict[str, Any], optimizer: dict[str, Any]
) -> None:
    """Some steps are clipped, and some are not."""
    for found in run_ranks(_measured_first, plan.get("data", 1) * plan.get("pipeline", 1), place, plan, train, optimizer):
        _assert_same(found)
        clipped = [each.outcome.clipped for each in found[0][0]]
        assert set(clipped) == {True, False} and clipped == [each.outcome.clipped for each in found[1][0]]
        assert {each.passes for each in found[1][0]} == {2} and not any(each.outcome.events for each in found[1][0])
        for each in found[1][0]:
            backwards = [name for name, _, _ in each.spans if name in ("0B0", "1B0")]
            assert len(backwards) == 2 and any(name == "UPDATE" for name, _, _ in each.spans)
            assert each.breakdown["optimizer"] < 0.5 * each.seconds, "the second pass is forward and backward"


def _measured_first(rank: int, *run: dict[str, Any]) -> list[Trained]:
    place, plan, train, optimizer = run
    spec = _run(plan, optimizer=optimizer, **train)
    (free,) = _trained(rank, [_placed(spec, place, clip=0.0)], 4)
    norms = sorted(each.grad_norm for each in free[0])
    return _trained(rank, [_placed(spec, place | more, clip=(norms[1] + norms[2]) / 2) for more in ({}, {"release": True})], 4)


KINDS = [("sgd", {}), ("lion", {"moments": "bf16"}), *[("adamw", {"moments": "fp8"})] * FULL]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "more"), KINDS, ids=str)
def test_no_bit_changes_under_any_rule_that_looks_at_one_number(kind: str, more: dict[str, Any]) -> None:
    spec = _run({}, optimizer={"kind": kind, "clip": 0.05, "nesterov": False} | more)
    (found,) = run_ranks(_trained, 1, [_placed(spec, place) for place in (DISK, RELEASED)], 3)
    _assert_same(found)


@pytest.mark.slow
def test_a_share_of_clipped_steps_above_half_pauses_updates_before_the_norm() -> None:
    """Steps then measure the norm first, and no bit changes."""
    spec = _run({}, {"layers": 2}, optimizer={"clip": 0.05})
    (found,) = run_ranks(_trained, 1, [_placed(spec, place) for place in (DISK, RELEASED)], MAXIMUM + 3)
    _assert_same(found)
    told = found[1][0]
    (paused,) = [event for each in told for event in each.outcome.events]
    assert isinstance(paused, EarlyUpdatesPaused)
    assert (paused.step, paused.clipped, paused.window, paused.paused) == (MAXIMUM + 1, MAXIMUM + 1, MAXIMUM + 1, True)
    assert {each.passes for each in told} == {2}


def _writes(rank: int, spec: RunSpec, steps: int) -> list[int]:
    """Return the number of chunks, and of those that each step writes."""
    trainer, written, write = trainer_of(spec), list[int](), Slots.write

    def counted(self: Slots, chunk: int, body: Tensor, *, counts: bool = False) -> None:
        written.append(chunk)
        write(self, chunk, body, counts=counts)

    found = [chunks(rank, spec)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Slots, "write", counted)
        for step in range(steps):
            written.clear()
            train_step(trainer, microbatches(trainer, step), step=step)
            found.append(len(written))
    return found


@pytest.mark.slow
def test_a_step_that_measures_first_writes_nothing_in_vain() -> None:
    spec = _placed(_run({}, {"layers": 2}, optimizer={"clip": 0.05}), RELEASED)
    ((chunks, *written),) = run_ranks(_writes, 1, spec, MAXIMUM + 3)
    assert written == [2 * chunks] * (MAXIMUM + 1) + [chunks] * 2


def _poisoned(rank: int, spec: RunSpec) -> tuple[str, bool]:
    """Return the error of a step with a gradient that is not finite, and whether the state is unchanged."""
    trainer = trainer_of(spec)
    train_step(trainer, microbatches(trainer), step=0)
    before, (runner,) = _held(trainer), trainer.runners.values()

    def spoil(grads: Any) -> None:
        grads[0].view(-1)[0] = float("nan")

    runner.buckets[1][0].observe = spoil
    try:
        train_step(trainer, microbatches(trainer, 1), step=1)
    except NotFinite as error:
        after = _held(trainer)
        return str(error), all(torch.equal(before[key], after[key]) for key in before)
    return "", False


@pytest.mark.slow
def test_a_step_that_is_not_finite_leaves_the_state_alone_and_names_the_parameter() -> None:
    ((text, same),) = run_ranks(_poisoned, 1, _placed(_run({}, {"layers": 2}), RELEASED))
    assert same
    assert "NaN or Inf in gradients of blocks.0." in text and "(1 elements)" in text


def _poisoned_second_pass(rank: int, spec: RunSpec) -> str:
    """Return the error of a step whose second pass has a gradient that is not finite."""
    trainer, passes = trainer_of(spec), list[int]()
    (runner,) = trainer.runners.values()

    def spoil(grads: Any) -> None:
        passes.append(1)
        if len(passes) == 2:
            grads[0].view(-1)[0] = float("nan")

    runner.buckets[1][0].observe = spoil
    with pytest.raises(UnequalPassesError) as caught:
        train_step(trainer, microbatches(trainer), step=0)
    return str(caught.value)


@pytest.mark.slow
def test_numbers_that_are_not_finite_in_the_second_pass_only_end_the_rank() -> None:
    """Its update was not checked, so no copy of it may be made."""
    (text,) = run_ranks(_poisoned_second_pass, 1, _placed(_run({}, {"layers": 2}), {"release": True}))
    assert text.startswith("step 1: NaN or Inf in gradients of blocks.0.") and "but not in the first" in text


LARGE = {"layers": 8, "dim": 256, "heads": 4, "kv_heads": 4, "head_dim": 64, "ffn": 768, "vocab": 1024}
SIZED: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ({}, {}, DISK),
    ({"data": 2, "zero": 1}, {}, DISK),
    ({"tensor": 2}, {}, DISK),
    ({}, {"tied": True}, DISK),
    ({}, {}, {"optimizer": "host"}),
    ({"data": 2, "zero": 2}, {}, {}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "model", "place"), SIZED, ids=str)
@sampled(3, together=True)
def test_the_peak_is_lower_and_as_predicted(plan: dict[str, Any], model: dict[str, Any], place: dict[str, Any]) -> None:
    held, released = (
        _placed(_run({"recompute": "full"} | plan, LARGE | model), place | {"chunk": 1} | more)
        for more in ({}, {"release": True})
    )
    counted = dry(released, 0)
    lines = {line.name: line for line in compare(predict(workload_of(released), rank=0), counted)}
    assert lines["memory.gradients"].gap == pytest.approx(0, abs=0.03)
    assert sum(counted.memory.peak.values()) < 0.92 * sum(dry(held, 0).memory.peak.values())
    everything = sum(line.predicted or 0.0 for name, line in lines.items() if name in {f"memory.{each}" for each in CATEGORIES})
    assert everything == pytest.approx(sum(counted.memory.peak.values()), rel=0.07)
    assert lines["work.products"].gap == pytest.approx(0, abs=1e-6), "each pass counts"


@pytest.mark.slow
def test_the_temporary_tensors_of_an_update_count_beside_the_backward() -> None:
    """The update expands state from few bits to fp32 while activations are still there."""
    spec = _placed(_run({"recompute": "full"}, LARGE, optimizer={"master": "split8", "moments": "fp8"}), {"release": True})
    counted, predicted = sum(dry(spec, 0).memory.peak.values()), sum(predict(workload_of(spec), rank=0).memory.values())
    assert counted == pytest.approx(predicted, rel=0.06)


def _counted(rank: int, spec: RunSpec) -> list[Any]:
    made = [single_documents(spec)] * spec.microbatches
    return [(found.memory, found.work) for found in (count(spec, made, fake_tensors=fake) for fake in (False, True))]


@pytest.mark.slow
def test_a_real_step_holds_what_a_dry_one_counts() -> None:
    real, fake = run_ranks(_counted, 1, _placed(_run({"recompute": "full"}), RELEASED))[0]
    assert real == fake


PARTS = 5
"""Three blocks, embedding and head."""


def _behind(rank: int, spec: RunSpec) -> Trained:
    """Each update ends only after the gradients of the part before it are reduced."""
    reduced, take, update = threading.Semaphore(0), Release._take, Release._update

    def counted(self: Release, names: Sequence[str], *given: Any) -> None:
        reduced.release()
        take(self, names, *given)

    def held_up(self: Release, *given: Any) -> None:
        if not started:
            assert reduced.acquire(timeout=PATIENCE)  # of the part itself
        started.append(True)
        if len(started) < PARTS:
            assert reduced.acquire(timeout=PATIENCE), "the backward waited for the update"
        update(self, *given)

    started = list[bool]()
    with mock.patch.multiple(Release, _take=counted, _update=held_up):
        trainer = trainer_of(spec)
        return [train_step(trainer, microbatches(trainer), step=0)], _held(trainer)


@pytest.mark.slow
def test_a_part_is_updated_while_the_backward_before_it_computes() -> None:
    spec = _placed(_run({}), RELEASED, clip=0.0)
    (found,), (plain,) = (run_ranks(function, 1, spec) for function in (_behind, _one_step))
    _assert_same([found, plain])
    (told,) = found[0]
    spans = {
        name: [(start, end) for other, start, end in told.spans if other == name] for name in ("UPDATE", "UPDATE_WAIT", "0B0")
    }
    ((begun, ended),) = spans["0B0"]
    inside = [begun < start < end < ended for start, end in spans["UPDATE"]]
    assert len(inside) == PARTS and all(inside[:3])
    waited = sum(end - start for start, end in spans["UPDATE_WAIT"])
    assert told.breakdown["optimizer"] >= waited > 0
    assert sum(told.breakdown.values()) <= told.seconds * 1.01


@pytest.mark.slow
def test_a_loss_scale_divides_each_gradient_once_while_its_update_waits() -> None:
    """The update of the last part still runs when the backward has ended."""
    spec = _run({}, precision="fp16", steps=4)
    (found,) = run_ranks(_slowly, 1, [_placed(spec, place, clip=0.0) for place in (DISK, RELEASED)])
    _assert_same(found)


def _slowly(rank: int, specs: list[RunSpec]) -> list[Trained]:
    update = Release._update

    def later(self: Release, *given: Any) -> None:
        time.sleep(0.2)  # long enough that the backward is over: a wrong order would show, whatever the machine's speed
        update(self, *given)

    with mock.patch.object(Release, "_update", later):
        return _trained(rank, specs, 2)


def _one_step(rank: int, spec: RunSpec) -> Trained:
    trainer = trainer_of(spec)
    return [train_step(trainer, microbatches(trainer), step=0)], _held(trainer)
