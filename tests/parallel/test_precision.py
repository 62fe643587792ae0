"""Recipes for products, put into the modules of a part."""

from typing import Any

import pytest
from torch import nn

from megalith.kernels.multiply import Multiply
from megalith.models.head import Output
from megalith.models.linear import Linear
from megalith.models.moe import Experts
from megalith.parallel.precision import RECIPES, apply_precision
from tests.models.deepseek import deepseek
from tests.models.plain import stage


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
