"""The optimizers: which tensors each keeps for a parameter, what an update looks at, and where its rule is. One row each. No torch."""

from typing import Literal, NamedTuple

from megalith.spec.state import GRADIENT, MASTER, Slot, bytes_each

Unit = Literal["element", "tensor", "matrix"]
"""What one value of an update depends on: its own element alone, a norm of its whole tensor, or its whole matrix."""


class Kind(NamedTuple):
    """One optimizer, a row of OPTIMIZERS."""

    title: str
    rule: str
    """`module:Class` of the rule that updates weights (`train.optimizers.rule.Rule`); imported by the ranks that train."""
    slots: tuple[Slot, ...]
    """What it keeps for each parameter between two updates."""
    unit: Unit = "element"
    passes: float = 1.0
    """How often an update reads and writes what it changes."""

    @property
    def moved(self) -> float:
        """Bytes of memory that an update reads and writes for each parameter: it reads the gradient; it reads and writes the rest."""
        return self.passes * (bytes_each([GRADIENT]) + 2 * bytes_each([MASTER, *self.slots]))


OPTIMIZERS: dict[str, Kind] = {
    "adamw": Kind(
        title="AdamW (Loshchilov & Hutter 2019): two moments",
        rule="megalith.train.optimizers.adamw:AdamW",
        slots=(Slot("moments.first"), Slot("moments.second")),
    ),
}
"""Optimizers by the name that `optimizer.kind` gives them."""
