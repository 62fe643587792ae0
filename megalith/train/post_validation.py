"""Post-validation: each rank updates first, validates the update later, and undoes it if needed. The next step begins before the norm of
this step's gradients is known (Qi et al. 2024, arXiv:2401.10241, section 4).

The norm, which decides whether gradients are clipped, is known only after every rank's last backward. If ranks waited for the norm between
two steps, a schedule that fills its bubble with the next step's forwards (ZB-H2) would gain nothing. Most steps neither clip nor diverge.
So each rank updates without clipping, runs the next step's forwards, and checks the norm before the next step's first backward. If the
update was wrong, the saved tensors are restored bit for bit, and the forwards run again, so results never differ from those of a
synchronous run.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megalith.data.stream import Batch as Samples
from megalith.models.batch import Batch
from megalith.train.assemble import Trainer
from megalith.train.decide import Decision, EarlyUpdates, Rerun, Rewind, Update
from megalith.train.stability.findings import Findings, lowered_event, spike_event
from megalith.train.step import (
    AllGatherTotals,
    accumulate,
    carry_out,
    clipped_update,
    decision_of,
    finish_step,
    remember,
    seed_step,
    train_step,
    vitals_of,
)
from megalith.train.step_hooks import ALONE, Attendants, FirstComputation
from megalith.train.stepper import Stepper
from megalith.train.tally import NO_OUTCOME, Balance, Mark, Outcome, StepGradients, StepResult, StepTotals, stepped


class Undone(Exception):  # noqa: N818  # it says what was done
    """An update was undone because the step's numbers are not finite or far outside the usual range. The step must be computed
    again."""

    def __init__(self, before: FirstComputation) -> None:
        super().__init__(before.reason)
        self.before = before


class Unchecked:
    """A step's update that was made before the totals over all ranks were known. Until the totals are known, this object keeps the
    gradients, and copies of the changed tensors."""

    totals: StepTotals  # once it is checked, as are
    decision: Decision
    balance: Balance
    outcome: Outcome = NO_OUTCOME

    def __init__(
        self,
        trainer: Trainer,
        accumulated: StepGradients,
        *,
        step: int,
        stop: bool = False,
        attendants: Attendants = ALONE,
    ) -> None:
        self.trainer, self.step, self.lr = trainer, step, trainer.lr
        self._attendants, self._healer = attendants, attendants.healer
        self._gathering = AllGatherTotals(trainer, accumulated.executed, stop=stop)
        self._before = [tensor.clone() for tensor in trainer.state.changed()]
        self._routers_before = [buffer.clone() for buffer in trainer.state.buffers.values()]
        self._scale_before = accumulated.scale
        self._usual_before = [norms.clone() for norms in trainer.state.usual.values()]
        trainer.clip(1.0, number=trainer.state.updates)
        attendants.notify("before_update", trainer, step)
        trainer.update()
        self.updates = trainer.state.updates  # the next step is under way when this one is reported
        trainer.update_router_biases()
        self._tell_of_update()

    def _tell_of_update(self) -> None:
        self._attendants.notify("after_update", self.trainer, self.step)
        self._attendants.notify("after_step", self.trainer, self.step)

    def holds(self) -> bool:
        """Wait for the totals; return True, and drop the gradients and copies, if the totals lead to the decision that the update
        assumed."""
        self.totals = self._gathering.wait()
        self.balance = Balance(self.trainer)  # awaited when the step is told, after a row in which all ranks get here
        how = {"attendants": self._attendants, "updates": self.updates - 1, "lr": self.lr}
        self._vitals = vitals_of(self.trainer, self.totals, self._scale_before, step=self.step, **how)
        self.decision = decision_of(self.trainer, self._vitals)
        right = self.decision == Update(1.0)
        if right:
            self._remember()
            self.trainer.state.drop_gradients()
            self._drop_copies()
        return right

    @torch.no_grad()
    def correct(self) -> None:
        """Undo the update, and carry out the decision. Raises gradients.NotFinite or SpikeError if the run must stop, and Undone if the
        step must be computed again."""
        if self._before:  # none of it may be in memory
            torch._foreach_copy_(self.trainer.state.changed(), self._before)
        for norms, before in zip(self.trainer.state.usual.values(), self._usual_before, strict=True):
            norms.copy_(before)
        self.trainer.discard()  # the forwards since were computed with weights that are undone
        self.trainer.forget()  # and so were the largest numbers that they had
        self.trainer.state.undo()
        self.trainer.state.updates -= 1
        self.trainer.state.scale = self._scale_before
        if isinstance(self.decision, Rewind) and (self._healer is None or self._healer.target(self.decision.at_most) is None):
            self.decision = self.decision.otherwise
        if isinstance(self.decision, Update):
            self._drop_copies()
            self._remember()
            # adaptive clipping never follows a factor: it begins where clipping by the global norm ends
            clipped_update(self.trainer, self.decision.factor, step=self.step, attendants=self._attendants, clipped=True)
            self.outcome = replace(self.outcome, clipped=self.decision.factor != 1.0)
            self._tell_of_update()  # the step's tokens have been counted, whatever the factor
            return
        for buffer, before in zip(self.trainer.state.buffers.values(), self._routers_before, strict=True):
            buffer.copy_(before)
        self._drop_copies()
        if isinstance(self.decision, Rerun):
            raise Undone(FirstComputation(self.decision.reason, self.totals))
        more = {"totals": self.totals, "attendants": replace(self._attendants, referee=None), "late": True}
        self.outcome = carry_out(self.trainer, self.decision, self._vitals, **more)

    def batches(self, begun: Sequence[Batch]) -> Sequence[Batch]:
        """See `Check`. The batches get the current loss scale and precision, because after an update was undone, the loss scale may be
        lower, and the final decay of the learning rate may not have begun yet."""
        scale, wide = self.trainer.gradient_scale, self.trainer.wide
        return [replace(each, gradient_scale=scale, work=each.work and replace(each.work, wide=wide)) for each in begun]

    def _remember(self) -> None:
        known = {"totals": self.totals, "lr": self.lr, "healer": self._healer, "findings": Findings()}
        found = remember(self.trainer, self.decision, self._vitals, **known)
        lowered = isinstance(self.decision, Update) and self.decision.lowered
        events = [spike_event(self._vitals, self.decision, found)] if found.to_log else []
        self.lr = self.trainer.lr if lowered else self.lr
        events += [lowered_event(self.trainer.spec.stability, self._vitals)] if lowered else []
        self.outcome = Outcome(events=tuple(events)) if events else NO_OUTCOME

    def settle(self) -> None:
        """Verify the update between two steps. Raises the errors of `correct`."""
        if not self.holds():
            self.correct()

    def _drop_copies(self) -> None:
        self._before.clear()
        self._routers_before.clear()


@dataclass(frozen=True)
class _Open:
    """A step that is not verified yet, and what is needed to compute it again."""

    unchecked: Unchecked
    microbatches: Sequence[Samples]
    stop: bool
    accumulated: StepGradients
    optimizer: Mark
    seconds: float


class LateStepper(Stepper):
    """Trains step by step. A step is verified during the next one, so the next call of `step`, or `settle`, returns its result. While most
    updates are clipped, each update waits for the norm instead, and the same call returns the step's result.

    A call returns at most one step, so that an error in one step hides no other step's result."""

    _open: _Open | None = None

    def __init__(self, *arguments: Any, **named: Any) -> None:
        """Arguments are those of `Stepper`."""
        super().__init__(*arguments, **named)
        self._early = EarlyUpdates("plan.post_validation")

    def step(self, microbatches: Sequence[Samples], *, step: int, stop: bool = False) -> list[StepResult]:
        """Train on this rank's microbatches of step `step`; return the previous step, if it is now verified. Raises gradients.NotFinite or
        SpikeError for the previous step; the weights are then those from before that step."""
        trainer, began = self.trainer, time.perf_counter()
        accumulated, told = self._accumulate(microbatches, step)
        self.attendants.notify("after_reduction", trainer, step, accumulated.executed.nll)
        if self._early.paused and not told:
            how = {"step": step, "stop": stop, "attendants": self.attendants}
            return [self._noted(finish_step(trainer, microbatches, accumulated, began=began, **how))]
        start = trainer.executor.clock.mark()
        unchecked = Unchecked(trainer, accumulated, step=step, stop=stop, attendants=self.attendants)
        optimizer = ("optimizer", start, trainer.executor.clock.mark())
        self._open = _Open(unchecked, microbatches, stop, accumulated, optimizer, time.perf_counter() - began)
        return told

    @property
    def must_settle(self) -> bool:
        """True if the newest step is not verified although updates now wait for the norm."""
        return self._early.paused and self._open is not None

    def _accumulate(self, microbatches: Sequence[Samples], step: int) -> tuple[StepGradients, list[StepResult]]:
        """Compute this step's gradients, and verify the previous step before the first backward; return both."""
        if self._open is None:
            return accumulate(self.trainer, microbatches), []
        try:
            return accumulate(self.trainer, microbatches, check=self._open.unchecked), self._tell()
        except Undone as undone:
            told = [self._again(undone.before)]
        seed_step(self.trainer, step)
        return accumulate(self.trainer, microbatches), told

    def settle(self) -> list[StepResult]:
        """Verify the newest step now, so that its update cannot be undone later; return the step, unless it was returned before. Raises
        gradients.NotFinite."""
        if self._open is not None:
            try:
                self._open.unchecked.settle()
            except Undone as undone:
                return [self._again(undone.before)]
        return self._tell()

    def _again(self, before: FirstComputation) -> StepResult:
        assert self._open is not None
        done, self._open = self._open, None
        how = {"step": done.unchecked.step, "stop": done.stop, "attendants": self.attendants, "before": before}
        return self._noted(train_step(self.trainer, done.microbatches, **how))

    def _tell(self) -> list[StepResult]:
        if self._open is None:
            return []
        done, self._open = self._open, None
        if self.trainer.device.type == "cuda":
            done.optimizer[2].synchronize()  # marks can be read once the last of them has happened
        late = done.unchecked
        experts, known = late.balance.wait(), {"step": late.step, "lr": late.lr, "seconds": done.seconds}
        found = stepped(self.trainer, done.accumulated, late.totals, experts, done.optimizer, **known)
        return [self._noted(replace(found, updates=late.updates, outcome=late.outcome))]

    def _noted(self, found: StepResult) -> StepResult:
        """Take the step's update into account for later ones; return the result with the event if later updates change their time."""
        if found.skipped:
            return found
        events = self._early.note(found.outcome.clipped, step=found.step + 1)
        return replace(found, outcome=replace(found.outcome, events=(*found.outcome.events, *events)))
