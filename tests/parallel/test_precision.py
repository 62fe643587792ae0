"""Recipes for products, put into the modules of a part."""

from collections import defaultdict
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from megalith.kernels import narrow
from megalith.kernels.multiply import Multiply
from megalith.kernels.narrow import Narrow
from megalith.models.head import Output
from megalith.models.linear import Linear
from megalith.models.moe import Experts
from megalith.parallel.precision import RECIPES, apply_precision
from megalith.prove.compare import Recording
from megalith.prove.parity import record, reference, shrink
from megalith.spec.run import RunSpec
from megalith.train.step import accumulate
from tests.models.deepseek import deepseek
from tests.models.plain import stage
from tests.parallel.running import CPU, microbatches, trainer_of
from tests.ranks import run_ranks
from tests.specs import tiny_run


class Other(Multiply):
    pass


def _recipes(model: nn.Module) -> set[type[Any]]:
    """The recipes of all that multiplies by a weight."""
    return {type(module.multiply) for module in model.modules() if isinstance(module, Linear | Experts | Output)}


def test_every_module_with_the_seam_gets_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECIPES, "other", Other)
    model = stage(deepseek(ahead=1))
    assert _recipes(model) == {Multiply}
    apply_precision(model, "other")
    assert _recipes(model) == {Other}
    apply_precision(model, "plain")
    assert _recipes(model) == {Multiply}


def test_the_seam_adds_nothing_to_a_checkpoint() -> None:
    assert not any("multiply" in name for name in stage(deepseek()).state_dict())


def test_an_unknown_recipe_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'plian'; use one of: plain"):
        apply_precision(nn.Module(), "plian")


def shares_of(rank: int, spec: RunSpec) -> dict[str, dict[str, float]]:
    """The largest rank with which this one shares a maximum, by layer and dim."""
    trainer = trainer_of(spec)
    modules = [module for runner in trainer.stages.values() for module in runner.modules()]
    recipes = [recipe for module in modules if isinstance(recipe := getattr(module, "multiply", None), Narrow)]
    here = torch.tensor([float(rank)])
    return {
        recipe.layer.removeprefix("blocks.1."): {dim: float(share(here.clone())) for dim, share in sorted(recipe.shares.items())}
        for recipe in recipes
        if recipe.layer.startswith("blocks.1.")
    }


def test_exactly_the_ranks_that_cut_a_tensor_share_its_maximum() -> None:
    """Tensor ranks are neighbours, then context ranks, then data ranks, which share nothing."""
    plan = {"data": 2, "context": 2, "tensor": 2}
    spec = tiny_run(plan=plan, train={"precision": "fp8"}, precision={"granularity": "tensor"})
    for rank, found in enumerate(run_ranks(shares_of, 8, spec)):
        tokens, channels = rank | 2, rank | 1
        assert found["attention.q"] == found["mlp.up"] == {"outputs": channels, "tokens": tokens}
        assert found["attention.out"] == found["mlp.down"] == {"inputs": channels, "tokens": tokens}


Drawn = dict[int, set[tuple[int, int]]]
"""For each key, the tokens and outputs that were drawn for."""


def drawn(rank: int, spec: RunSpec) -> Drawn:
    """Everything that this rank draws for in one step."""
    trainer, found, uniform = trainer_of(spec), defaultdict[int, set[tuple[int, int]]](set), narrow.uniform

    def noted(key: int, rows: torch.Tensor, columns: range) -> torch.Tensor:
        found[key] |= {(row, column) for row in rows.flatten().tolist() for column in columns}
        return uniform(key, rows, columns)

    with mock.patch.object(narrow, "uniform", noted):
        accumulate(trainer, microbatches(trainer))
    return dict(found)


@pytest.mark.parametrize(
    ("preset", "plan"),
    [
        ("tiny", {"tensor": 2, "context": 2}),
        ("deepseek-tiny", {"data": 2, "tensor": 2, "expert": 2}),
        ("deepseek-tiny", {"tensor": 2, "sequence": False, "expert": 2}),
    ],
    ids=str,
)
def test_ranks_draw_together_for_exactly_the_numbers_of_one_process(preset: str, plan: dict[str, Any]) -> None:
    """The same keys, tokens of the same samples, the same outputs: also where tokens went to the experts of other ranks."""
    run = tiny_run(plan=plan, model={"preset": preset}, train={"global_batch": 4, "precision": "nvfp4"})
    spec = shrink(run, steps=1)
    alone = spec.model_copy(update={"plan": spec.plan.model_copy(update=dict.fromkeys(plan, 1) | {"sequence": True})})
    (expected,) = run_ranks(drawn, 1, alone)
    found: Drawn = defaultdict(set)
    for one in run_ranks(drawn, spec.plan.ranks, spec):
        for key, places in one.items():
            found[key] |= places
    assert len(expected) >= 12 and found == expected


def recorded(rank: int, spec: RunSpec) -> Recording:
    return record(trainer_of(spec))


def test_where_no_sum_is_reordered_draws_are_the_same_bits() -> None:
    """In a pipeline whose blocks run again before their backward, whose weight gradients are put off, and whose weights are sharded."""
    plan = {"pipeline": 2, "schedule": "zb-h1", "recompute": "full"}
    spec = shrink(tiny_run(plan=plan, train={"global_batch": 4, "precision": "nvfp4"}), steps=1)
    found, alone = run_ranks(recorded, 2, spec)[0], reference(spec, device=CPU)
    assert found.gradients[0].keys() == alone.gradients[0].keys()
    narrowed = [name for name in found.gradients[0] if name.startswith("blocks.1.mlp")]
    assert narrowed and all(torch.equal(found.gradients[0][name], alone.gradients[0][name]) for name in narrowed)


@pytest.mark.parametrize(("schedule", "alike"), [("wsd", True), ("constant", False)])
def test_products_are_wide_while_the_rate_decays_if_a_run_chooses_so(schedule: str, alike: bool) -> None:
    """Every update of this one is in the decay: it is a run in bf16."""
    tables = {"optimizer": {"schedule": schedule, "decay": 1.0}, "plan": {}}
    narrow, wide = (
        tiny_run(train={"global_batch": 4, "precision": name, "steps": 2}, precision={"wide_decay": name != "bf16"}, **tables)
        for name in ("nvfp4", "bf16")
    )
    found, expected = (run_ranks(recorded, 1, spec)[0] for spec in (narrow, wide))
    assert (found.losses == expected.losses) == alike
    assert all(torch.equal(found.weights[name], expected.weights[name]) for name in expected.weights) == alike
