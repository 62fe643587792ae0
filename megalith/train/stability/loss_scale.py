"""Dynamic loss scaling for fp16 (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2): the loss scale and the rules by which it
changes.

Gradients are multiplied by the scale, a power of two, before they become fp16, whose smallest positive number is 6e-8, and are divided by
the scale once they are summed in fp32. The product and the quotient are exact. The scale is doubled after several good updates in a row,
and is halved when gradients overflow.
"""

from dataclasses import dataclass
from typing import NamedTuple

from megalith.spec.run import LossScaleSpec

LARGEST = 64
"""The largest exponent of the scale, so that fp32 can hold the scale times any gradient. The scale grows to this limit if, for example, all
gradients are zero."""


class Scale(NamedTuple):
    """A loss scale and its counters. All are integers that fp32 represents exactly in a checkpoint."""

    exponent: int
    """The loss scale is two to this power."""
    good: int = 0
    """Number of updates since the scale last changed or gradients last overflowed."""
    spent: int = 0
    """Number of overflows since the scale last grew."""
    overflows: int = 0
    """Number of updates in the whole run that were skipped because gradients overflowed."""

    @classmethod
    def first(cls, spec: LossScaleSpec) -> "Scale":
        """Return the scale with which a run begins."""
        return cls(exponent_of(spec.initial))

    @property
    def value(self) -> float:
        """The factor by which gradients are multiplied."""
        return 2.0**self.exponent

    def updated(self, spec: LossScaleSpec) -> "Scale":
        """Return the scale after an update was made; it is doubled after `growth_interval` updates in a row."""
        if self.good + 1 < spec.growth_interval:
            return self._replace(good=self.good + 1)
        return Scale(min(self.exponent + 1, LARGEST), overflows=self.overflows)

    def overflowed(self, spec: LossScaleSpec) -> "Scale | None":
        """Return the scale after gradients overflowed. The first `hysteresis` - 1 overflows since the scale last grew do not change the
        scale; each further overflow halves it, as in Megatron-LM's DynamicGradScaler. Return None if the scale must be halved but is at its
        minimum."""
        spent, floor = min(self.spent + 1, spec.hysteresis), exponent_of(spec.floor)
        if spent < spec.hysteresis:
            return Scale(self.exponent, spent=spent, overflows=self.overflows + 1)
        if self.exponent <= floor:
            return None
        return Scale(self.exponent - 1, spent=spent, overflows=self.overflows + 1)


def exponent_of(scale: int) -> int:
    """Return k for a scale of 2^k."""
    return scale.bit_length() - 1


@dataclass(frozen=True)
class Overflow:
    """An overflow of gradients in fp16. `tensor`: the first parameter, in the order of backward, whose gradient holds NaN or Inf on any
    rank; empty if only the norm overflowed."""

    tensor: str
    scale_before: float
    scale_after: float

    @property
    def part(self) -> str:
        """The part of the model to which `tensor` belongs: `embedding`, `blocks.N` or `head`."""
        first, _, rest = self.tensor.partition(".")
        return f"{first}.{rest.partition('.')[0]}" if first == "blocks" else first
