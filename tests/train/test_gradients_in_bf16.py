"""Gradients added up in bf16 have the fp32 run's bits if nothing is added, do not depend on the state's place, and take half of
the bytes."""

from functools import reduce
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from megalith.checkpoint.shares import as_tensor, shares
from megalith.cost.predicted import predict, workload_of
from megalith.parallel.data import Weight, local
from megalith.parallel.gradients import sum_of_squares
from megalith.planner.compared import compare
from megalith.prove.axes import ParityCase
from megalith.prove.parity import shrink
from megalith.prove.prove import prove
from megalith.spec.optimizers import OPTIMIZERS
from megalith.spec.run import RunSpec
from megalith.train.loop import stepper_of
from megalith.train.step import accumulate
from tests.full import FULL, sampled
from tests.parallel.running import microbatches, trainer_of
from tests.prove.dry import dry
from tests.ranks import run_ranks
from tests.specs import brief_run, tiny_run

NARROW = {"precision": "bf16", "gradients": "bf16"}
DISK, HALF = {"optimizer": "disk"}, {"optimizer": "host", "share": 0.5}
Trained = tuple[list[float], dict[str, Tensor]]


def _trained(rank: int, specs: list[RunSpec]) -> list[Trained]:
    """Return losses and this rank's state after some steps of each run."""
    found = []
    for spec in specs:
        trainer = trainer_of(spec)
        stepper, told = stepper_of(trainer), []
        for step in range(3):
            told += stepper.step(microbatches(trainer, step), step=step)
        told += stepper.settle()
        held = {key: as_tensor(share).clone() for key, share in shares(trainer.state.laid()).items()}
        found.append(([each.loss for each in told], held))
    return found


def _assert_same(found: list[Trained]) -> None:
    (losses, state), *others = found
    for other, held in others:
        assert other == losses and held.keys() == state.keys()
        assert not [key for key in state if not torch.equal(held[key], state[key])]


def _variant(spec: RunSpec, **changes: dict[str, Any]) -> RunSpec:
    return spec.model_copy(update={name: getattr(spec, name).model_copy(update=values) for name, values in changes.items()})


@pytest.mark.slow
@pytest.mark.parametrize("kind", OPTIMIZERS if FULL else ("adamw", "muon", "adafactor"))
def test_one_microbatch_without_clipping_is_the_run_in_fp32(kind: str) -> None:
    """A backward in bf16 gives bf16 gradients, so nothing is rounded until two are added."""
    spec = brief_run(
        plan={}, model={"layers": 2}, train={"precision": "bf16", "global_batch": 1}, optimizer={"kind": kind, "clip": 0.0}
    )
    (found,) = run_ranks(_trained, 1, [spec, _variant(spec, train={"gradients": "bf16"})])
    _assert_same(found)


PLANS: list[dict[str, Any]] = [{"data": 2, "zero": 1}, {"data": 2, "zero": 3, "post_validation": True}]


@pytest.mark.slow
@sampled(2, together=True)
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_no_bit_changes_with_the_place_of_the_state(plan: dict[str, Any]) -> None:
    """Clipping is active; with post-validation the update is undone. Master weights may be in halves, too."""
    spec = brief_run(plan=plan, train=NARROW, optimizer={"clip": 0.05, "master": "split16"})
    places = [spec.plan.model_validate(spec.plan.model_dump() | {"state": place}) for place in ({}, HALF, DISK)]
    made = [spec.model_copy(update={"plan": plan}) for plan in places]
    late = _variant(spec, plan={"post_validation": not spec.plan.post_validation})
    for found in run_ranks(_trained, 2, [*made, late]):
        _assert_same(found)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adamw", "sgd", "lion"])
