"""One optimizer step: runs the pipeline program on a batch, computes the gradients' norm, and updates the weights."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from megalith.data.stream import Batch as Samples
from megalith.events import Event
from megalith.fleet.rank_info import REPORTS
from megalith.machine.resident import resident_bytes
from megalith.models.batch import Batch
from megalith.models.init import seed_of
from megalith.parallel import gradients
from megalith.parallel.execute import Check, RowResult
from megalith.train.assemble import Trainer
from megalith.train.batches import Cut, count_valid, to_batch
from megalith.train.decide import Decision, Rerun, Rewind, Skip, Stop, Update, Vitals, decide, departures, known_after
from megalith.train.offload.release import UnequalPassesError
from megalith.train.stability.findings import Findings, SpikeError, lowered_event, spike_event
from megalith.train.stability.loss_scale import Scale
from megalith.train.stability.refusal import overflowed, refusal, where_not_finite
from megalith.train.step_hooks import ALONE, Attendants, FirstComputation, Healer
from megalith.train.tally import Balance, Outcome, StepGradients, StepResult, StepTotals, stepped


def seed_step(trainer: Trainer, step: int) -> None:
    """Seed torch's random generators, so that random numbers in step `step` depend only on the step and the run's seed."""
    seed = seed_of(trainer.spec.train.seed, f"step {step}")
    if trainer.device.type == "cpu":
        torch.default_generator.manual_seed(seed)  # torch.manual_seed formats a traceback for each kind of device there could be
    else:
        torch.manual_seed(seed)


@dataclass(frozen=True)
class GradientsWithTotals:
    """A step up to its gradients, with the totals over all ranks."""

    totals: StepTotals
    accumulated: StepGradients

    @property
    def loss(self) -> float:
        return self.totals.loss

    @property
    def grad_norm(self) -> float:
        return self.totals.norm


def train_step(
    trainer: Trainer,
    microbatches: Sequence[Samples],
    *,
    step: int,
    stop: bool = False,
    attendants: Attendants = ALONE,
    before: FirstComputation | None = None,
) -> StepResult:
    """Train on this rank's microbatches of step `step` (0 is the first). All ranks call this together.

    `stop`: this rank was asked to stop; the result shows this on every rank. `before`: the first computation of a step that is computed
    again. With a referee among the `attendants`, a step with non-finite numbers is computed twice; with a healer, so is the first step of
    a spike. If `stability` ends the run, raises gradients.NotFinite (which names the step and the parameters) for a NaN or infinite loss or
    gradient, and SpikeError for a spike, before any weight has changed.
    """
    findings = _put_back(before, step, attendants)
    began = time.perf_counter()
    accumulated = first_pass(trainer, microbatches, step=step, attendants=attendants)
    attendants.notify("after_reduction", trainer, step, accumulated.executed.nll)
    how = {"step": step, "stop": stop, "attendants": attendants}
    return finish_step(trainer, microbatches, accumulated, began=began, before=before, findings=findings, **how)


def finish_step(
    trainer: Trainer,
    microbatches: Sequence[Samples],
    accumulated: StepGradients,
    *,
    began: float,
    step: int,
    stop: bool = False,
    attendants: Attendants = ALONE,
    before: FirstComputation | None = None,
    findings: Findings | None = None,
) -> StepResult:
    """Wait for the totals over all ranks of a step whose gradients are complete, decide about its update, and carry out the decision.
    `began`: when the step began, by `time.perf_counter`. For other arguments and errors, see `train_step`."""
    findings = findings or Findings()
    computed = gathered(trainer, accumulated, stop=stop)
    if before is not None:
        same = same_numbers(before.totals, computed.totals)
        reported = before.reason == "not finite" and REPORTS in os.environ
        findings = replace(findings, repeated=same, first=before.words, reported=reported)
    known = vitals_of(
        trainer, computed.totals, accumulated.scale, step=step, before=before, attendants=attendants, sound=findings.sound
    )
    decision = decision_of(trainer, known)
    if trainer.release is not None and not isinstance(decision, Update):
        trainer.release.take_back()
    if isinstance(decision, Rerun):
        before = FirstComputation(decision.reason, computed.totals)
        return train_step(trainer, microbatches, step=step, stop=stop, attendants=attendants, before=before)
    start, lr = trainer.executor.clock.mark(), trainer.lr
    after = {"totals": computed.totals, "attendants": attendants, "findings": findings}
    outcome = carry_out(trainer, decision, known, microbatches=microbatches, **after)
    passes = computed.accumulated
    if outcome.second is not None:
        passes, start = passes.followed_by(outcome.second), outcome.second.marks[-1][2]
    optimizer = ("optimizer", start, trainer.executor.clock.mark())
    if trainer.device.type == "cuda":
        torch.cuda.synchronize(trainer.device)
    seconds, experts = time.perf_counter() - began, Balance(trainer).wait()
    found = stepped(trainer, passes, computed.totals, experts, optimizer, step=step, lr=lr, seconds=seconds)
    return replace(found, updates=trainer.state.updates, outcome=replace(outcome, second=None))


def _put_back(before: FirstComputation | None, step: int, attendants: Attendants) -> Findings:
    if before is not None and before.reason == "spike" and attendants.healer is not None:
        return attendants.healer.examine(before, step)
    if before is not None and attendants.referee is not None:
        attendants.referee.rerun(step)
    return Findings()


def same_numbers(one: StepTotals, other: StepTotals) -> bool:
    """Return True if two computations of one step gave the same totals, bit for bit."""
    return (one.loss, one.squares) == (other.loss, other.squares)


def accumulate(trainer: Trainer, microbatches: Sequence[Samples], *, check: Check | None = None) -> StepGradients:
    """Run forwards and backwards, add up the gradients, and divide them by the loss scale. `check` verifies the weights before the first
    backward (see Executor.run)."""
    clock = trainer.executor.clock
    start = clock.mark()
    step = trainer.state.updates + trainer.state.skipped
    trainer.discard()
    trainer.extremes.begin(step)
    batches = to_batches(trainer, microbatches, valid=count_valid(microbatches, groups=trainer.groups))
    ready = clock.mark()
    executed = trainer.executor.run(batches, check=check)
    if trainer.release is not None:
        trainer.release.wait()  # a gradient whose update still runs was divided by the loss scale already
    if trainer.ahead is not None:
        executed = replace(executed, marks=[*executed.marks, *trainer.ahead.take_marks()])
    done = clock.mark()
    gradients.add_up(trainer.parameters, trainer.shared, trainer.groups)
    gradients.scale([p.grad for p in trainer.parameters.values() if p.grad is not None], 1 / trainer.gradient_scale)
    if trainer.heads is not None:
        trainer.heads.gather()
    trainer.extremes.end(step)
    return StepGradients(executed, batches, [("data", start, ready), ("communication", done, clock.mark())], trainer.state.scale)


def first_pass(trainer: Trainer, microbatches: Sequence[Samples], *, step: int, attendants: Attendants = ALONE) -> StepGradients:
    """Compute the step's gradients, and keep them on the parameters; with `Trainer.release`, update each part (unless such
    updates are paused) once its gradients are reduced, and free them."""
    if trainer.release is None:
        return accumulate(trainer, microbatches)
    return releasing(trainer, microbatches, None if trainer.release.early.paused else 1.0, step=step, attendants=attendants)


def releasing(
    trainer: Trainer, microbatches: Sequence[Samples], factor: float | None, *, step: int, attendants: Attendants
) -> StepGradients:
    """Run forwards and backwards. After a part's gradients are reduced, multiply them by `factor`, update the part, and free the gradients;
    `factor` None: measure gradients without an update. `released_update` later counts or undoes the update."""
    release = trainer.release
    assert release is not None and len(microbatches) == 1, (
        "with several microbatches, gradients are complete only after the last microbatch"
    )
    if factor is not None:
        attendants.notify("before_update", trainer, step)
    with release.during(trainer.asked(factor), loss_scale=trainer.gradient_scale):
        found = accumulate(trainer, microbatches)
    executed = replace(found.executed, marks=[*found.executed.marks, *release.marks])
    return replace(found, executed=executed)


def to_batches(trainer: Trainer, microbatches: Sequence[Samples], *, valid: int, wide: bool = False) -> list[Batch]:
    """Return a step's microbatches on the device. `valid`: the number of valid targets in the whole global batch. `wide`: all matrix
    products use high precision."""
    spec = trainer.spec
    return [
        to_batch(
            samples,
            Cut.of(trainer),
            device=trainer.device,
            loss_scale=1 / valid,
            z_loss=spec.train.z_loss,
            sequences=spec.train.global_batch,
            gradient_scale=trainer.gradient_scale,
            wide=wide or trainer.wide,
            raised=trainer.raised,
        )
        for samples in microbatches
    ]


def compute(trainer: Trainer, microbatches: Sequence[Samples], *, step: int, stop: bool = False) -> GradientsWithTotals:
    """Compute gradients and their totals over all ranks. Raises gradients.NotFinite."""
    return conclude(trainer, accumulate(trainer, microbatches), step=step, stop=stop)


def conclude(trainer: Trainer, accumulated: StepGradients, *, step: int, stop: bool = False) -> GradientsWithTotals:
    """Wait for the totals over all ranks. Raises gradients.NotFinite."""
    computed = gathered(trainer, accumulated, stop=stop)
    decision = decision_of(trainer, vitals_of(trainer, computed.totals, accumulated.scale, step=step))
    if isinstance(decision, Skip | Stop):
        raise refusal(trainer, decision.reason, step=step)
    return computed


class AllGatherTotals:
    """Collects a step's totals with one all-gather over all ranks. Terms are summed in rank order, so every rank gets the same bits in
    every run."""

    def __init__(self, trainer: Trainer, executed: RowResult, *, stop: bool) -> None:
        names = gradients.counted(trainer.parameters, trainer.shared, trainer.groups)
        squares = gradients.total_of(_measured(trainer, names))
        loss = executed.nll.double() * (trainer.groups.coordinates["tensor"] == 0)  # tensor ranks all have the whole loss
        other = torch.tensor([float(stop), float(resident_bytes())], dtype=torch.float64, device=trainer.device)
        seen = trainer.noise
        together = squares if seen.all else gradients.total_of(_measured(trainer, [n for n in names if n in seen.names]))
        apart = seen.take(trainer.device) / trainer.gradient_scale**2  # seen before the loss scale was taken out
        noise = torch.stack((apart, together.to(trainer.device)))
        self._mine = torch.cat((torch.stack((squares.to(trainer.device), loss)), other, noise))
        self._everyone = self._mine.new_empty(trainer.groups.world.size() * len(self._mine))
        self._work: Any = dist.all_gather_into_tensor(self._everyone, self._mine, group=trainer.groups.world, async_op=True)
        self._copied: Any = None
        if trainer.device.type == "cuda":  # to the host beside the stream that computes, or waiting would mean until that is idle
            with torch.cuda.stream(torch.cuda.Stream(trainer.device)):
                self._work.wait()
                self._on_host = self._everyone.to("cpu", non_blocking=True)
                self._copied = torch.cuda.Event()
                self._copied.record()

    def wait(self) -> StepTotals:
        if self._copied is not None:
            self._copied.synchronize()
            table: torch.Tensor = self._on_host
        else:
            self._work.wait()
            table = self._everyone
        table = table.view(-1, len(self._mine))
        return StepTotals(
            squares=float(table[:, 0].sum()),
            loss=float(table[:, 1].sum()),
            stop=bool(table[:, 2].any()),
            resident=int(table[:, 3].max()),
            apart=float(table[:, 4].sum()),
            together=float(table[:, 5].sum()),
        )


def _measured(trainer: Trainer, names: Sequence[str]) -> list[gradients.Norms]:
    grads = {name: grad for name in names if (grad := trainer.parameters[name].grad) is not None}
    found = dict(zip(grads, gradients.norms_of(grads.values()), strict=True))
    found |= trainer.release.norms if trainer.release is not None else {}
    return [found[name] for name in names if name in found]


def gathered(trainer: Trainer, accumulated: StepGradients, *, stop: bool) -> GradientsWithTotals:
    """Wait for the totals over all ranks, which need not be finite."""
    start = trainer.executor.clock.mark()
    totals = AllGatherTotals(trainer, accumulated.executed, stop=stop).wait()
    waited = ("communication", start, trainer.executor.clock.mark())
    return GradientsWithTotals(totals, replace(accumulated, marks=[*accumulated.marks, waited]))


def vitals_of(
    trainer: Trainer,
    totals: StepTotals,
    scale: Scale | None,
    *,
    step: int,
    before: FirstComputation | None = None,
    attendants: Attendants = ALONE,
    sound: bool | None = None,
    updates: int | None = None,
    lr: float | None = None,
) -> Vitals:
    """Return the vitals of a step that was computed with loss scale `scale`. `updates`: the number of the step's update; `lr`: its learning
    rate; None: those of the next update."""
    state = trainer.state
    return Vitals(
        totals.loss,
        totals.norm,
        step=step,
        updates=state.updates if updates is None else updates,
        skipped=state.unusable,
        tries=int(before is not None),
        repeatable=attendants.referee is not None,
        attended=attendants.healer is not None,
        sound=sound,
        scale=scale,
        lr=trainer.lr if lr is None else lr,
    )


def decision_of(trainer: Trainer, vitals: Vitals) -> Decision:
    """Decide about the update. All ranks make the same decision."""
    spec, history = trainer.spec, trainer.state.history
    return decide(vitals, optimizer=spec.optimizer, stability=spec.stability, history=history, loss_scale=spec.loss_scale)


def remember(
    trainer: Trainer,
    decision: Decision,
    vitals: Vitals,
    *,
    totals: StepTotals,
    lr: float,
    healer: Healer | None,
    findings: Findings,
) -> Findings:
    """Add a decision to the run's history before it is carried out; return the findings, with the causes if they must be logged."""
    stability, history = trainer.spec.stability, trainer.state.history
    found = departures(vitals, stability, history)
    answered = isinstance(decision, Rewind | Stop) or (isinstance(decision, Update) and decision.lowered)
    out = history.spikes(found) or isinstance(decision, Rewind)
    findings = replace(findings, departures=found, to_log=out and (answered or history.outside == 0))
    trainer.state.history = known_after(decision, vitals, stability=stability, history=history)
    if healer is not None:
        healer.note(vitals, totals, decision, lr=lr)
        if findings.to_log or findings.accident:
            findings = healer.causes(vitals.step, findings)
    return findings


