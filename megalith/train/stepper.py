"""Trains step by step, and returns each step once it is verified."""

from collections.abc import Sequence

from megalith.data.stream import Batch as Samples
from megalith.train.assemble import Trainer
from megalith.train.step import train_step
from megalith.train.step_hooks import Healer, Referee, StepHook
from megalith.train.tally import StepResult


class Stepper:
    """Trains step by step, and returns the result of each step at once."""

    def __init__(
        self,
        trainer: Trainer,
        *,
        step_hooks: Sequence[StepHook] = (),
        referee: Referee | None = None,
        healer: Healer | None = None,
    ) -> None:
        """`referee`, one of the `step_hooks`, repeats a step whose gradients are not finite; `healer` responds to spikes."""
        self.trainer, self.step_hooks, self.referee, self.healer = trainer, step_hooks, referee, healer

    def step(self, microbatches: Sequence[Samples], *, step: int, stop: bool = False) -> list[StepResult]:
        """Train on this rank's microbatches of step `step` (see `train_step`); return the steps that are now verified."""
        how = {"step_hooks": self.step_hooks, "referee": self.referee, "healer": self.healer}
        return [train_step(self.trainer, microbatches, step=step, stop=stop, **how)]

    @property
    def must_settle(self) -> bool:
        """True if the caller must call `settle` before the next step."""
        return False

    def settle(self) -> list[StepResult]:
        """Complete the newest update, and verify all remaining steps; return the steps that are now verified."""
        self.trainer.state.complete()
        return []
