"""Sets the recipe of each part for its matrix products with weights, and makes ranks that share a tensor agree on the tensor's scale."""

from collections.abc import Collection, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Shard

from megalith.kernels.kept import Packed
from megalith.kernels.multiply import Multiply
from megalith.kernels.narrow import INPUTS, OUTPUTS, TOKENS, Narrow
from megalith.kernels.quantise import Share
from megalith.kernels.recipes import Blockwise, Microscaled, Microscaled4, Mixed, NvFp4, Rowwise, Tensorwise
from megalith.models.linear import Linear
from megalith.models.moe import Experts
from megalith.parallel.groups import Groups
from megalith.spec.numbers import PRECISIONS, PRODUCTS, PrecisionSpec
from megalith.spec.sizes import is_packed, stays_wide

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
) -> dict[nn.Module, tuple[Narrow, ...]]:
    """Set the recipe for the products with a weight in a newly built part. If the recipe is a low-precision one, layers that stay in high
    precision get the plain recipe. `name`: the part's name in a model of `blocks` blocks. Returns the low-precision recipes by module; a
    module has several if its products have several formats.

    Raises ValueError if no recipe is called `recipe`.
    """
    if recipe not in RECIPES:
        raise ValueError(f"no recipe for matrix products is called {recipe!r}; use one of: {', '.join(RECIPES)}")
    choices, found = choices or PrecisionSpec(), dict[nn.Module, tuple[Narrow, ...]]()
    for path, module in list(part.named_modules()):
        if isinstance(getattr(module, "multiply", None), Multiply):
            wide = issubclass(RECIPES[recipe], Narrow) and stays_wide(f"{name}.{path}", blocks=blocks, choices=choices)
            wide |= recipe == "packed" and not is_packed(f"{name}.{path}", blocks=blocks, choices=choices)
            module.multiply = _made(WIDE if wide else recipe, choices)
            recipes = tuple(each for each in module.multiply.modules() if isinstance(each, Narrow))
            for each in recipes:
                each.layer = f"{name}.{path}"
                if choices.history and isinstance(module, Linear):
                    each.remember(choices.history, module.weight.device)
            found |= {module: recipes} if recipes else {}
    return found


def with_own_narrow(choices: PrecisionSpec, precision: str) -> PrecisionSpec:
    """Return the same choices, in which a product with the format of `precision` itself is "narrow"."""
    return choices.model_copy(update={product: "narrow" for product in PRODUCTS if getattr(choices, product) == precision})


def _made(recipe: str, choices: PrecisionSpec) -> Multiply:
    """Return a new recipe for a layer: the one of this name, or a mixed one if the run gives its products formats of their own."""
    own, asked = RECIPES[recipe].of(choices), {product: getattr(choices, product) for product in PRODUCTS}
    formats = {"narrow": own} | {
        name: RECIPES[PRECISIONS[name].products].of(choices) for name in set(asked.values()) & {*PRECISIONS}
    }
    if len(formats) == 1 or not isinstance(own, Narrow):
        return own
    return Mixed({product: made for product, name in asked.items() if isinstance(made := formats.get(name), Narrow)})


def matrices(module: nn.Module) -> list[nn.Parameter]:
    """Return the weights by which a module multiplies: its own parameters with more than one dim."""
    return [parameter for parameter in module.parameters(recurse=False) if parameter.dim() > 1]


def share_maxima(
    narrow: Mapping[nn.Module, Collection[Narrow]],
    placed: Mapping[nn.Parameter, Placement],
    partial: Collection[nn.Parameter],
    groups: Groups,
) -> None:
    """Set, in the recipe of each layer, which outputs or experts this rank has, and over which ranks the maximum of a tensor is taken: over
    tensor ranks for channels that they split, and over context ranks for tokens. `placed`: the placement of each weight on the tensor
    axis; `partial`: the weights of whose gradient each rank computes only one term."""
    for layer, recipe in ((layer, recipe) for layer, recipes in narrow.items() for recipe in recipes):
        if isinstance(layer, Experts):  # their tokens share no scale, and `check` keeps each whole
            recipe.first_expert = groups.mesh.expert_coordinates(groups.rank)["expert"] * len(layer.up)
        if not isinstance(layer, Linear) or not isinstance(layer.weight, nn.Parameter):
            continue
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
    return layer.rows.start if layer.rows is not None else groups.coordinates["tensor"] * layer.weight.shape[0]


def over(group: dist.ProcessGroup) -> Share:
    """Return the function that takes the maximum over a group's ranks. The function turns a NaN into an infinity, so that the scale is NaN
    on every rank."""

    def share(amax: Tensor) -> Tensor:
        amax = torch.nan_to_num(amax, nan=torch.inf, posinf=torch.inf)
        dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
        return amax

    return share
