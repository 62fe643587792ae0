"""The optimizers, one row each: the tensors that each keeps for a parameter, the dependencies of an update, and the rule. No
torch."""

from typing import Literal, NamedTuple, NoReturn

from megalith import own
from megalith.spec.base import AbsentError
from megalith.spec.numbers import NUMBERS
from megalith.spec.state import GRADIENT, MASTER, WIDE, Moments, Slot, bytes_each

Unit = Literal["element", "tensor", "matrix"]
"""Data that the update of one element depends on: the element alone, a norm of its tensor, or its whole matrix."""


class Kind(NamedTuple):
    """One optimizer, a row of OPTIMIZERS."""

    title: str
    rule: str
    """`module:Class` of the rule that updates weights (`train.optimizers.rule.Rule`); imported by the ranks that train."""
    slots: tuple[Slot, ...]
    """Tensors that the optimizer keeps for each parameter between two updates."""
    unit: Unit = "element"
    passes: float = 1.0
    """Number of times that an update reads and writes the weights and slots."""
    rest: str | None = None
    """The optimizer of parameters that are not true matrices (`spec.treatment.is_matrix`); None: this row's rule updates
    every parameter."""
    width: float | None = None
    """The learning rate of hidden matrices scales as the width to this power (`spec.families.parametrization`); None: no rule."""
    amplifies: bool = False
    """True if rounding in a gradient can change an update by as much as the update itself. Two runs that only differ in the
    order of sums then agree in their loss, but not in each weight."""

    @property
    def moved(self) -> float:
        """Bytes of memory that an update reads and writes for each parameter: see `moved_with`."""
        return self.moved_with(WIDE)

    def moved_with(self, moments: Moments) -> float:
        """Return `moved` for moments in another number format. An update reads the gradient; it reads and writes the other
        tensors."""
        return self.passes * (bytes_each([GRADIENT]) + 2 * bytes_each([MASTER, *moments.of(self.slots)]))


class _Rows(dict[str, Kind]):
    """The rows by name. A user's own row is present once `admit` has imported it."""

    def __missing__(self, name: str) -> NoReturn:
        if own.is_own(name):
            raise AbsentError(f"optimizer {name} is not imported: only a command that is given the run imports it")
        raise KeyError(name)


OPTIMIZERS: dict[str, Kind] = _Rows(
    {
        "adamw": Kind(
            title="AdamW (Loshchilov & Hutter 2019): two moments",
            rule="megalith.train.optimizers.adamw:AdamW",
            slots=(Slot("moments.first"), Slot("moments.second", root=True)),
            width=-1.0,
        ),
        "sgd": Kind(
            title="SGD with momentum (Sutskever et al. 2013), Nesterov's or plain: one moment",
            rule="megalith.train.optimizers.sgd:SGD",
            slots=(Slot("moments.first"),),
        ),
        "lion": Kind(
            title="Lion (Chen et al. 2023): the sign of a moment",
            rule="megalith.train.optimizers.lion:Lion",
            slots=(Slot("moments.first"),),
            width=-1.0,
            amplifies=True,
        ),
        "lamb": Kind(
            title="LAMB (You et al. 2020): Adam's direction, scaled to the norm of the matrix",
            rule="megalith.train.optimizers.lamb:Lamb",
            slots=(Slot("moments.first"), Slot("moments.second", root=True)),
            unit="tensor",
            passes=2.0,
        ),
        "adafactor": Kind(
            title="Adafactor (Shazeer & Stern 2018): second moments of rows and columns",
            rule="megalith.train.optimizers.adafactor:Adafactor",
            slots=(Slot("moments.row", shape="row"), Slot("moments.column", shape="column")),
            unit="tensor",
            passes=3.0,
            width=-1.0,
        ),
        "muon": Kind(
            title="Muon (Jordan 2024, Liu et al. 2025): a moment of each matrix, orthogonalised",
            rule="megalith.train.optimizers.muon:Muon",
            slots=(Slot("moments.first"),),
            unit="matrix",
            rest="adamw",
            width=-0.5,  # its singular values are all equal, Adam's are mostly small: a row's sum grows more slowly
        ),
    }
)
"""Optimizers by the name that `optimizer.kind` gives them."""


def admit(name: str) -> None:
    """Import a user's own row, `module:object`, into OPTIMIZERS. Raises own.OwnPartError if the object is not a valid row."""
    row = own.load(name)
    if not isinstance(row, Kind):
        raise own.OwnPartError(f"it is a {type(row).__name__}, and an optimizer is a megalith.spec.optimizers.Kind")
    faults = [
        f"its slot {slot.name} has the unknown number format {slot.number}" for slot in row.slots if slot.number not in NUMBERS
    ]
    taken = {"weights", "gradients", "compute", "buffers", "lower", "upper"}
    faults += [f"its slot {slot.name} has a name that is taken" for slot in row.slots if slot.name in taken]
    names = [slot.name for slot in row.slots]
    faults += [f"two of its slots are called {one}" for one in dict.fromkeys(names) if names.count(one) > 1]
    faults += [
        f"its slot {slot.name} has the category {slot.category}, but must have the category optimizer"
        for slot in row.slots
        if slot.category != "optimizer"
    ]
    if not own.is_own(row.rule):
        faults.append(f"its rule {row.rule!r} is not a module:Class")
    if row.rest is not None and row.rest not in OPTIMIZERS:
        faults.append(f"its rest = {row.rest!r}, the optimizer of all other parameters, is not the name of an optimizer")
    if faults:
        raise own.OwnPartError("; ".join(faults))
    OPTIMIZERS[name] = row
