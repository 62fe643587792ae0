"""Builds the module of a part of a block that the user wrote, and checks it against the part's declaration."""

from typing import Any

from torch import nn

from megalith import own
from megalith.models.core import CausalCore
from megalith.spec.parts import PARTS, PartKind, Tensor, declared


class OwnModule:
    """The declaration of a user's own part, kept with the part's module."""

    def __init__(self, name: str, kind: PartKind, tensors: tuple[Tensor, ...]) -> None:
        self.name, self.kind = name, kind
        self.tensors = {each.name: each for each in tensors}

    @property
    def cuts(self) -> bool:
        """True if tensor parallelism splits any of the part's parameters."""
        return any(each.cut for each in self.tensors.values())


def own_part(name: str, dim: int, spec: Any, *more: Any) -> nn.Module:
    """Build a user's own part. The part's class is called with `dim`, `spec` and `more`, in this order.

    Raises own.OwnPartError if the class fails, if the module's parameters differ from the declared tensors, if the module has buffers, or
    if it lacks a declared core. Raises AbsentError if the part has not been imported."""
    row, tensors = PARTS[name], declared(name, dim, spec)
    make: Any = own.load(row.module)
    try:
        module = make(dim, spec, *more)
    except Exception as error:  # the user's own code runs
        raise own.OwnPartError(f"{row.module} cannot be made for dim = {dim}: {type(error).__name__}: {error}") from error
    if not isinstance(module, nn.Module):
        raise own.OwnPartError(f"{row.module} returns a {type(module).__name__}; return a torch.nn.Module")
    made = [(path, tuple(parameter.shape)) for path, parameter in module.named_parameters()]
    stated = [(each.name, each.shape) for each in tensors]
    if made != stated:
        odd = [
            f"{path} {list(shape)}" for path, shape in [*made, *stated] if ((path, shape) in made) != ((path, shape) in stated)
        ]
        raise own.OwnPartError(
            f"{row.module} and the tensors that {name} declares differ: {', '.join(odd) or 'in their order'}. Declare one tensor for each "
            "parameter of the module, in the module's order"
        )
    if buffers := [path for path, _ in module.named_buffers()]:
        raise own.OwnPartError(
            f"{row.module} has buffers ({', '.join(buffers)}), but checkpoints do not hold them. Compute them in forward"
        )
    core = getattr(module, "core", None)
    if row.core and not isinstance(core, CausalCore):
        raise own.OwnPartError(
            f"{name} says core = True, but {row.module} has no attribute core of class "
            "megalith.models.core.CausalCore: add it, or say core = False"
        )
    if row.core and type(core) is not CausalCore:
        raise own.OwnPartError(
            f"{name} says core = True, but the core of {row.module} is a {type(core).__name__}. Context parallelism and generation replace "
            "the core and would lose what this subclass computes. Say core = False"
        )
    module.declared = OwnModule(name, row.kind, tensors)  # pyright: ignore[reportArgumentType]  # no tensor, no module
    return module


def declaration(module: nn.Module) -> OwnModule | None:
    """Return the declaration of a user's own part; None for any other module."""
    found = vars(module).get("declared")
    return found if isinstance(found, OwnModule) else None


def mixes_in_core(attention: nn.Module) -> bool:
    """True if tokens see each other only through `attention.core`, so that another core may replace it, as in Megalith's own attention and
    in a user's own part that declares `core`."""
    found = declaration(attention)
    return found is None or PARTS[found.name].core
