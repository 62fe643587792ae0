"""Recipes for matrix products with a weight, by name. Sets the recipe of a part, and makes ranks that share a tensor agree on its scale."""

from collections.abc import Collection, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Shard

from megalith.kernels.kept import Packed
from megalith.kernels.multiply import Multiply
from megalith.kernels.narrow import INPUTS, OUTPUTS, TOKENS, Narrow
from megalith.kernels.quantise import Share
from megalith.kernels.recipes import Blockwise, Microscaled, Microscaled4, NvFp4, Rowwise, Tensorwise
from megalith.models.linear import Linear
from megalith.parallel.groups import Groups
from megalith.spec.numbers import PrecisionSpec, is_packed, stays_wide

WIDE = "plain"
RECIPES: dict[str, type[Multiply]] = {
    WIDE: Multiply,
    "packed": Packed,
    "blockwise": Blockwise,
    "microscaled": Microscaled,
    "rowwise": Rowwise,
    "tensorwise": Tensorwise,
    "nvfp4": NvFp4,
    "microscaled4": Microscaled4,
}


def apply_precision(
    part: nn.Module, recipe: str, *, name: str = "", blocks: int = 0, choices: PrecisionSpec | None = None
) -> dict[nn.Module, Narrow]:
    """Set the recipe for the products with a weight in a newly built part. Under a narrow recipe, layers that stay wide get the plain
    recipe. `name`: the part's name in a model of `blocks` blocks. Returns the narrow recipes by module.

    Raises ValueError for a name that no recipe has.
    """
    if recipe not in RECIPES:
        raise ValueError(f"no recipe for products is called {recipe!r}; use one of: {', '.join(RECIPES)}")
    choices, found = choices or PrecisionSpec(), dict[nn.Module, Narrow]()
    for path, module in list(part.named_modules()):
        if isinstance(getattr(module, "multiply", None), Multiply):
            wide = issubclass(RECIPES[recipe], Narrow) and stays_wide(f"{name}.{path}", blocks=blocks, choices=choices)
            wide |= recipe == "packed" and not is_packed(f"{name}.{path}", blocks=blocks, choices=choices)
            module.multiply = made = RECIPES[WIDE if wide else recipe].of(choices)
            if isinstance(made, Narrow):
                made.layer = f"{name}.{path}"
                if choices.history and isinstance(module, Linear):
                    made.remember(choices.history, module.weight.device)
                found[module] = made
    return found


def matrices(module: nn.Module) -> list[nn.Parameter]:
    """Return the weights of a module that its recipe multiplies by."""
    return [parameter for parameter in module.parameters(recurse=False) if parameter.dim() > 1]


def share_maxima(
    narrow: Mapping[nn.Module, Narrow],
    placed: Mapping[nn.Parameter, Placement],
    partial: Collection[nn.Parameter],
    groups: Groups,
) -> None:
    """Set which outputs of a split layer this rank has, and make recipes take maxima over exactly the ranks that hold a part of a tensor:
    tensor ranks for the channels that the axis splits, context ranks for tokens. `placed`: how the tensor axis holds each weight;
    `partial`: the weights whose gradient on a rank is only a part of the sum."""
    for layer, recipe in narrow.items():
        if not isinstance(layer, Linear) or not isinstance(layer.weight, nn.Parameter):
            continue  # experts: their tokens share no scale, and `check` keeps each whole
        placement = placed.get(layer.weight)
        recipe.partial = layer.weight in partial
        if isinstance(placement, Shard) or layer.rows is not None:
            inputs = isinstance(placement, Shard) and placement.dim == 1
            recipe.shares[INPUTS if inputs else OUTPUTS] = over(groups.tensor)
            if not inputs:
                recipe.first_output = _first_output(layer, groups)
        if groups.mesh.context > 1:
            recipe.shares[TOKENS] = over(groups.context)


def _first_output(layer: Linear, groups: Groups) -> int:
    """Return the index of the first output of a layer that this tensor rank computes."""
    return layer.rows.start if layer.rows is not None else groups.coordinates["tensor"] * layer.weight.shape[0]


def over(group: dist.ProcessGroup) -> Share:
    """Return the maximum over a group's ranks. A NaN becomes an infinity, so that the scale is NaN on every rank."""

    def share(amax: Tensor) -> Tensor:
        amax = torch.nan_to_num(amax, nan=torch.inf, posinf=torch.inf)
        dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
        return amax

    return share
