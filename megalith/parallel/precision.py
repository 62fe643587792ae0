"""Recipes for matrix products with a weight, by name, and how a part gets one."""

from torch import nn

from megalith.kernels.multiply import Multiply

RECIPES: dict[str, type[Multiply]] = {"plain": Multiply}


def apply_precision(part: nn.Module, recipe: str) -> None:
    """Let every module of a newly built part that multiplies by a weight do so by the recipe of this name.

    Raises ValueError for a name that no recipe has.
    """
    if recipe not in RECIPES:
        raise ValueError(f"no recipe for products is called {recipe!r}; use one of: {', '.join(RECIPES)}")
    for module in list(part.modules()):
        if isinstance(getattr(module, "multiply", None), Multiply):
            module.multiply = RECIPES[recipe]()
