"""Any plan loads a checkpoint of any other plan bit for bit: weights, moments and position."""

from collections.abc import Iterable
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.checkpoint.checkpointer import Checkpointer, SaveResult
from megalith.checkpoint.read import read_full
from megalith.parallel.data import local
from megalith.prove.parity import RandomText, shrink
from megalith.spec.run import RunSpec
from megalith.train.assemble import assemble, mesh_groups
from megalith.train.batches import indices
from megalith.train.step import compute, update
from tests.full import FULL, sampled
from tests.ranks import run_ranks
from tests.runs import assert_same_bits
from tests.specs import tiny_run

CPU = torch.device("cpu")
PLANS: list[dict[str, Any]] = [
    {},
    {"data": 2, "zero": 3, "pipeline": 2},
    {"tensor": 2, "data": 2, "zero": 1},
    {"data": 4, "replicate": 2, "zero": 2},
    {"tensor": 4, "pipeline": 2},
    {"data": 2, "tensor": 2, "zero": 3, "pipeline": 2, "schedule": "interleaved", "chunks": 2},
]
EXPERTS: list[dict[str, Any]] = [
    {},
    {"data": 2, "expert": 2, "zero": 3},
    {"data": 2, "tensor": 2, "expert": 2, "expert_tensor": 2, "zero": 1},
    {"context": 2, "ulysses": 2, "tensor": 2, "expert": 4, "zero": 2},
    {"data": 2, "pipeline": 2, "schedule": "dualpipe", "zero": 1, "expert": 2},
    {"data": 4, "replicate": 2, "zero": 3, "expert": 2},
    {"pipeline": 2, "schedule": "zb-v", "chunks": 2, "context": 2, "tensor": 2, "expert_tensor": 2},
]
"""Plans of a model with experts, latent attention, a router bias and multi-token prediction."""


def _spec(plan: dict[str, Any]) -> RunSpec:
    """Return a model that every plan here can split, with no more microbatches than its pipelines need."""
    experts = any(plan is one for one in EXPERTS)
    plan = plan | {"microbatch": 8 // plan.get("data", 1) // (4 if "pipeline" in plan else 2)}
    if experts:
        run = tiny_run(model={"preset": "deepseek-tiny"}, plan=plan, train={"global_batch": 8, "seq_len": 32})
        return run.model_copy(update={"model": run.model.small(layers=4, unit=4, heads_unit=4)})
    model = shrink(tiny_run(plan={"data": 4, "tensor": 4, "zero": 3}), steps=1).model
    return tiny_run(model=model.model_dump() | {"layers": 4, "tied": True}, plan=plan, train={"global_batch": 8, "seq_len": 24})


def _train_and_save(rank: int, plan: dict[str, Any], folder: Path, step: int, load_first: bool) -> list[float]:
    """Train two steps, from the newest checkpoint if asked, save, and return the losses."""
    spec = _spec(plan)
    trainer = assemble(spec, groups=mesh_groups(spec, CPU), device=CPU)
    checkpointer = Checkpointer(folder)
    if load_first:
        loaded = checkpointer.load(trainer.state.tensors())
        assert loaded is not None
        assert loaded.step == step
    text, losses = RandomText(spec), []
    for number in range(step, step + 2):
        mine = indices(spec, first=number * 8, data_rank=trainer.groups.coordinates["data"])
        computed = compute(trainer, [text.batch(part) for part in mine], step=number)
        update(trainer, computed, step=number)
        losses.append(computed.loss)
    checkpointer.save(step + 2, trainer.state.tensors(), {"step": step + 2}, asynchronous=False)
    assert all(isinstance(outcome, SaveResult) for outcome in checkpointer.wait())
    return losses


@torch.no_grad()
def _load_and_save(rank: int, plan: dict[str, Any], sources: list[Path], out: Path) -> None:
    """Load each checkpoint, and save the loaded state under its own name."""
    spec = _spec(plan)
    trainer = assemble(spec, groups=mesh_groups(spec, CPU), device=CPU)
    for source in sources:
        for tensor in trainer.state.tensors().values():
            local(tensor).zero_()  # clear the state that was loaded before
        loaded = Checkpointer(source).load(trainer.state.tensors())
        assert loaded is not None
        copier = Checkpointer(out / source.name)
        copier.save(loaded.step, trainer.state.tensors(), loaded.meta, asynchronous=False)
        assert all(isinstance(outcome, SaveResult) for outcome in copier.wait())


def _ranks(plan: dict[str, Any]) -> int:
    return _spec(plan).plan.ranks


class Trained:
    """Checkpoints of plans. A plan is trained when its checkpoint is first asked for."""

    def __init__(self, plans: list[dict[str, Any]], folder: Path) -> None:
        self._plans, self._folder = plans, folder

    def before(self, number: int, places: Iterable[int]) -> list[Path]:
        """Return the checkpoints of the plans that are so many places before plan `number` in the list."""
        return [self._of((number - place) % len(self._plans)) for place in places]

    def _of(self, number: int) -> Path:
        folder, plan = self._folder / f"plan-{number}", self._plans[number]
        if not folder.exists():
            run_ranks(_train_and_save, _ranks(plan), plan, folder, 0, False)
        return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(PLANS, tmp_path_factory.mktemp("plans"))


@pytest.fixture(scope="module")
def experts_saved(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(EXPERTS, tmp_path_factory.mktemp("experts"))


@sampled(2, together=True)
@pytest.mark.parametrize("second", range(len(PLANS)))
def test_what_is_loaded_is_what_was_saved(second: int, saved: Trained, tmp_path: Path) -> None:
    """`make test-full` loads from every other plan, `make test` from two."""
    places = range(1, len(PLANS) if FULL else 3)
    for state in _loaded(PLANS[second], saved.before(second, places), tmp_path):
        assert any(name.startswith("moments.second.") and tensor.any() for name, tensor in state.items())


@sampled(2, together=True)
@pytest.mark.parametrize("second", range(len(EXPERTS)))
def test_experts_and_their_routers_too(second: int, experts_saved: Trained, tmp_path: Path) -> None:
    """Each plan loads from the three before it, so it saves for three others and loads from three."""
    for state in _loaded(EXPERTS[second], experts_saved.before(second, (1, 2, 3)), tmp_path):
        assert state["weights.blocks.2.mlp.router.load"].sum() > 0
        assert state["weights.blocks.2.mlp.router.bias"].any()


def _loaded(plan: dict[str, Any], sources: list[Path], out: Path) -> list[dict[str, Tensor]]:
    """Load each source under `plan` and return the loaded states."""
    run_ranks(_load_and_save, _ranks(plan), plan, sources, out)
    states = [read_full(source) for source in sources]
    for source, state in zip(sources, states, strict=True):
        assert_same_bits(state, read_full(out / source.name))
    return states


@pytest.mark.parametrize(("first", "second"), [pair for pair in permutations(range(4), 2) if 0 in pair])
@sampled(2)
def test_training_goes_on_under_another_plan(first: int, second: int, tmp_path: Path) -> None:
    run_ranks(_train_and_save, _ranks(PLANS[first]), PLANS[first], tmp_path / "run", 0, False)
    alone = run_ranks(_train_and_save, 1, {}, tmp_path / "alone", 0, False)[0]
    alone += run_ranks(_train_and_save, 1, {}, tmp_path / "alone", 2, True)[0]
    went_on = run_ranks(_train_and_save, _ranks(PLANS[second]), PLANS[second], tmp_path / "run", 2, True)[0]
    assert went_on == pytest.approx(alone[2:], abs=1e-5)
