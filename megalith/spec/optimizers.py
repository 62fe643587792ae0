"""Table of the optimizers: the tensors that each one keeps for a parameter, the data that an update depends on, and the update
rule. No torch."""

from typing import Literal, NamedTuple, NoReturn

from megalith import own
from megalith.spec.base import AbsentError
from megalith.spec.numbers import NUMBERS
from megalith.spec.state import GRADIENT, MASTER, WIDE, Moments, Slot, bytes_each

Unit = Literal["element", "tensor", "matrix"]
"""Data on which the update of one element depends: the element alone, a norm of its tensor, or its whole matrix."""


class Kind(NamedTuple):
    """One optimizer, a row of OPTIMIZERS."""

    title: str
    rule: str
    """`module:Class` of the rule that updates weights (`train.optimizers.rule.Rule`); only ranks that train import it."""
    slots: tuple[Slot, ...]
    """Tensors that the optimizer keeps for each parameter between two updates."""
    unit: Unit = "element"
    passes: float = 1.0
    """Number of times that an update reads and writes each weight and slot."""
    rest: str | None = None
    """Name of the optimizer for parameters that are not matrices (`spec.treatment.is_matrix`); None: this optimizer updates every
    parameter."""
    width: float | None = None
    """Under mup and completep, the learning rate of hidden matrices is proportional to the model's width to this power
    (`spec.families.parametrization`); None: no power is known."""
    amplifies: bool = False
    """True if a rounding error in a gradient can change an update by as much as the update itself. With such an optimizer, two
    runs that differ only in the order of sums agree in their loss, but not in each weight."""

    @property
    def moved(self) -> float:
        """Bytes that an update reads and writes per parameter, with moments in fp32 (see `moved_with`)."""
        return self.moved_with(WIDE)

    def moved_with(self, moments: Moments) -> float:
        """Return the bytes that an update reads and writes per parameter. An update reads the gradient, and it reads and writes
        the master weight and the moments."""
        return self.passes * (bytes_each([GRADIENT]) + 2 * bytes_each([MASTER, *moments.of(self.slots)]))


class _Rows(dict[str, Kind]):
    """Rows of OPTIMIZERS by name. The row of a user's own optimizer is present once `admit` has imported it."""

    def __missing__(self, name: str) -> NoReturn:
        if own.is_own(name):
            raise AbsentError(
                f"optimizer {name} is not imported: only commands that are given a run file or run folder import the run's own code"
            )
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
    """Import a user's own optimizer, `module:object`, into OPTIMIZERS. Raises own.OwnPartError if the object is not a valid
    Kind."""
    row = own.load(name)
    if not isinstance(row, Kind):
        raise own.OwnPartError(f"the object is a {type(row).__name__}, but an optimizer must be a megalith.spec.optimizers.Kind")
    faults = [f"slot {slot.name} has the unknown number format {slot.number}" for slot in row.slots if slot.number not in NUMBERS]
    taken = {"weights", "gradients", "compute", "buffers", "lower", "upper"}
    faults += [f"slot {slot.name} has the name of one of Megalith's own tensors" for slot in row.slots if slot.name in taken]
    names = [slot.name for slot in row.slots]
    faults += [f"two slots are called {one}" for one in dict.fromkeys(names) if names.count(one) > 1]
    faults += [
        f"slot {slot.name} has the category {slot.category}, but must have the category optimizer"
        for slot in row.slots
        if slot.category != "optimizer"
    ]
    if not own.is_own(row.rule):
        faults.append(f"rule = {row.rule!r} is not a module:Class")
    if row.rest is not None and row.rest not in OPTIMIZERS:
        faults.append(f"rest = {row.rest!r}, the optimizer of parameters that are not matrices, is not the name of an optimizer")
    if faults:
        raise own.OwnPartError("; ".join(faults))
    OPTIMIZERS[name] = row
