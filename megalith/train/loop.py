"""The training loop: reads a batch, trains a step, and writes events, validation results and checkpoints."""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch.distributed as dist

from megalith.checkpoint.checkpointer import Checkpointer, SaveFailure
from megalith.checkpoint.reports import SaveReports
from megalith.data.stream import Stream
from megalith.events import Event, EventLog, PhaseBegan, Problem, Skipped, Span, Spans, Step, Validation
from megalith.exchange import ObjectCollectives
from megalith.fleet import hooks
from megalith.fleet.exit_codes import ExitCode
from megalith.fleet.heartbeat import SAVES_AGAIN, Heartbeat, StepMeasurement
from megalith.fleet.report import report_stop
from megalith.spec.noise import SMOOTHED
from megalith.spec.phases import Phase, Phases
from megalith.train.assemble import Trainer
from megalith.train.guard import StateGuard
from megalith.train.measure.collector import Collector
from megalith.train.measure.peak import Yardstick, counted_flops
from megalith.train.measure.precision import PrecisionWatch
from megalith.train.own.callbacks import Done, same_on_all
from megalith.train.post_validation import LateStepper
from megalith.train.reader import Reader
from megalith.train.restore import Position, meta
from megalith.train.sites.merge import Sites
from megalith.train.sites.progress import StepShare, StopAsked
from megalith.train.stability.healer import Healer
from megalith.train.step import seed_step
from megalith.train.step_hooks import ALONE, Attendants, StepHook
from megalith.train.stepper import Stepper
from megalith.train.tally import StepResult
from megalith.train.validate import Validator

AGAIN_SECONDS = 10.0  # between tries to save the final state
STOP_SECONDS = 20.0  # that a run which was asked to stop tries for: who asks has little patience
OWN_WORK = ("forward", "backward", "optimizer")  # of a step's breakdown, what takes longer on a slow GPU: in "data" ranks meet
SPANS_EVERY = 100  # steps between drawings of the pipeline in the log


class NotSavedError(RuntimeError):
    """The last state of a run could not be saved. The copies of the state in the nodes' memory are kept, and the same command resumes from
    them."""

    exit_code = ExitCode.LOST


def nothing_left(done: int, *, steps: int) -> str:
    """Return the warning for a run that has already reached train.steps."""
    return (
        f"{done} steps are done and train.steps = {steps}: nothing is left to train. "
        f"Set train.steps above {done} to resume, or start another run with --run-dir."
    )


def stepper_of(trainer: Trainer, attendants: Attendants = ALONE) -> Stepper:
    """Return the stepper that the trainer's plan needs."""
    return (LateStepper if trainer.spec.plan.post_validation else Stepper)(trainer, attendants)


@dataclass(frozen=True)
class _Timed:
    read: float
    whole: float


def _went_to(done: StepResult, timed: _Timed) -> dict[str, float]:
    breakdown = done.breakdown | {"data": done.breakdown["data"] + timed.read}
    return breakdown | {"other": max(0.0, timed.whole - sum(breakdown.values()))}


