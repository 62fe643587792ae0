"""An optimizer is one class and one row: training, checkpoints, copies, checks, predictions and reports learn about it from the table.

The toy is SGD with momentum, in a row that exists only here.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor
from torch.distributed.tensor import DTensor

from megalith.check import check
from megalith.checkpoint.checkpointer import Checkpointer
from megalith.checkpoint.memory import Memory
from megalith.cost.constants import calibration
from megalith.cost.memory import memory as predicted_memory
from megalith.cost.parts import parts
from megalith.cost.predicted import predict, workload_of
from megalith.events import Holding
from megalith.fleet.observations import StateCorrupt
from megalith.fleet.rank_info import RankInfo
from megalith.fleet.report import Reported
from megalith.fleet.tiers import Source, Tier
from megalith.prove.compare import compare
from megalith.prove.parity import record, reference, shrink
from megalith.spec.optimizers import OPTIMIZERS, Kind
from megalith.spec.run import OptimizerSpec, RunSpec
from megalith.spec.state import Slot
from megalith.train.guard import StateGuard
from megalith.train.loop import stepper_of
from megalith.train.optimizers.global_tensors import GlobalTensors
from megalith.train.optimizers.rule import Part
from megalith.train.run import holding_of
from megalith.train.step import train_step
from megalith.train.step_hooks import Attendants
from tests.keys import KEY
from tests.parallel.running import CPU, microbatches, trainer_of
from tests.prove.dry import dry, real
from tests.ranks import run_ranks
from tests.specs import tiny_run
from tests.train.test_guard import read_of


class Momentum:
    """v <- beta1 * v + g; w <- w - lr * v."""

    def __init__(self, spec: OptimizerSpec, whole: GlobalTensors) -> None:
        self.beta = spec.beta1

    def update(self, parts: Sequence[Part], *, number: int, lr: float) -> None:
        for part in parts:
            velocity = part.slots["moments.velocity"]
            velocity.mul_(self.beta).add_(part.gradient)
            part.weight.sub_(velocity, alpha=lr)


ROW = Kind(title="SGD with momentum", rule=f"{__name__}:Momentum", slots=(Slot("moments.velocity"),))

PLANS: list[dict[str, Any]] = [
    {"data": 2, "zero": 0},
    {"data": 2, "zero": 1},
    {"data": 2, "zero": 2},
    {"data": 2, "zero": 3},
    {"tensor": 2},
    {"pipeline": 2},
    {"data": 2, "pipeline": 2, "zero": 3},
    {"pipeline": 2, "schedule": "zb-h2", "post_validation": True},
]


@pytest.fixture(autouse=True)
def _row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPTIMIZERS, "toy", ROW)


def run(plan: Mapping[str, Any] | None = None, **rest: Any) -> RunSpec:
    return tiny_run(plan=dict(plan or {}), optimizer={"kind": "toy", "lr": 0.05, "warmup": 0, "schedule": "constant"}, **rest)


# --- trains, equal to one process ---


def _recorded(rank: int, spec: RunSpec) -> Any:
    return record(trainer_of(spec))


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_training_under_a_plan_equals_one_process(plan: dict[str, Any]) -> None:
    spec = shrink(run(plan, train={"global_batch": 8}), steps=3)
    assert spec.optimizer.kind == "toy"
    found = run_ranks(_recorded, spec.plan.ranks, spec)[0]
    rows = compare(reference(spec, device=CPU), found, spec=spec)
    assert all(row.equal for row in rows), [row for row in rows if not row.equal]


def _moved(rank: int) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    trainer = trainer_of(run())
    before = {name: share.clone() for name, share in trainer.state.shares("weights").items()}
    train_step(trainer, microbatches(trainer), step=0)
    velocities = trainer.state.shares("optimizer")
    after = trainer.state.shares("weights")
    return {name: (before[name], after[name], velocities[f"moments.velocity.{name[8:]}"]) for name in after}


def test_nothing_but_the_rule_moves_a_weight() -> None:
    """From no velocity, a weight moves by the learning rate times its first velocity."""
    for before, after, velocity in run_ranks(_moved, 1)[0].values():
        torch.testing.assert_close(after, before - 0.05 * velocity)
        assert bool(velocity.any())


# --- stored: checkpoints, copies, digests, undoing ---


def _save(rank: int, folder: Path) -> None:
    trainer = trainer_of(run({"data": 2, "zero": 3}))
    for step in range(2):
        train_step(trainer, microbatches(trainer, step), step=step)
    Checkpointer(folder).save(2, trainer.state.tensors(), {}, asynchronous=False)


def _load(rank: int, folder: Path, plan: dict[str, Any]) -> dict[str, Tensor]:
    trainer = trainer_of(run(plan))
    assert Checkpointer(folder).load(trainer.state.tensors()) is not None
    found = trainer.state.tensors()
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in found.items()}


def test_a_checkpoint_loads_under_another_plan(tmp_path: Path) -> None:
    run_ranks(_save, 2, tmp_path)
    alone, *_ = run_ranks(_load, 1, tmp_path, {})
    halves, *_ = run_ranks(_load, 2, tmp_path, {"tensor": 2})
    assert {name.rpartition("velocity.")[0] for name in alone if name.startswith("moments")} == {"moments."}
    assert alone.keys() == halves.keys()
    assert all(torch.equal(alone[name], halves[name]) for name in alone)
    assert any(bool(tensor.any()) for name, tensor in alone.items() if name.startswith("moments.velocity."))


def _copied(rank: int, root: Path) -> tuple[bool, list[str]]:
    """Return whether a copy in memory restores the state bit for bit, and the guard's report about a flipped bit in a
    velocity."""
    trainer = trainer_of(run({"data": 2, "zero": 1}, fleet={"digest": True, "memory_every": 1}))
    rank_info, observed = RankInfo(rank, 2, ("n0", "n1"), root, key=KEY), list[Any]()
    memory = Memory(trainer.state.shares(), rank_info=rank_info)
    guard = StateGuard(trainer, rank_info=rank_info, read=lambda step, data_rank: [], memory=memory, report=observed.append)
    guard.begin(0, 0)
    guard.before_step(trainer, 0)
    train_step(trainer, microbatches(trainer, 0), step=0, attendants=Attendants([guard]))
    guard.copy(1, 8)
    before = {name: share.clone() for name, share in trainer.state.shares().items()}
    for share in trainer.state.shares().values():
        share.zero_()
    memory.restore(Source(1, Tier.MEMORY))
    same = all(torch.equal(share, before[name]) for name, share in trainer.state.shares().items())
    velocity = next(share for share in trainer.state.shares("optimizer").values() if share.numel())
    velocity.view(-1)[:1].view(torch.int32).bitwise_xor_(1)
    with pytest.raises(Reported):
        guard.check_state(1)
    dist.barrier()
    return same, [type(observation).__name__ for observation in observed]


def test_copies_and_digests_hold_its_state(tmp_path: Path) -> None:
    assert run_ranks(_copied, 2, tmp_path) == [(True, ["StateCorrupt"])] * 2


def _verified(rank: int, root: Path, flips: bool) -> list[str]:
    """Return the guard's reports about an update repeated from the copy. `flips`: one bit of a velocity is then wrong."""
    trainer = trainer_of(run({"data": 2, "zero": 1}, fleet={"digest": True, "memory_every": 1, "verify_every": 1}))
    rank_info, observed = RankInfo(rank, 2, ("n0", "n1"), root, key=KEY), list[Any]()
    memory = Memory(trainer.state.shares(), rank_info=rank_info, pinned=True)
    assert dist.group.WORLD is not None
    memory.join(1, group=dist.group.WORLD)

    guard = StateGuard(trainer, rank_info=rank_info, read=partial(read_of, trainer), memory=memory, report=observed.append)
    guard.begin(0, 0)
    if flips and rank == 0:
        own = trainer.rule.update
        live = {share.data_ptr() for share in trainer.state.shares("weights").values() if share.numel()}

        def wrong(parts: Sequence[Part], *, number: int, lr: float) -> None:
            own(parts, number=number, lr=lr)
            if parts[0].weight.data_ptr() in live:  # otherwise it is repeated, on a copy
                parts[0].slots["moments.velocity"].view(-1)[:1].view(torch.int32).bitwise_xor_(1)

        trainer.rule.update = wrong  # pyright: ignore[reportAttributeAccessIssue]
    guard.before_step(trainer, 0)
    with suppress(Reported):
        train_step(trainer, microbatches(trainer, 0), step=0, attendants=Attendants([guard]))
    guard.close()
    dist.barrier()
    return [observation.where for observation in observed if isinstance(observation, StateCorrupt)]


