"""Given the same gradients, every optimizer makes the same update under every plan: bitwise, or to 1e-6 if it adds up norms."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megalith.checkpoint.checkpointer import Checkpointer
from megalith.models.init import seed_of
from megalith.parallel.data import local
from megalith.parallel.groups import Groups
from megalith.prove.parity import _together
from megalith.spec.optimizers import OPTIMIZERS
from megalith.spec.run import RunSpec
from megalith.spec.treatment import treatments
from megalith.train.assemble import Trainer, assemble, mesh_groups
from megalith.train.optimizers import homes as homes_module
from megalith.train.optimizers import muon as muon_module
from megalith.train.optimizers.global_tensors import GlobalSum, GlobalTensors
from megalith.train.optimizers.homes import Item, MatrixExchange, MatrixHome
from tests.full import sampled
from tests.parallel.running import CPU
from tests.ranks import run_ranks
from tests.specs import tiny_run

STEPS = 3
KINDS = tuple(OPTIMIZERS)
NEARLY = ("lamb", "adafactor", "adamw")
"""Optimizers that add up norms over ranks, and torch's fused AdamW, which rounds the last elements of a share differently."""
DENSE: dict[str, Any] = {"tied": True}
EXPERTS: dict[str, Any] = {"preset": "deepseek-tiny"}

PLANS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (DENSE, {"data": 2, "zero": 0}),
    (DENSE, {"data": 3, "zero": 1}),
    (DENSE, {"data": 2, "zero": 2}),
    (DENSE, {"tensor": 2, "data": 2, "zero": 3}),
    (DENSE, {"tensor": 4}),  # more ranks than key heads: each rank holds all of them
    (DENSE, {"pipeline": 2, "data": 2}),
    (DENSE, {"pipeline": 2, "schedule": "dualpipe"}),
    (DENSE, {"data": 4, "replicate": 2, "zero": 3}),
    (EXPERTS, {"data": 2, "expert": 2}),
    (EXPERTS, {"data": 4, "expert": 2, "zero": 3}),
    (EXPERTS, {"data": 2, "tensor": 2, "expert": 2, "expert_tensor": 2}),
    (EXPERTS, {"data": 4, "replicate": 2, "expert": 2, "zero": 2}),
]


def spec_of(model: Mapping[str, Any], plan: Mapping[str, Any], **optimizer: Any) -> RunSpec:
    data = plan.get("data", 1)
    return tiny_run(
        model=dict(model),
        plan=dict(plan),
        train={"global_batch": 4 * data * plan.get("pipeline", 1)},
        optimizer={"lr": 0.02, "weight_decay": 0.3, "iteration": "fp32"} | optimizer,
    )


def whole_gradient(name: str, shape: torch.Size, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed_of(step, name))
    return torch.randn(shape, generator=generator)


def set_gradients(trainer: Trainer, step: int) -> None:
    """Give each parameter this rank's share of a gradient that is equal for all plans."""
    for name, parameter in trainer.parameters.items():
        gradient = whole_gradient(name, parameter.shape, step)
        assert isinstance(parameter, DTensor)
        cut = trainer.rule.whole.cuts[name]
        where = tuple(slice(start, start + size) for start, size in zip(cut.offset, cut.sizes, strict=True))
        share = gradient[where].clone(memory_format=torch.contiguous_format)
        assert share.shape == local(parameter).shape
        parameter.grad = DTensor.from_local(
            share, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
        )


def updated(spec: RunSpec, groups: Groups) -> dict[str, Tensor]:
    """Return the whole state after some updates, on the first rank."""
    trainer = assemble(spec, groups=groups, device=CPU)
    for step in range(STEPS):
        set_gradients(trainer, step)
        trainer.update()
        trainer.state.drop_gradients()
    return _together(trainer.state.laid(), trainer)


def _all_kinds(rank: int, specs: dict[str, RunSpec]) -> dict[str, dict[str, Tensor]]:
    groups = mesh_groups(next(iter(specs.values())), CPU)
    return {kind: updated(spec, groups) for kind, spec in specs.items()}


ALONE: dict[str, dict[str, dict[str, Tensor]]] = {}


def alone(model: Mapping[str, Any], variants: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Tensor]]:
    """Return the result of the same updates in one process, computed once for each model."""
    key = str((model, variants))
    if key not in ALONE:
        specs = {kind: spec_of(model, {}, **optimizer) for kind, optimizer in variants.items()}
        ALONE[key] = run_ranks(_all_kinds, 1, specs)[0]
    return ALONE[key]


