"""Interfaces of the objects that a step calls: its watchers, the referee of numbers that are not finite, the healer of spikes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from megalith.events import Event
from megalith.parallel import gradients
from megalith.train.assemble import Trainer
from megalith.train.decide import Decision
from megalith.train.stability.findings import Findings, Reason
from megalith.train.tally import StepTotals

HookPoint = Literal["before_step", "reduced", "before_update", "updated", "skipped", "resting"]


class StepHook(Protocol):
    """Observes the moments of each step. Its exceptions end the step. A subclass overrides only the moments that it needs. A step
    whose update is made again, because its norm was known late, has its last three moments twice."""

    def before_step(self, trainer: Trainer, step: int) -> None:
        """Called before the step's data is read."""

    def reduced(self, trainer: Trainer, step: int, nll: torch.Tensor) -> None:
        """Called when this rank's gradients are complete and not yet clipped. `nll`: its part of the step's loss."""

    def before_update(self, trainer: Trainer, step: int) -> None:
        """Called before the optimizer uses the gradients."""

    def updated(self, trainer: Trainer, step: int) -> None:
        """Called when the state is that after the step."""

    def skipped(self, trainer: Trainer, step: int) -> None:
        """Called when the step's update was skipped or undone: the state is that before the step."""

    def resting(self, trainer: Trainer, step: int) -> None:
        """Called when the state does not change until the next update."""


def notify(watchers: Sequence[StepHook], moment: HookPoint, trainer: Trainer, step: int, *more: torch.Tensor) -> None:
    """Call the watchers for a moment, in order. `more`: what the moment tells besides."""
    for watcher in watchers:
        getattr(watcher, moment)(trainer, step, *more)


@dataclass(frozen=True)
class FirstComputation:
    """The reason for recomputing a step, and the numbers that all ranks had the first time."""

    reason: Reason
    totals: StepTotals

    @property
    def words(self) -> str:
        return f"loss {self.totals.loss:.6g} and norm {self.totals.norm:.6g} at first"


class Healer(Protocol):
    """Finds the causes of spikes and undoes their effects, on all ranks together (`train.stability.healer.Healer`)."""

    def note(self, step: int, totals: StepTotals, decision: Decision, *, lr: float) -> None:
        """Record a step's decision before it is carried out, with this learning rate."""
        ...

    def look(self, before: FirstComputation, step: int) -> Findings:
        """Drop the step's gradients and counts, examine the spike, and restore the state so that the step can be recomputed."""
        ...

    def causes(self, step: int, findings: Findings) -> Findings:
        """Return the findings with the likely causes added."""
        ...

    def target(self, at_most: int) -> Any:
        """Return the newest good copy of step `at_most` or an earlier one; None if there is none."""
        ...

    def rewind(self, target: Any, step: int, findings: Findings, *, late: bool) -> tuple[list[Event], Findings]:
        """Restore the copy `target`, in step `step`; return the events to log. `late`: the step's microbatches have begun, so
        nothing else can be computed."""
        ...


class Referee(Protocol):
    """Responds to numbers that are not finite, on all ranks together (`train.guard.StateGuard`)."""

    def rerun(self, step: int) -> None:
        """Report the numbers that are not finite, and restore the state from before the step, so that it can be recomputed."""
        ...

    def blame(self, error: gradients.NotFinite, step: int) -> None:
        """Report the rank with numbers that are not finite for the second time. Raises Reported if there is a supervisor."""
        ...