@pytest.mark.parametrize("flips", [False, True])
def test_its_updates_are_repeated_from_the_copy(flips: bool, tmp_path: Path) -> None:
    found = [where for reported in run_ranks(_verified, 2, tmp_path, flips) for where in reported]
    assert found == (["update"] if flips else [])


def _stepped(rank: int, late: bool) -> dict[str, Tensor]:
    plan = {"pipeline": 2, "schedule": "zb-h2", "post_validation": late}
    spec = run(plan, train={"global_batch": 8})
    trainer = trainer_of(spec.model_copy(update={"optimizer": spec.optimizer.model_copy(update={"clip": 0.05})}))
    stepper = stepper_of(trainer)
    for step in range(3):
        stepper.step(microbatches(trainer, step), step=step)
    stepper.settle()
    return {name: share.clone() for name, share in trainer.state.shares().items()}


def test_post_validation_undoes_it_bit_for_bit() -> None:
    """Clipping is active in every step, so every update is undone once."""
    for late, plain in zip(run_ranks(_stepped, 2, True), run_ranks(_stepped, 2, False), strict=True):
        assert all(torch.equal(late[name], plain[name]) for name in plain)


# --- predicted, dry-run, checked, shown ---


def test_it_is_planned_with_its_own_bytes() -> None:
    toy, adamw = (
        predicted_memory(load, parts(load), calibration().overheads[load.software_profile.overheads])
        for load in (workload_of(run()), replace(workload_of(run()), optimizer="adamw"))
    )
    assert toy.optimizer == adamw.optimizer / 2 > 0
    assert toy.weights == adamw.weights


