"""Declaration of a user's own attention, MLP or norm: its module, and each of its parameters. No torch."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, get_args

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from megalith import own
from megalith.spec.base import AbsentError

PartKind = Literal["attention", "mlp", "norm"]
"""Part of a block that a user's own module can replace."""
Cut = Literal["outputs", "inputs"]
"""How tensor ranks cut a parameter: "outputs" along its first dimension, "inputs" along its second one."""
First = Literal["normal", "residual", "ones", "zeros"]
"""Initial values. "normal" is N(0, init_std²). "residual" is "normal" divided by sqrt(2 layers), for a matrix whose output is
added to the residual stream."""


def _part_name(name: str) -> str:
    if not own.is_own(name):
        raise PydanticCustomError("own_part", "an own part has the name MODULE:OBJECT")
    return name


OwnPart = Annotated[str, AfterValidator(_part_name)]
"""Name of a user's own part, `module:object`."""


class Tensor(NamedTuple):
    """A declared parameter of an own part."""

    name: str
    """Name of the parameter in its module, such as `up.weight`."""
    shape: tuple[int, ...]
    """Shape of the whole parameter; [outputs, inputs] for a matrix."""
    cut: Cut | None = None
    """How tensor ranks cut the parameter; None: every tensor rank holds all of it."""
    first: First = "normal"
    heads: int = 1
    """The number of heads that the rows of a matrix belong to; a cut along the outputs never divides a head."""

    @property
    def role(self) -> Literal["matrix", "vector"]:
        """How the parameter acts on tokens (`spec.sizes.Role`)."""
        return "vector" if len(self.shape) == 1 else "matrix"

    @property
    def units(self) -> int:
        """The number of heads, rows or columns that are divided evenly among tensor ranks; 0 if the parameter is not cut."""
        if self.cut is None:
            return 0
        return self.heads if self.cut == "outputs" and self.heads > 1 else self.shape[self.cut == "inputs"]


class ModelPart(NamedTuple):
    """Declaration of a user's own part, which every block of the model has: the object that `model.attention`, `model.mlp` or
    `model.norm` names.

    `module` is called like the part that it replaces: `module(dim, spec, rope_slot)` for an attention, `module(dim, spec)` for an
    MLP or a norm, where `spec` describes the part (`spec.model.AttentionSpec`, `MlpSpec`, `NormSpec`). The module's forward takes
    and returns x [batch, seq, dim]; an attention or an MLP also takes a `models.batch.Batch`. All sizes must be computed from
    `dim` and `spec`, so that parity tests can build a small part. The part's only state is its parameters: it has no buffers, no
    state from step to step and no random numbers. Each tensor rank gets the whole sequence and its share of the cut parameters,
    and Megalith adds up the ranks' results. If no parameter is cut, an MLP or norm is applied to each tensor rank's part of the
    sequence, and every tensor rank computes the whole attention. Pipeline ranks hold whole blocks. Positions come from
    `batch.positions` or `batch.rotary`, never from x, because x is only a part of the sequence on a context rank, and one token
    in generation.
    """

    kind: PartKind
    module: str
    """`module:Class` in the package of this declaration; only ranks that train import it."""
    tensors: Callable[[int, Any], Iterable[Tensor]]
    """Function of `dim` and `spec` that returns every parameter, in the order of the module's parameters, without importing
    torch."""
    core: bool = False
    """For an attention: True if information flows between tokens only through `self.core`, a `models.core.CausalCore` (not a
    subclass). Context parallelism requires `core = True`."""


class _Rows(dict[str, ModelPart]):
    """Declarations by name. A declaration is present once `admit` has imported it."""

    def __missing__(self, name: str) -> NoReturn:
        raise AbsentError(
            f"the model part {name} is not imported: only commands that are given a run file or run folder import the run's own code"
        )


PARTS: dict[str, ModelPart] = _Rows()


