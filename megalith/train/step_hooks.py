"""Interfaces of the objects that a step calls: its hooks; the referee, which handles numbers that are not finite; and the healer, which
handles spikes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from megalith.events import Event
from megalith.parallel import gradients
from megalith.train.assemble import Trainer
from megalith.train.decide import Decision, Vitals
from megalith.train.stability.findings import Findings, Reason
from megalith.train.tally import StepTotals

HookPoint = Literal["before_step", "after_reduction", "before_update", "after_update", "update_skipped", "after_step"]


class StepHook(Protocol):
    """Callbacks at fixed points of a training step. An exception aborts the step. A subclass overrides only the points that it needs. If a
    step's update is undone and made again, because the gradient norm was known late (post-validation), `before_update`, `after_update` and
    `after_step` are called twice."""

    def before_step(self, trainer: Trainer, step: int) -> None:
        """Called before the step's data is read."""

    def after_reduction(self, trainer: Trainer, step: int, nll: torch.Tensor) -> None:
        """Called when this rank's gradients are complete, before they are clipped. `nll`: this rank's part of the step's loss."""

    def before_update(self, trainer: Trainer, step: int) -> None:
        """Called before the optimizer uses the gradients."""

    def after_update(self, trainer: Trainer, step: int) -> None:
        """Called right after the update. State off the device may still be updated in a thread (`train.offload.ahead`); methods of `State`
        that give access to values wait for it."""

    def update_skipped(self, trainer: Trainer, step: int) -> None:
        """Called when the step's update was skipped or undone, so that the state is the same as before the step."""

    def after_step(self, trainer: Trainer, step: int) -> None:
        """Called when the state will not change until the next update."""


@dataclass(frozen=True)
class FirstComputation:
    """The reason for recomputing a step, and the totals of its first computation."""

    reason: Reason
    totals: StepTotals

    @property
    def words(self) -> str:
        return f"the first computation gave loss {self.totals.loss:.6g} and norm {self.totals.norm:.6g}"


class Healer(Protocol):
    """Finds the causes of spikes and undoes their effects, on all ranks together (`train.stability.healer.Healer`)."""

    def note(self, vitals: Vitals, totals: StepTotals, decision: Decision, *, lr: float) -> None:
        """Record the decision about a step before it is carried out, with the learning rate `lr`."""
        ...

    def examine(self, before: FirstComputation, step: int) -> Findings:
        """Drop the step's gradients and counts, examine the spike, and restore the state so that the step can be recomputed."""
        ...

    def causes(self, step: int, findings: Findings) -> Findings:
        """Return the findings with the likely causes added."""
        ...

    def target(self, at_most: int) -> Any:
        """Return the newest good copy of step `at_most` or an earlier one; None if there is none."""
        ...

    def rewind(self, target: Any, step: int, findings: Findings, *, late: bool) -> tuple[list[Event], Findings]:
        """In step `step`, restore the copy `target`; return the events to log, and the findings. `late`: microbatches of a step are in
        progress, so nothing can be recomputed."""
        ...


class Referee(Protocol):
    """Responds to numbers that are not finite, on all ranks together (`train.guard.StateGuard`)."""

    def rerun(self, step: int) -> None:
        """Report the numbers that are not finite, and restore the state from before the step, so that it can be recomputed."""
        ...

    def blame(self, error: gradients.NotFinite, step: int) -> None:
        """Report the rank whose numbers were not finite in both computations of a step. Raises Reported if there is a supervisor."""
        ...


@dataclass(frozen=True)
class Attendants:
    """The objects that a step calls."""

    hooks: Sequence[StepHook] = ()
    referee: Referee | None = None
    """One of the hooks, which repeats a step whose numbers are not finite."""
    healer: Healer | None = None
    """Responds to spikes."""

    def notify(self, point: HookPoint, trainer: Trainer, step: int, *more: torch.Tensor) -> None:
        """Call the method `point` of all hooks, in order. `more`: further arguments of the method."""
        for hook in self.hooks:
            getattr(hook, point)(trainer, step, *more)


ALONE = Attendants()
"""No attendants."""
