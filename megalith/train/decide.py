"""What becomes of a step's update: one pure decision from numbers that all ranks have, so that all ranks decide alike.

The plain step and post-validation both ask `decide` and carry out what it says. Clipping is a factor; numbers that are not finite are
computed again, left out, or end the run.
"""

import math
from dataclasses import dataclass

from megalith.spec.run import OptimizerSpec, StabilitySpec

_TINY = 1e-6  # keeps the clipped norm below its limit in spite of rounding, as torch.nn.utils.clip_grad_norm_ does


@dataclass(frozen=True)
class Vitals:
    """What all ranks know of a step before its update."""

    loss: float
    norm: float
    """The global norm of the gradients."""
    skipped: int = 0
    """Updates that the run has left out so far."""
    tries: int = 0
    """How often this step was computed before, with numbers that were not finite."""
    repeatable: bool = False
    """Whether somebody can compute the step again from the state it began with."""

    @property
    def finite(self) -> bool:
        """True if loss and norm are."""
        return math.isfinite(self.norm) and math.isfinite(self.loss)


@dataclass(frozen=True)
class Update:
    """Multiply the gradients by `factor` and update."""

    factor: float = 1.0


@dataclass(frozen=True)
class Rerun:
    """Compute the step again: what was seen may have been an accident of the hardware."""


@dataclass(frozen=True)
class Skip:
    """Leave the update out. The step's samples are consumed; weights, moments, bias correction and learning rate stay where they are."""

    reason: str


@dataclass(frozen=True)
class Stop:
    """End the run; no weight has changed."""

    reason: str


Decision = Update | Rerun | Skip | Stop


def decide(vitals: Vitals, *, optimizer: OptimizerSpec, stability: StabilitySpec) -> Decision:
    """Return what becomes of the update."""
    if vitals.finite:
        clipped = 0 < optimizer.clip < vitals.norm
        return Update(optimizer.clip / (vitals.norm + _TINY) if clipped else 1.0)
    if vitals.repeatable and vitals.tries == 0:
        return Rerun()
    found = f"loss {vitals.loss}, gradient norm {vitals.norm}"
    if stability.not_finite == "stop":
        return Stop(found)
    if vitals.skipped >= stability.skips:
        return Stop(f"{found}, and stability.skips = {stability.skips} updates are left out already")
    return Skip(found)