def carry_out(
    trainer: Trainer,
    decision: Decision,
    vitals: Vitals,
    *,
    totals: StepTotals,
    attendants: Attendants = ALONE,
    findings: Findings | None = None,
    late: bool = False,
    microbatches: Sequence[Samples] = (),
) -> Outcome:
    """Carry out the decision about a step, then drop its gradients. `late`: see Healer.rewind. `microbatches`: the step's microbatches,
    needed if its gradients are freed inside the backward. Raises gradients.NotFinite, the referee's exception, or SpikeError if the run
    must stop.
    """
    step, healer, target = vitals.step, attendants.healer, None
    if isinstance(decision, Rewind):
        target = healer.target(decision.at_most) if healer is not None else None
        decision = decision if target is not None else decision.otherwise
    more = {"totals": totals, "lr": trainer.lr, "healer": healer, "findings": findings or Findings()}
    found = remember(trainer, decision, vitals, **more)
    skipped, spike, events, overflow, second, clipped = "", False, list[Event](), None, None, False
    match decision:
        case Update(factor, lowered):
            clipped = factor != 1.0
            if trainer.release is None:
                clipped_update(trainer, factor, step=step, attendants=attendants)
            else:
                second, paused = released_update(trainer, microbatches, factor, step=step, attendants=attendants)
                events += paused
            trainer.update_router_biases()
            attendants.notify("after_update", trainer, step)
            events += [lowered_event(trainer.spec.stability, vitals)] if lowered else []
        case Skip(skipped, spike, after):
            if after is not None:
                skipped, overflow = overflowed(trainer, skipped, after)
                trainer.state.scale = after
            elif not spike:
                skipped += f"; NaN or Inf in {where_not_finite(trainer)}"
            if after is None and vitals.overflowed and trainer.state.scale is not None:  # at its floor, the scale stays
                trainer.state.scale = trainer.state.scale._replace(good=0)
            trainer.drop()
            trainer.state.skipped += 1
            attendants.notify("update_skipped", trainer, step)
        case Rewind(skipped):
            assert healer is not None
            spike = True
            trainer.drop()
            rewound, found = healer.rewind(target, step, found, late=late)
            events += rewound
        case Stop(reason, spike):
            if spike:
                raise SpikeError(f"step {step + 1}: {reason}. {found.words}")
            error = refusal(trainer, reason, step=step)
            if attendants.referee is not None:
                attendants.referee.blame(error, step)
            raise error
        case Rerun():
            raise AssertionError("a step that must be computed again has no decision to carry out")
    attendants.notify("after_step", trainer, step)
    if found.to_log or found.accident:
        events.insert(0, spike_event(vitals, decision, found))
    return Outcome(skipped, spike, tuple(events), overflow, clipped=clipped, passes=1 + (second is not None), second=second)


