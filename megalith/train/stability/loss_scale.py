"""Dynamic loss scaling for fp16 (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2): the scale as a value, and its changes.

Gradients of a loss are multiplied by a power of two before they become fp16, which holds nothing below 6e-8, and divided by it once they
are added up in fp32. Both are exact. The scale doubles after a run of good updates, and is halved when gradients overflow.
"""

from dataclasses import dataclass
from typing import NamedTuple

from megalith.spec.run import LossScaleSpec

LARGEST = 64
"""The largest exponent of the scale, reached for example if all gradients are zero: fp32 must hold the scale times any
gradient."""


class Scale(NamedTuple):
    """A loss scale and its counters. All are whole numbers, which a checkpoint holds as fp32 exactly."""

    exponent: int
    """The scale is two to this power."""
    good: int = 0
    """Updates since the scale last changed, or gradients last overflowed."""
    spent: int = 0
    """Overflows since the scale last grew."""
    overflows: int = 0
    """Updates of the whole run that were skipped because gradients overflowed."""

    @classmethod
    def first(cls, spec: LossScaleSpec) -> "Scale":
        """Return the scale that a run begins with."""
        return cls(exponent_of(spec.initial))

    @property
    def value(self) -> float:
        """Factor of the gradients."""
        return 2.0**self.exponent

    def updated(self, spec: LossScaleSpec) -> "Scale":
        """Return the scale after an update was made: doubled after `growth_interval` of them in a row."""
        if self.good + 1 < spec.growth_interval:
            return self._replace(good=self.good + 1)
        return Scale(min(self.exponent + 1, LARGEST), overflows=self.overflows)

    def overflowed(self, spec: LossScaleSpec) -> "Scale | None":
        """Return the scale after gradients overflowed: the first `hysteresis` - 1 overflows since it grew leave it as it is, each further
        one halves it (Megatron-LM's DynamicGradScaler). None: it is at its floor."""
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
    """Gradients that overflowed in fp16. `tensor` is the first parameter in the order of backward whose gradient holds NaN or Inf, over
    all microbatches and ranks; empty: none does, and only their norm overflowed."""

    tensor: str
    scale_before: float
    scale_after: float

    @property
    def part(self) -> str:
        """The part of the model that the tensor belongs to: `embedding`, `blocks.N` or `head`."""
        first, _, rest = self.tensor.partition(".")
        return f"{first}.{rest.partition('.')[0]}" if first == "blocks" else first
