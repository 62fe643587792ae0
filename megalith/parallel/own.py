"""A user's own part over tensor ranks, as its row declares it (`spec.parts`)."""

from functools import partial

from torch import Tensor, nn
from torch.distributed.tensor import Replicate

from megalith.models.linear import Linear
from megalith.models.own import Declared
from megalith.parallel.tensor import Split, boundary, row, share


def split_own(module: nn.Module, declared: Declared, split: Split) -> None:
    """Leave this rank's shares of the parameters that the row cuts, inside a boundary that adds up the outputs of the ranks. A
    parameter that is not cut is replicated. A norm, or an MLP without a cut, works on the activations between split modules. An
    attention without a cut is computed by every rank, and each contributes an equal share of the result."""
    if declared.kind == "norm" or (declared.kind == "mlp" and not declared.cuts):
        for name in declared.tensors:
            _replicate(module.get_parameter(name), split, partial=split.sequence)
        return
    for name, tensor in declared.tensors.items():
        path, _, child = name.rpartition(".")
        owner = module.get_submodule(path)
        if isinstance(owner, Linear) and declared.tensors[f"{path}.weight"].cut == "inputs":
            if child == "weight":  # its bias is added once, after the sum
                row(owner, split, module)
        elif tensor.cut is None:
            _replicate(owner.get_parameter(child), split, partial=True)
        else:
            share(owner, child, split, dim=("outputs", "inputs").index(tensor.cut))
    if not declared.cuts:
        module.register_forward_hook(partial(_portion, split.size))
    boundary(module, split, module)


def _portion(ranks: int, _: nn.Module, args: tuple[object, ...], out: Tensor) -> Tensor:
    """Forward hook: return the share that each of `ranks` ranks adds to the sum `out`."""
    return out / ranks


def _replicate(parameter: nn.Parameter, split: Split, *, partial: bool) -> None:
    split.placed[parameter] = Replicate()
    if partial:
        split.partial.add(parameter)