def update(trainer: Trainer, computed: GradientsWithTotals, *, step: int, attendants: Attendants = ALONE) -> None:
    """Clip the gradients, update the weights, and drop the gradients."""
    vitals = vitals_of(trainer, computed.totals, computed.accumulated.scale, step=step)
    carry_out(trainer, decision_of(trainer, vitals), vitals, totals=computed.totals, attendants=attendants)


def clipped_update(trainer: Trainer, factor: float, *, step: int, attendants: Attendants = ALONE, clipped: bool = False) -> None:
    """Multiply the gradients by `factor`, update the weights, and drop the gradients. `clipped`: `Trainer.clip` was already called with a
    factor of 1."""
    if factor != 1.0 or not clipped:
        trainer.clip(factor, number=trainer.state.updates)
    attendants.notify("before_update", trainer, step)
    if trainer.ahead is not None:
        trainer.update_ahead()
        return
    trainer.update()
    trainer.state.drop_gradients()


def released_update(
    trainer: Trainer, microbatches: Sequence[Samples], factor: float, *, step: int, attendants: Attendants
) -> tuple[StepGradients | None, list[Event]]:
    """Count the update that was made inside the backward. If there was none, or it used a wrong factor or learning rate, undo it, and
    compute the step again with the right ones. Return this second pass, if there was one, and the events for the log. Raises
    UnequalPassesError on a rank whose second pass, unlike its first, had NaN or Inf."""
    release, second = trainer.release, None
    assert release is not None
    if release.asked != trainer.asked(factor):
        release.take_back()
        trainer.forget()
        seed_step(trainer, step)
        second = releasing(trainer, microbatches, factor, step=step, attendants=attendants)
        trainer.noise.take(trainer.device)  # the first pass's sum is known
        if bad := release.not_finite():
            raise UnequalPassesError(bad, step=step)
    trainer.keep_update()
    release.asked = None
    return second, [*release.early.note(factor != 1.0, step=step + 1)]
