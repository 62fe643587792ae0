"""Dynamic loss scaling for fp16 (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2): the scale as a value, and its changes.

Gradients are multiplied by a power of two before they become fp16, which has no smaller number than 6e-8, and divided by it once they
are summed in fp32. Both are exact. The scale doubles after several good updates in a row, and is halved when gradients overflow.
"""

from dataclasses import dataclass
from typing import NamedTuple

from megalith.spec.run import LossScaleSpec

LARGEST = 64
"""The largest exponent of the scale: fp32 must hold the scale times any gradient. It is reached, for example, if all gradients are
zero."""


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
        """Return the scale that a run begins with."""
        return cls(exponent_of(spec.initial))

    @property
    def value(self) -> float:
        """Factor of the gradients."""
        return 2.0**self.exponent

    def updated(self, spec: LossScaleSpec) -> "Scale":
        """Return the scale after an update was made: doubled after `growth_interval` updates in a row."""
        if self.good + 1 < spec.growth_interval:
            return self._replace(good=self.good + 1)
        return Scale(min(self.exponent + 1, LARGEST), overflows=self.overflows)

    def overflowed(self, spec: LossScaleSpec) -> "Scale | None":
        """Return the scale after gradients overflowed. The first `hysteresis` - 1 overflows since the scale last grew do not change it;
        each further one halves it (Megatron-LM's DynamicGradScaler). None: the scale is at its floor."""
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
    all microbatches and ranks; empty if no gradient does, and only the norm overflowed."""

    tensor: str
    scale_before: float
    scale_after: float

    @property
    def part(self) -> str:
        """The part of the model that the tensor belongs to: `embedding`, `blocks.N` or `head`."""
        first, _, rest = self.tensor.partition(".")
        return f"{first}.{rest.partition('.')[0]}" if first == "blocks" else first