def admit(name: str, kind: str | None = None) -> None:
    """Import a user's own part into PARTS. Raises own.OwnPartError if the object is not a valid ModelPart of this kind (None: any
    kind)."""
    row = own.load(name)
    if not isinstance(row, ModelPart):
        raise own.OwnPartError(
            f"the object is a {type(row).__name__}, but a part of a model must be a megalith.spec.parts.ModelPart"
        )
    faults = []
    if kind is not None and row.kind != kind:
        faults.append(f"the part's kind is {row.kind!r}, but must be {kind!r}")
    if not own.is_own(row.module):
        faults.append(f"module = {row.module!r} is not a module:Class")
    elif _package(row.module) != _package(name):
        faults.append(
            f"module = {row.module} is outside the package {_package(name)}, but the run only records a digest of that package's source"
        )
    if row.core and row.kind != "attention":
        faults.append("core = True, but only an attention has a core")
    if faults:
        raise own.OwnPartError("; ".join(faults))
    PARTS[name] = row


def declared(name: str, dim: int, spec: Any) -> tuple[Tensor, ...]:
    """Return the parameters that an own part declares.

    Raises own.OwnPartError for an invalid declaration, AbsentError for a part that was not imported."""
    row = PARTS[name]
    try:
        found = tuple(row.tensors(dim, spec))
        faults = [fault for each in found for fault in _faults(each, row.kind)]
    except Exception as error:  # the user's own function runs
        raise own.OwnPartError(f"tensors(dim={dim}, ...) of {name} fails: {type(error).__name__}: {error}") from error
    names = [each.name for each in found]
    faults += [f"{one} is listed more than once" for one in dict.fromkeys(names) if names.count(one) > 1]
    if faults:
        raise own.OwnPartError(f"tensors(dim={dim}, ...) of {name}: " + "; ".join(faults))
    return found


def named_by(model: Any) -> Mapping[str, str]:
    """Return the names of the user's own parts in a family's sizes, by their keys in the run file."""
    named = {f"model.{kind}": getattr(model, kind, None) for kind in get_args(PartKind)}
    return {key: name for key, name in named.items() if isinstance(name, str)}


def need(model: Any) -> None:
    """Raise own.OwnPartError unless all of the user's own parts in a checkpoint's model were imported. A part's name in a
    checkpoint does not make Megalith import it."""
    if missing := [name for name in named_by(model).values() if name not in PARTS]:
        raise own.OwnPartError(
            f"the checkpoint's model has the own parts {', '.join(missing)}, but Megalith does not import code only "
            f"because a checkpoint names it. To import these parts, add {' '.join(f'--own {name}' for name in missing)}, or "
            f"own={missing} in Python"
        )


def named_in(values: Any) -> Iterator[str]:
    """Yield the names of the user's own parts in the values of a model's part, at any depth."""
    for key, value in values.items() if isinstance(values, Mapping) else ():
        if key == "own" and isinstance(value, str):
            yield value
        yield from named_in(value)


def _package(name: str) -> str:
    return name.partition(":")[0].partition(".")[0]


def _faults(tensor: Tensor, kind: str) -> Iterable[str]:
    if not isinstance(tensor, Tensor):
        yield f"{tensor!r} is no megalith.spec.parts.Tensor"
        return
    if len(tensor.shape) not in (1, 2) or prod(tensor.shape) < 1:
        yield f"{tensor.name} has the shape {list(tensor.shape)}, but must have one or two dimensions"
        return
    if tensor.cut not in (None, *get_args(Cut)) or tensor.first not in get_args(First):
        yield f"{tensor.name} has an unknown cut = {tensor.cut!r} or first = {tensor.first!r}"
    elif tensor.cut == "inputs" and len(tensor.shape) != 2:
        yield f'{tensor.name} has cut = "inputs", but is not a matrix'
    elif tensor.cut and kind == "norm":
        yield f"{tensor.name} is cut, but every tensor rank needs all channels of a norm"
    if tensor.heads < 1 or tensor.shape[0] % tensor.heads:
        yield f"{tensor.name} has {tensor.heads} heads, which do not divide its {tensor.shape[0]} rows"
