"""Recipes for matrix products with a weight, by name, and how a part gets one."""

from collections.abc import Mapping

from torch import nn

from megalith.kernels.multiply import Multiply
from megalith.kernels.narrow import Blockwise, Microscaled
from megalith.spec.numbers import PrecisionSpec, stays_wide

WIDE = "plain"
RECIPES: dict[str, type[Multiply]] = {WIDE: Multiply, "blockwise": Blockwise, "microscaled": Microscaled}


def apply_precision(
    part: nn.Module, recipe: str, *, name: str = "", blocks: int = 0, choices: PrecisionSpec | None = None
) -> None:
    """Give every module of a newly built part that multiplies by a weight the recipe of this name; where it narrows, layers that stay wide
    get the plain one. `name` is the part's in a model of `blocks` blocks.

    Raises ValueError for a name that no recipe has.
    """
    if recipe not in RECIPES:
        raise ValueError(f"no recipe for products is called {recipe!r}; use one of: {', '.join(RECIPES)}")
    choices = choices or PrecisionSpec()
    for path, module in list(part.named_modules()):
        if isinstance(getattr(module, "multiply", None), Multiply):
            wide = recipe in _NARROW and stays_wide(f"{name}.{path}", blocks=blocks, choices=choices)
            module.multiply = RECIPES[WIDE if wide else recipe].of(choices)


_NARROW: Mapping[str, type[Multiply]] = {name: row for name, row in RECIPES.items() if issubclass(row, Blockwise)}