def test_a_dry_run_counts_it_to_the_byte() -> None:
    spec = run({"data": 2, "zero": 1})
    counted, wholly = dry(spec, 1), real(spec)[1]
    assert counted.state == wholly.state
    assert counted.memory.most["optimizer"] == wholly.memory.most["optimizer"] == counted.state["optimizer"]
    assert counted.state["optimizer"] == counted.state["weights"]
    predicted = predict(workload_of(spec), rank=1)
    assert predicted.memory["optimizer"] == pytest.approx(counted.state["optimizer"], rel=0.02)


def test_check_counts_its_bytes() -> None:
    """Without ZeRO, each data rank keeps 4 bytes of velocity a parameter where AdamW keeps 8, beside 10 of weights and gradients."""
    said = []
    for kind in ("toy", "adamw"):
        spec = tiny_run(plan={"data": 2, "zero": 0}, optimizer={"kind": kind}, train={"precision": "bf16"})
        (problem,) = [p for p in check(spec, files=False) if p.key == "plan.zero"]
        said.append(float(re.findall(r"keeps ([0-9.]+) \wiB of weights, gradients and moments", problem.reason)[0]))
    assert said[0] == pytest.approx(said[1] * 14 / 18, rel=0.02)


def _holding(rank: int) -> Holding:
    trainer = trainer_of(run())
    return holding_of(trainer)


def test_the_report_shows_its_bytes(tmp_path: Path) -> None:
    (held,) = run_ranks(_holding, 1)
    assert held.optimizer_bytes == held.weight_bytes


def test_an_optimizer_without_a_row_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValidationError, match=r"'adamw' or .* or 'toy'"):
        OptimizerSpec(kind="sgdm")


def test_a_rule_that_needs_whole_tensors_is_said_not_to_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = tiny_run(plan={"data": 2}, optimizer={"kind": "toy"}, fleet={"verify_every": 10, "memory_every": 1})
    assert not [p for p in check(spec, files=False) if "update by toy" in p.reason]
    monkeypatch.setitem(OPTIMIZERS, "toy", ROW._replace(unit="matrix"))
    (said,) = [p for p in check(spec, files=False) if "update by toy" in p.reason]
    assert said.severity == "advice" and "each whole matrix" in said.reason