VARIANTS: dict[str, dict[str, Any]] = {kind: {"kind": kind} for kind in KINDS}
VARIANTS |= {
    "muon, per head, polar express, bf16": {
        "kind": "muon", "split_heads": True, "coefficients": "polar-express", "iteration": "bf16", "nesterov": False
    },
    "adafactor, relative steps": {"kind": "adafactor", "relative_step": True},
    "groups": {
        "kind": "muon",
        "groups": [
            {"pattern": "*.mlp.*", "kind": "lamb", "lr": 0.5},
            {"pattern": "*norm*", "weight_decay": 0.2},
            {"pattern": "blocks.1.*", "kind": "sgd"},
        ],
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("model", "plan"), PLANS, ids=str)
@sampled(2, together=True)
def test_an_update_is_the_same_under_every_plan(model: dict[str, Any], plan: dict[str, Any]) -> None:
    expected = alone(model, VARIANTS)
    specs = {name: spec_of(model, plan, **optimizer) for name, optimizer in VARIANTS.items()}
    found = run_ranks(_all_kinds, specs["adamw"].plan.ranks, specs)[0]
    assert not [wrong for name, state in found.items() for wrong in differences(name, state, expected[name], specs[name])]


def differences(name: str, found: Mapping[str, Tensor], expected: Mapping[str, Tensor], spec: RunSpec) -> list[str]:
    """Return the tensors that differ by any bit, or by more than 1e-6 if their optimizer is in NEARLY."""
    assert found.keys() == expected.keys(), name
    treated, wrong = treatments(spec.model.build(), spec.optimizer), []
    for key, there in expected.items():
        parameter = next((p for p in treated if key.endswith(f".{p}") and key.partition(".")[0] in ("weights", "moments")), None)
        nearly = parameter is not None and treated[parameter].kind in NEARLY
        if not (torch.allclose(found[key], there, rtol=1e-6, atol=1e-8) if nearly else torch.equal(found[key], there)):
            wrong.append(f"{name}: {key} by {(found[key] - there).abs().max()}")
    return wrong


# --- faults on purpose ---


def _own_sums(whole: GlobalTensors, parts: Sequence[GlobalSum]) -> list[Tensor]:
    return [part.value.double() for part in parts]


def _replicas_twice(whole: GlobalTensors, parts: Sequence[GlobalSum]) -> list[Tensor]:
    return ADD_UP(whole, [part._replace(counts=True) for part in parts])


def _own_matrices(whole: GlobalTensors, names: Sequence[str]) -> list[MatrixHome]:
    """Plant: each rank orthogonalises only its own share of each matrix."""
    assert whole.groups is not None
    found = []
    for each in HOMES_OF(whole, names):
        if (box := each.held.get(whole.groups.place.rank())) is not None:
            rows, columns = (side.stop - side.start for side in box)
            item = each.item._replace(shape=(rows, columns))
            found.append(
                MatrixHome(item, whole.groups.place.rank(), {whole.groups.place.rank(): (slice(0, rows), slice(0, columns))})
            )
    return found


def _swapped(exchange: MatrixExchange, matrices: Mapping[Item, Tensor], shares: Mapping[str, Tensor]) -> None:
    """Plant: no result comes back from other ranks."""
    for share in shares.values():
        share.zero_()


ADD_UP, HOMES_OF = GlobalTensors.add_up, homes_module.homes_of
FAULTS: list[tuple[str, dict[str, Any], Any, str, Any]] = [
    ("lamb", {"data": 2, "zero": 1}, GlobalTensors, "add_up", _own_sums),
    ("adafactor", {"data": 2, "zero": 1}, GlobalTensors, "add_up", _own_sums),
    ("adafactor", {"tensor": 4}, GlobalTensors, "add_up", _replicas_twice),
    ("muon", {"data": 2, "zero": 1}, muon_module, "homes_of", _own_matrices),
    ("muon", {"tensor": 2}, MatrixExchange, "scatter", _swapped),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "plan", "where", "name", "fault"), FAULTS, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_a_planted_fault_is_found(
    kind: str, plan: dict[str, Any], where: Any, name: str, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted faults are a norm of a shard, replicas that count twice, a matrix of a shard, and results that never
    come back."""
    expected = alone(DENSE, VARIANTS)[kind]
    monkeypatch.setattr(where, name, fault)
    spec = spec_of(DENSE, plan, kind=kind)
    found = run_ranks(_all_kinds, spec.plan.ranks, {kind: spec})[0][kind]
    gaps = [float((found[key] - expected[key]).abs().max()) for key in found if key.startswith("weights.")]
    assert not max(gaps) < 1e-4


# --- resuming ---


def _saved(rank: int, folder: Path, specs: dict[str, RunSpec]) -> None:
    groups = mesh_groups(next(iter(specs.values())), CPU)
    for name, spec in specs.items():
        trainer = assemble(spec, groups=groups, device=CPU)
        for step in range(STEPS - 1):
            set_gradients(trainer, step)
            trainer.update()
        Checkpointer(folder / name).save(STEPS - 1, trainer.state.tensors(), {}, asynchronous=False)


def _resumed(rank: int, folder: Path, specs: dict[str, RunSpec]) -> dict[str, dict[str, Tensor]]:
    groups, found = mesh_groups(next(iter(specs.values())), CPU), {}
    for name, spec in specs.items():
        trainer = assemble(spec, groups=groups, device=CPU, load=True)
        assert Checkpointer(folder / name).load(trainer.state.tensors()) is not None
        trainer.state.updates = STEPS - 1
        set_gradients(trainer, STEPS - 1)
        trainer.update()
        found[name] = _together(trainer.state.tensors(), trainer)
    return found


@sampled(2, together=True)
def test_a_checkpoint_goes_on_under_another_plan(tmp_path: Path) -> None:
    """Shares of every slot, including rows and columns, are read by ranks that hold other shares."""
    variants = {kind: {"kind": kind} for kind in KINDS}
    before, after = {"data": 2, "tensor": 2, "zero": 3}, {"pipeline": 2, "data": 2, "zero": 1}
    run_ranks(_saved, 4, tmp_path, {kind: spec_of(DENSE, before, **each) for kind, each in variants.items()})
    found = run_ranks(_resumed, 4, tmp_path, {kind: spec_of(DENSE, after, **each) for kind, each in variants.items()})[0]
    expected = alone(DENSE, VARIANTS)
    for kind, state in found.items():
        assert not differences(kind, state, expected[kind], spec_of(DENSE, after, kind=kind))
