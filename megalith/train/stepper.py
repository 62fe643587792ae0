"""Trains step by step, and returns each step once it is verified."""

from collections.abc import Sequence

from megalith.data.stream import Batch as Samples
from megalith.train.assemble import Trainer
from megalith.train.step import train_step
from megalith.train.step_hooks import ALONE, Attendants
from megalith.train.tally import StepResult


class Stepper:
    """Trains step by step, and returns the result of each step at once."""

    def __init__(self, trainer: Trainer, attendants: Attendants = ALONE) -> None:
        self.trainer, self.attendants = trainer, attendants

    def step(self, microbatches: Sequence[Samples], *, step: int, stop: bool = False) -> list[StepResult]:
        """Train on this rank's microbatches of step `step` (see `train_step`); return the steps that are now verified."""
        return [train_step(self.trainer, microbatches, step=step, stop=stop, attendants=self.attendants)]

    @property
    def must_settle(self) -> bool:
        """True if the caller must call `settle` before the next step."""
        return False

    def settle(self) -> list[StepResult]:
        """Complete the newest update, and verify all remaining steps; return the steps that are now verified."""
        self.trainer.state.complete()
        return []
