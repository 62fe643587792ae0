"""The loop: batch -> step -> events, validation, checkpoint."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megalith.checkpoint.checkpointer import Checkpointer, Failed, Saved
from megalith.data.stream import Stream
from megalith.events import Checkpoint, EventLog, Problem, Spans, Step, Validation
from megalith.fleet.heartbeat import Heartbeat
from megalith.models.init import seed_of
from megalith.train.assemble import Trainer
from megalith.train.batches import indices
from megalith.train.restore import Position, meta
from megalith.train.step import Stepped, train_step
from megalith.train.validate import Validator

SPANS_EVERY = 100  # steps between drawings of the pipeline in the log


@dataclass(frozen=True)
class Yardstick:
    """What MFU is measured with: FLOP a token, FLOP/s of all ranks together or None, and where that figure is from."""

    flops_per_token: float
    peak: float | None
    source: str


class Loop:
    """One rank's run from `position` to the last step. All ranks go through it together."""

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
    ) -> None:
        self.trainer, self.stream, self.checkpointer, self.position = trainer, stream, checkpointer, position
        self.yardstick, self.log, self.heartbeat = yardstick, log, heartbeat
        self.spec = trainer.spec
        self.validator = validator
        self._first = position.step
        self._last_saved = position.step

    @property
    def step(self) -> int:
        """Steps done."""
        return self.position.step

    def run(self, *, stop: object, after_step: Callable[[int], object]) -> str:
        """Train to the last step ("finished") or until a rank is asked to stop ("stopped", state saved)."""
        every = self.spec.validation.every
        after_step(self.step)
        while self.step < self.spec.train.steps:
            stopping = self._one_step(bool(stop))
            last = self.step == self.spec.train.steps
            after_step(self.step)
            if self.validator and (self.step % every == 0 or last) and not stopping:
                self._validate(self.validator)
            if stopping or last:
                self._save(asynchronous=False)
            elif self.spec.checkpoint.every and self.step % self.spec.checkpoint.every == 0:
                self._save(asynchronous=self.spec.checkpoint.asynchronous)
            self._report_saves(self.checkpointer.poll())
            if stopping and not last:
                return "stopped"
        return "finished"

    def _one_step(self, stop: bool) -> bool:
        """Train one step; True if all ranks are to stop now."""
        began, step = time.perf_counter(), self.step
        self.heartbeat.beat("step", step)
        torch.manual_seed(seed_of(self.spec.train.seed, f"step {step}"))
        numbers = indices(self.spec, first=self.position.samples, data_rank=self.trainer.groups.coordinates["data"])
        microbatches = [self.stream.batch(part) for part in numbers]
        read = time.perf_counter() - began
        draw = (step - self._first) % SPANS_EVERY == 1
        if draw:
            dist.barrier()  # one zero for all ranks' clocks
        done = train_step(self.trainer, microbatches, step=step, stop=stop)
        if draw:
            self._draw(done)
        self.position = Position(step + 1, self.position.samples + self.spec.train.global_batch)
        if self.log:
            self._log_step(done, read=read, seconds=time.perf_counter() - began)
        return done.stop

    def _log_step(self, done: Stepped, *, read: float, seconds: float) -> None:
        assert self.log is not None
        rate = done.tokens / seconds
        breakdown = done.breakdown | {"data": done.breakdown["data"] + read}
        self.log.write(
            Step(
                step=self.step,
                loss=done.loss,
                grad_norm=done.grad_norm,
                lr=done.lr,
                tokens=done.tokens,
                tokens_seen=self.position.samples * self.spec.train.seq_len,
                seconds=seconds,
                tokens_per_second=rate,
                mfu=self.yardstick.flops_per_token * rate / self.yardstick.peak if self.yardstick.peak else None,
                breakdown=breakdown | {"other": max(0.0, seconds - sum(breakdown.values()))},
                memory=done.memory,
            )
        )

    def _draw(self, done: Stepped) -> None:
        """Log when the ranks of the first pipeline did what."""
        here = self.trainer.groups.coordinates
        mine = [(here["pipeline"], *span) for span in done.spans] if here["data"] == here["tensor"] == 0 else []
        everyone: list[list[tuple[int, str, float, float]]] | None = (
            [[] for _ in range(dist.get_world_size())] if self.log else None
        )
        dist.gather_object(mine, everyone)
        if self.log and everyone:
            self.log.write(Spans(step=self.step + 1, spans=[span for spans in everyone for span in spans]))

    def _validate(self, validator: Validator) -> None:
        self.heartbeat.beat("validation", self.step)
        began = time.perf_counter()
        loss, domains = validator.run()
        if self.log:
            self.log.write(Validation(step=self.step, loss=loss, domains=domains, seconds=time.perf_counter() - began))

    def _save(self, *, asynchronous: bool) -> None:
        self.heartbeat.beat("checkpoint", self.step)
        if self._last_saved == self.step:
            self._report_saves(self.checkpointer.wait())
            return
        self._last_saved = self.step
        self.checkpointer.save(
            self.step, self.trainer.state(), meta(self.position, spec=self.spec, stream=self.stream), asynchronous=asynchronous
        )
        if not asynchronous:
            self._report_saves(self.checkpointer.wait())

    def _report_saves(self, outcomes: list[Saved | Failed]) -> None:
        if not self.log:
            return
        for outcome in outcomes:
            if isinstance(outcome, Failed):
                self.log.write(Problem("warning", f"checkpoint of step {outcome.step} was not saved: {outcome.error}"))
            else:
                fields = ("step", "bytes", "seconds", "wait_seconds")
                self.log.write(
                    Checkpoint(path=f"checkpoints/{outcome.path.name}", **{name: getattr(outcome, name) for name in fields})
                )