class Loop:
    """Trains on one rank from `position` to the last step. Construction and `run` are collective."""

    def __init__(
        self,
        trainer: Trainer,
        stream: Stream,
        checkpointer: Checkpointer,
        position: Position,
        *,
        validator: Validator | None,
        yardstick: Yardstick,
        log: EventLog | None,
        heartbeat: Heartbeat,
        guard: StateGuard | None = None,
        step_hooks: Sequence[StepHook] = (),
        sites: Sites | None = None,
    ) -> None:
        """`sites`: the merges with other sites; None for a run without sites."""
        self.trainer, self.stream, self.checkpointer, self.position = trainer, stream, checkpointer, position
        self.yardstick, self.log, self.heartbeat = yardstick, log, heartbeat
        self.spec, self.phases = trainer.run, Phases.of(trainer.run)
        self.reader = Reader(trainer, stream, position, sites)
        self._phase: Phase | None = None
        self.validator = validator
        self.precision = PrecisionWatch.of(trainer, self.reader.read, log=log, beat=heartbeat.beat)
        self.guard, self.sites = guard, sites
        hooks = [*step_hooks, *(sites.step_hooks if sites else ()), *([guard] if guard else [])]
        healer = (
            Healer(trainer, self.reader.data(), checkpointer=checkpointer, guard=guard, beat=heartbeat.beat)
            if self.spec.stability.watch
            else None
        )
        self._attendants = Attendants(hooks, guard, healer)
        self._stepper = stepper_of(trainer, self._attendants)
        self._timed: dict[int, _Timed] = {}  # of the steps whose outcome is not known yet
        self._first = self._drew = position.step
        self._collector = Collector()
        self._noise = (0.0, 0.0)  # moving averages of the gradients' signal and noise
        self._compute = 0.0  # seconds of this rank's own work in the newest step
        self._newest: _Timed | None = None  # of the newest step whose outcome is known
        self._measured: StepMeasurement | None = None  # the newest step whose seconds are known
        self._saves = SaveReports(log)
        self._stop_asked = False  # by a callback of this rank
        self._turn: StepShare | None = None  # with sites: how the step was dealt out

    @property
    def step(self) -> int:
        """The number of steps tried."""
        return self.position.step

    @property
    def ended(self) -> bool:
        """True if all updates are made or, with sites, if the merged weights include the training on all samples."""
        return self.trainer.state.updates >= self.spec.train.steps if self.sites is None else self.sites.ended

    def run(self, *, stop: object, after_step: Callable[[int], object]) -> str:
        """Train to the last step (return "finished") or until a rank is asked to stop (return "stopped"), and save the state. With sites,
        the run is finished once a quorum of sites has saved the final step. Raises NotSavedError if saving has failed for too long.
        """
        every = self.spec.validation.every
        joins = self.sites is not None and self.sites.enters
        if self.sites is not None and joins and not self._enter(self.sites):
            return "stopped"
        after_step(self.step)
        if self.ended:
            done = self.trainer.state.updates if self.sites is None else self.step
            self._warn(nothing_left(done, steps=self.spec.train.steps))
        if self.ended and (joins or not self.checkpointer.holds(self.step)):
            self._save_last(patience=self.spec.fleet.wait_limit)  # a fault came in between
        while not self.ended:
            stopping = self._one_step(bool(stop)) if self.sites is None else self._step_and_merge(self.sites, bool(stop))
            last = self.ended
            validating = self.validator is not None and (self.step % every == 0 or last)
            saving = self.spec.checkpoint.every and self.step % self.spec.checkpoint.every == 0
            copying = self.guard is not None and self.guard.due(self.step)
            watching = self.precision is not None and self.precision.due(self.step)
            if stopping or last or validating or saving or copying or watching or self._stepper.must_settle:
                stopping |= self._learn(self._stepper.settle())
                last = self.ended  # the run's final update may have been left out
            if self.guard and copying:
                self.guard.copy(self.step, self.position.samples)
            after_step(self.step)
            if self.validator and validating and not stopping:
                self._validate(self.validator)
            if stopping or last:
                self._save_last(patience=self.spec.fleet.wait_limit if last else STOP_SECONDS)
            elif saving and not self._suspicious():
                self._save(asynchronous=self.spec.checkpoint.asynchronous)
            self._saves.report(self.checkpointer.poll())
            if stopping and not last:
                return "stopped"
        if self.sites is not None:
            self.heartbeat.beat("merge", self.step)
            return "finished" if self.sites.end(self.step) else "stopped"
        return "finished"

    def _enter(self, sites: Sites) -> bool:
        """Join the other sites at their current step; return False if a stop was requested before their weights arrived."""
        self.heartbeat.beat("merge", self.step)
        try:
            step, missed = sites.enter()
        except StopAsked:
            return False
        self._write(missed)
        self.position = Position(step, sites.progress.deal.dealt, 0)
        self._first = step
        if self.guard:
            self.guard.adopt(step)
        begins = "trains, with fresh moments, as soon as the other sites include this site"
        self._say("advice", f"this site has the merged weights of step {step} and {begins}")
        return True

    def _step_and_merge(self, sites: Sites, stop: bool) -> bool:
        """Train a step and merge; return True if this site must stop now. If an earlier stop interrupted the merges after a step, finish
        these merges and train no step."""
        try:
            stopping = sites.progress.midway is None and self._one_step(stop)
        except StopAsked:  # in the exchange of gradients, so there is no update
            return True
        return self._merge(sites, stopping)

    def _merge(self, sites: Sites, stop: bool) -> bool:
        """Merge the due fragments with the other sites; return True if this site must stop now. `stop`: this site was asked to stop."""
        due = sites.due(self.step)
        if due:
            self.heartbeat.beat("merge", self.step, measured=self._measured)
            if self.guard:
                self.guard.before_merge(self.step)
        done = sites.after_step(self.step, stop=stop)
        if due and self.guard:
            self.guard.adopt(self.step)
        self._write(done.made)
        for text in done.said:
            self._say("advice", text)
        if done.refused:
            self._warn(f"closed {done.refused} connections to this site's port that did not prove that they have the run's key")
        return done.stop

    def _suspicious(self) -> bool:
        """Return True if the run is in a spike and may rewind to before this state. While the run may still rewind from a spike, no regular
        checkpoint is saved, because it would replace an older, good one; the state at a stop or at the end is saved."""
        history, stability = self.trainer.state.history, self.spec.stability
        return history.began >= 0 and "rewind" in stability.answers and len(history.rewinds) < stability.rewinds

    def _one_step(self, stop: bool) -> bool:
        if self.sites is not None:
            self._turn = self.sites.deal(self.step)
            if self._turn.share is None:
                self._advance(self.step + 1)
                return self.sites.agree(stop or self._stop_asked)
        ended = self._enter_phase()
        if self.precision is not None:
            self.precision.measure(self.step)
        began, worked, step = time.perf_counter(), time.thread_time(), self.step
        self.heartbeat.beat(self._doing, step, compute=self._compute, measured=self._measured)
        self._attendants.notify("before_step", self.trainer, step)
        seed_step(self.trainer, step)
        microbatches = self.reader.read(step)
        read = time.perf_counter() - began
        if self._drawn(step):
            dist.barrier(group=self.trainer.groups.world)  # one zero for all ranks' clocks
        settled = self._stepper.step(microbatches, step=step, stop=stop or self._stop_asked)
        self._advance(step + 1)
        self._timed[step] = _Timed(read, time.perf_counter() - began)
        stopping = self._learn(settled) or ended
        if self.trainer.device.type == "cpu":  # its time, not the clock's: waits within a forward are those for the slow rank
            self._compute = time.thread_time() - worked
        if settled:
            self._measured = self._measure(settled[-1])
        return stopping

    def _measure(self, done: StepResult) -> StepMeasurement:
        assert self._newest is not None
        breakdown = _went_to(done, self._newest)
        return StepMeasurement(done.step, float(done.memory["peak"]), breakdown | {"own": self._compute})

    def _enter_phase(self) -> bool:
        """Switch to the phase of the next step. If this is a new phase, first wait for the previous step's result; return True if this
        result makes all ranks stop."""
        share = None if self._turn is None else self._turn.share
        phase = self.phases.at(self.position.samples if share is None else share.first)
        same = phase is self._phase and (share is None or share.size == self.trainer.samples)
        stopping = False if same else self._learn(self._stepper.settle())
        state = self.trainer.state
        state.history = state.history.of_text(self.phases.texts[phase.number])  # also after a rewind into another phase
        self.trainer.schedule = None if self._turn is None else self._turn.schedule
        if same:
            return False
        if self._phase is not None and phase.seq_len != self._phase.seq_len:  # noise is a sequence's
            self._noise = (0.0, 0.0)
        self.trainer.enter(phase, None if share is None else share.size)
        if self.yardstick.folder is not None:
            self.yardstick = replace(self.yardstick, flops_per_token=counted_flops(self.trainer, self.yardstick.folder))
        if (
            self.log
            and len(self.phases.all) > 1
            and phase is not self._phase
            and (self._phase or phase.first == self.position.samples)
        ):
            about = {"seq_len": phase.seq_len, "global_batch": phase.global_batch, "weights": phase.weights or {}}
            self.log.write(PhaseBegan(step=self.step + 1, samples=self.position.samples, number=phase.number, **about))
        self._phase = phase
        return stopping

    @property
    def _doing(self) -> str:
        """The name under which the heartbeat reports the current step. Steps of phases with different tensor shapes take different times,
        so their names differ."""
        first = self.phases.all[0]
        now = self._phase or first
        if (now.seq_len, now.global_batch) == (first.seq_len, first.global_batch):
            return "step"
        return f"step of {now.global_batch} x {now.seq_len}"

    def _advance(self, step: int) -> None:
        """Move the run's position to `step`. A step consumes its samples even if its update was skipped."""
        if self.sites is not None:
            samples = self.sites.progress.deal.dealt
        else:
            samples = self.position.samples + self.phases.at(self.position.samples).global_batch
        self.position = Position(step, samples, self.trainer.state.updates, self.trainer.state.history)

    def _drawn(self, step: int) -> bool:
        return (step - self._first) % SPANS_EVERY == 1

    def _learn(self, settled: list[StepResult]) -> bool:
        for done in settled:
            timed = self._newest = self._timed.pop(done.step)
            if self.trainer.device.type != "cpu":
                self._compute = timed.read + sum(done.breakdown[what] for what in OWN_WORK)
            if self.sites:
                self.sites.note(done.loss)
            if self._drawn(done.step):
                self._draw(done)
            if self.log and done.skipped:
                self._log_skip(done, timed)
            elif self.log:
                self._log_step(done, timed)
            self._write(done.outcome.events)
            if self.trainer.callbacks and self.trainer.callbacks.after_step(self._done(done)) and not self._stop_asked:
                self._stop_asked = True
                if self.trainer.groups.rank == 0:
                    report_stop(done.step + 1)
        return any(done.stop for done in settled)

    def _done(self, done: StepResult) -> Done:
        numbers = {"loss": done.loss, "grad_norm": done.grad_norm, "lr": done.lr, "skipped": done.skipped}
        site = 0 if self.sites is None else self.sites.site
        return Done(step=done.step + 1, tokens_seen=self._tokens_seen(done), rank=self.trainer.groups.rank, site=site, **numbers)

    def _tokens_seen(self, done: StepResult) -> int:
        later = self.step - (done.step + 1)  # steps done since: none with sites
        return self.phases.tokens(self.position.samples - later * self.trainer.spec.train.global_batch)

    def _log_skip(self, done: StepResult, timed: _Timed) -> None:
        assert self.log is not None
        left, over = self.spec.stability.skips - self.trainer.state.unusable, done.overflow
        told = {"step": done.step + 1, "reason": done.skipped, "tokens": done.tokens, "seconds": timed.whole}
        told |= {} if over is None else {"part": over.part, **asdict(over)}
        self.log.write(Skipped(**told, left=left, spike=done.outcome.spike))

    def _log_step(self, done: StepResult, timed: _Timed) -> None:
        assert self.log is not None
        rate = done.tokens / timed.whole  # of this site
        sites = 1.0 if self._turn is None or self._turn.share is None else self._turn.samples / self._turn.share.size
        self.log.write(
            Step(
                step=done.step + 1,
                loss=done.loss,
                grad_norm=done.grad_norm,
                lr=done.lr,
                tokens=round(sites * done.tokens),
                tokens_seen=self._tokens_seen(done),
                seconds=timed.whole,
                tokens_per_second=sites * rate,
                mfu=self.yardstick.flops_per_token * rate / self.yardstick.peak if self.yardstick.peak else None,
                breakdown=_went_to(done, timed),
                memory=done.memory if self.sites is None else self.sites.state.added_to(done.memory),
                experts=done.experts,
                updates=done.updates if self.sites is None else self.phases.steps_in(self.position.samples),
                noise=self._noise_of(done),
                scale=done.scale,
                passes=done.passes,
            )
        )

    def _noise_of(self, done: StepResult) -> dict[str, float]:
        if done.noise is None or (self.sites and self.sites.step_hooks):  # gradients of all sites, besides those of this site
            return {}
        signal, noise = (SMOOTHED * old + (1 - SMOOTHED) * new for old, new in zip(self._noise, done.noise, strict=True))
        self._noise = signal, noise
        scale = (
            {"scale": noise / signal, "tokens": noise / signal * self.trainer.spec.train.seq_len} if signal > 0 < noise else {}
        )
        return {**done.noise._asdict(), **scale}

    def _draw(self, done: StepResult) -> None:
        groups = self.trainer.groups
        here = groups.coordinates
        mine = [(here["pipeline"], *span) for span in done.spans] if here["data"] == here["tensor"] == 0 else []
        everyone = ObjectCollectives(groups.world).gather((mine, self._collector.take()), tuple[list[Span], float])
        step, since, self._drew = done.step + 1, done.step + 1 - self._drew, done.step + 1
        if self.log and everyone:
            spans, collecting = zip(*everyone, strict=True)
            self.log.write(
                Spans(step=step, spans=[span for one in spans for span in one], collecting=max(collecting), since=since)
            )

    def _validate(self, validator: Validator) -> None:
        self.heartbeat.beat("validation", self.step, measured=self._measured)
        began = time.perf_counter()
        with self.sites.merged() if self.sites else nullcontext():
            loss, domains = validator.run()
        self._check_state()
        if self.log:
            self.log.write(Validation(step=self.step, loss=loss, domains=domains, seconds=time.perf_counter() - began))

    def _save_last(self, *, patience: float) -> None:
        """Save the last state. If saving fails on any rank, all ranks retry it every AGAIN_SECONDS, for up to `patience` seconds."""
        began: float | None = None  # when it first failed
        for more in reversed(range(1 + int(patience / AGAIN_SECONDS))):
            self._save(asynchronous=False)
            outcomes = self.checkpointer.wait()
            failed = next((one for one in outcomes if isinstance(one, SaveFailure) and one.step == self.step), None)
            self._saves.report([one for one in outcomes if began is None or one is not failed])
            if failed is None and began is not None:
                self._warn(f"the last checkpoint was saved {time.monotonic() - began:.0f} s after saving it had first failed")
            if failed is None or failed.peer_lost:
                return
            if not more:
                raise NotSavedError(f"the state after step {self.step} could not be saved: {failed.error}")
            if began is None:
                began, limit = time.monotonic(), f"{more * AGAIN_SECONDS:g}"
                words = f"saving the last checkpoint is retried every {AGAIN_SECONDS:g} s, for up to {limit} s"
                self._warn(f"{words}. Make room in {self.checkpointer.folder}, or make its file system available again")
                self.heartbeat.beat(f"{SAVES_AGAIN}{limit}", self.step, measured=self._measured)
            time.sleep(AGAIN_SECONDS)

    def _warn(self, message: str) -> None:
        self._say("warning", message)

    def _say(self, severity: str, message: str) -> None:
        self._write([Problem(severity, message)])

    def _write(self, events: Iterable[Event]) -> None:
        if self.log:
            for event in events:
                self.log.write(event)

    def _save(self, *, asynchronous: bool) -> None:
        phase = "checkpoint" if asynchronous else "last checkpoint"  # they take differently long
        self.heartbeat.beat(phase, self.step, measured=self._measured)
        hooks.at("saving", self.step)
        held = self.trainer.state if self.sites is None else self.sites.state
        state, meta = held.laid(), self._meta()
        self.checkpointer.save(self.step, state, meta, asynchronous=asynchronous, check=self._check_state)

    def _meta(self) -> dict[str, Any]:
        progress = None if self.sites is None else self.sites.progress
        return meta(self._settled(), spec=self.spec, stream=self.stream, sites=progress)

    def _settled(self) -> Position:
        trainer = self.trainer
        known = {"history": trainer.state.history, "callbacks": same_on_all(trainer.callbacks, group=trainer.groups.world)}
        return replace(self.position, updates=trainer.state.updates, **known)

    def _check_state(self) -> None:
        """Check that the state is still the result of the newest update, and of the newest merge."""
        if self.guard:
            self.guard.check_all(self.step)
