"""A user's own attention, MLP or norm as a row: its module, and a declaration of each of its parameters. No torch."""

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
"""How tensor ranks cut a parameter: along its first dimension, or along its second one."""
First = Literal["normal", "residual", "ones", "zeros"]
"""Initial values. "normal": N(0, init_std²); "residual": the same divided by sqrt(2 layers), for a matrix that writes to the
residual stream."""


def _part_name(name: str) -> str:
    if not own.is_own(name):
        raise PydanticCustomError("own_part", "an own part has the name MODULE:OBJECT")
    return name


OwnPart = Annotated[str, AfterValidator(_part_name)]
"""Name of a user's own part, `module:object`."""


class Tensor(NamedTuple):
    """A declared parameter of an own part."""

    name: str
    """Its name in the module, such as `up.weight`."""
    shape: tuple[int, ...]
    """Its whole shape; [outputs, inputs] for a matrix."""
    cut: Cut | None = None
    """How tensor ranks cut it. None: every tensor rank holds the whole parameter."""
    first: First = "normal"
    heads: int = 1
    """The number of heads that the rows of a matrix belong to; a cut along the outputs never divides a head."""

    @property
    def role(self) -> Literal["matrix", "vector"]:
        """How the parameter acts on tokens (`spec.sizes.Role`)."""
        return "vector" if len(self.shape) == 1 else "matrix"

    @property
    def units(self) -> int:
        """The number of units that tensor ranks share evenly; 0 if they do not cut the parameter."""
        if self.cut is None:
            return 0
        return self.heads if self.cut == "outputs" and self.heads > 1 else self.shape[self.cut == "inputs"]


class ModelPart(NamedTuple):
    """Declaration of a user's own part in every block of the model: the object that `model.attention`, `model.mlp` or
    `model.norm` names.

    `module` is called as Megalith's own part is: `module(dim, spec, rope_slot)` for an attention, `module(dim, spec)` for an MLP
    or a norm, where `spec` describes the part (`spec.model.AttentionSpec`, `MlpSpec`, `NormSpec`). Its forward takes and returns
    x [batch, seq, dim]; an attention or an MLP also takes a `models.batch.Batch`. Sizes follow from `dim` and `spec`, so that
    parity can build a small part. The part's only state is its parameters: it has no buffers, no state from step to step and no
    random numbers. Each tensor rank gets the whole sequence and its share of the cut parameters, and Megalith adds up the ranks'
    results. If nothing is cut, an MLP or norm works on each rank's part of the sequence, and every rank computes the whole
    attention. Pipeline ranks hold whole blocks. A context rank gets its part of the sequence, and generation passes one token at
    a time: take positions from `batch.positions` or `batch.rotary`, and never derive them from x.
    """

    kind: PartKind
    module: str
    """`module:Class`, from the package of the row; imported by the ranks that train."""
    tensors: Callable[[int, Any], Iterable[Tensor]]
    """Function of `dim` and `spec` that returns every parameter, in the order of the module, without torch."""
    core: bool = False
    """For an attention: True if tokens see each other only through `self.core`, a `models.core.CausalCore` (not a subclass).
    Context parallelism requires this."""


class _Rows(dict[str, ModelPart]):
    """The rows by name. A row is present once `admit` has imported it."""

    def __missing__(self, name: str) -> NoReturn:
        raise AbsentError(f"the model part {name} is not imported: only a command that is given the run imports it")


PARTS: dict[str, ModelPart] = _Rows()


def admit(name: str, kind: str | None = None) -> None:
    """Import a row into PARTS. Raises own.OwnPartError if the object is not a valid row of this kind (None: any kind)."""
    row = own.load(name)
    if not isinstance(row, ModelPart):
        raise own.OwnPartError(f"it is a {type(row).__name__}, but a part of a model is a megalith.spec.parts.ModelPart")
    faults = []
    if kind is not None and row.kind != kind:
        faults.append(f"its kind is {row.kind!r}, but must be {kind!r}")
    if not own.is_own(row.module):
        faults.append(f"its module {row.module!r} is not a module:Class")
    elif _package(row.module) != _package(name):
        faults.append(
            f"its module {row.module} is outside of the package {_package(name)}: the run only records a digest of that package's source"
        )
    if row.core and row.kind != "attention":
        faults.append("its core is True, but only an attention has a core")
    if faults:
        raise own.OwnPartError("; ".join(faults))
    PARTS[name] = row


def declared(name: str, dim: int, spec: Any) -> tuple[Tensor, ...]:
    """Return the parameters that an own part declares.

    Raises own.OwnPartError for a faulty declaration, AbsentError for a part that is not imported."""
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
    """Return the own parts that a family's sizes name, each under its key in the run file."""
    named = {f"model.{kind}": getattr(model, kind, None) for kind in get_args(PartKind)}
    return {key: name for key, name in named.items() if isinstance(name, str)}


def need(model: Any) -> None:
    """Raise own.OwnPartError unless every own part that a family's sizes name was imported. A checkpoint names parts, but
    never imports them."""
    if missing := [name for name in named_by(model).values() if name not in PARTS]:
        raise own.OwnPartError(
            f"the checkpoint names the model's own parts {', '.join(missing)}, and a name in a checkpoint imports nothing. "
            f"Name each: {' '.join(f'--own {name}' for name in missing)}, or own={missing} in Python"
        )


def named_in(values: Any) -> Iterator[str]:
    """Yield the own parts that the values of a model's part name, at any depth."""
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
        yield f"{tensor.name} is cut, but a norm needs all channels"
    if tensor.heads < 1 or tensor.shape[0] % tensor.heads:
        yield f"{tensor.name} has {tensor.heads} heads, which do not divide its {tensor.shape[0]} rows"
