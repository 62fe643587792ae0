"""Recipes for products, put into the modules of a part."""

from typing import Any

import pytest
import torch
from torch import nn

from megalith.kernels.multiply import Multiply
from megalith.kernels.narrow import Narrow
from megalith.models.head import Output
from megalith.models.linear import Linear
from megalith.models.moe import Experts
from megalith.parallel.precision import RECIPES, apply_precision
from megalith.spec.run import RunSpec
from tests.models.deepseek import deepseek
from tests.models.plain import stage
from tests.parallel.running import trainer_of
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