def test_large_tensors_on_disk_are_updated_in_pieces(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks have 2,048 numbers, which is not a multiple of rows of 48."""
    monkeypatch.setattr("megalith.train.offload.home.MIB", 1 << 13)
    spec = brief_run(plan={}, train=NARROW, optimizer={"kind": kind, "clip": 0.05}, model={"vocab": 331, "dim": 48})
    away = spec.plan.model_validate(spec.plan.model_dump() | {"state": {"optimizer": "disk", "chunk": 1}})
    (found,) = run_ranks(_trained, 1, [spec, spec.model_copy(update={"plan": away})])
    _assert_same(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        {"data": 2, "tensor": 2, "zero": 2},
        *[{"pipeline": 2, "schedule": "zb-h2", "data": 2}, {"data": 2, "expert": 2, "zero": 3}, {"data": 4, "replicate": 2}]
        * FULL,
    ],
    ids=str,
)
def test_a_plan_trains_like_one_process(plan: dict[str, Any]) -> None:
    """Equal within the limits of bf16 to the reference, which adds up in fp32."""
    model = {"preset": "mixtral-8x7b"} if "expert" in plan else {}
    spec = shrink(tiny_run(plan=plan, model=model, train={"global_batch": 8, **NARROW}), steps=3)
    proof = prove(ParityCase((), spec.model_copy(update={"name": "tiny"})), references={})
    assert proof.outcome == "equal", proof


def _gradients(rank: int, spec: RunSpec) -> tuple[set[torch.dtype], int, int]:
    trainer = trainer_of(spec)
    accumulate(trainer, microbatches(trainer))
    found = [local(parameter.grad) for parameter in trainer.parameters.values() if parameter.grad is not None]
    return (
        {each.dtype for each in found},
        sum(each.numel() * each.element_size() for each in found),
        trainer.state.bytes()["gradients"],
    )


def _added_up(rank: int, spec: RunSpec) -> list[str]:
    """Return the parameters whose gradient is not the sum of the microbatches' gradients, added over ranks and then over microbatches
    with each addition rounded to bf16."""
    trainer = trainer_of(spec)
    weights = {w for r in trainer.runners.values() for used in r.buckets for bucket in used for w in bucket.weights}
    seen: dict[int, list[Tensor]] = {id(weight.master): [] for weight in weights}

    def watch(weight: Weight) -> None:
        weight.compute.register_hook(lambda gradient: seen[id(weight.master)].append(gradient.clone()))

    for weight in weights:
        watch(weight)
    accumulate(trainer, microbatches(trainer))
    wrong = []
    for name, parameter in trainer.parameters.items():
        mine = torch.stack(seen[id(parameter)])
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine)
        reduced = [reduce(torch.add, parts) for parts in zip(*everyone, strict=True)]
        assert len(reduced) == 4 and isinstance(parameter.grad, DTensor)
        if not torch.equal(parameter.grad.full_tensor(), reduce(torch.add, reduced)):
            wrong.append(name)
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("plan", [{}, {"data": 2, "zero": 3}], ids=str)
def test_each_microbatch_is_rounded_once_in_its_order(plan: dict[str, Any]) -> None:
    spec = brief_run(plan=plan, model={"layers": 2}, train={"global_batch": 4 * plan.get("data", 1), **NARROW})
    assert run_ranks(_added_up, spec.plan.ranks, spec) == [[]] * spec.plan.ranks


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 3])
def test_a_number_takes_two_bytes(zero: int) -> None:
    wide = brief_run(plan={"data": 2, "zero": zero}, train={"precision": "bf16"})
    before = run_ranks(_gradients, 2, wide)
    for (_, bytes_wide, _), (dtypes, held, told) in zip(
        before, run_ranks(_gradients, 2, _variant(wide, train=NARROW)), strict=True
    ):
        assert dtypes == {torch.bfloat16} and held == told == bytes_wide // 2


@pytest.mark.slow
@sampled(2, together=True)
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_bytes_and_messages_equal_the_prediction(zero: int) -> None:
    sizes = {"layers": 2, "dim": 128, "heads": 4, "kv_heads": 4, "head_dim": 32, "ffn": 384, "vocab": 1024}
    spec = brief_run(plan={"data": 2, "zero": zero}, model=sizes, train=NARROW)
    narrow, wide = (
        {line.name: line for line in compare(predict(workload_of(each), rank=1), dry(each, 1))}
        for each in (spec, _variant(spec, train={"gradients": "fp32"}))
    )
    assert narrow["memory.gradients"].gap == pytest.approx(0, abs=0.1)
    (name,) = [name for name in narrow if name.endswith("reduce-scatter.bytes")]
    assert narrow[name].gap == pytest.approx(0, abs=0.03)
    assert wide[name].counted == 2 * narrow[name].counted


def test_a_norm_is_taken_in_fp32() -> None:
    gradient = torch.randn(1 << 20, generator=torch.Generator().manual_seed(1)).bfloat16()
    exact = float(gradient.double().square().sum())
    assert float(sum_of_squares([gradient, gradient[:100]])) == pytest.approx(
        exact + float(gradient[:100].double().square().sum()), rel=1e-6
    )
