"""One optimizer step: batch, program, gradients, norm, update."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megalith.data.stream import Batch as Samples
from megalith.machine.resident import most_resident_bytes, resident_bytes
from megalith.models.batch import Batch
from megalith.models.init import seed_of
from megalith.parallel import gradients
from megalith.parallel.execute import Check, Executed
from megalith.spec.model import MoeSpec
from megalith.train.assemble import Trainer
from megalith.train.batches import Cut, count_valid, to_batch
from megalith.train.decide import Decision, Rerun, Skip, Stop, Update, Vitals, decide

WORST = {"max_load": 1.0, "entropy": -1.0, "dropped": 1.0}
"""Measures of the balance of experts, and whether more is worse."""


Mark = tuple[str, Any, Any]  # what, from when, to when

Moment = Literal["before_step", "reduced", "before_update", "updated", "skipped", "resting"]


class Watcher(Protocol):
    """Looks on at the moments of each step. What it raises ends the step. A step whose update is made again, since its norm was known
    late, has its last three moments twice."""

    def before_step(self, trainer: Trainer, step: int) -> None:
        """Before its data is read."""
        ...

    def reduced(self, trainer: Trainer, step: int) -> None:
        """This rank's gradients are complete and not yet clipped."""
        ...

    def before_update(self, trainer: Trainer, step: int) -> None:
        """The optimizer is about to use them."""
        ...

    def updated(self, trainer: Trainer, step: int) -> None:
        """The state is that after the step."""
        ...

    def skipped(self, trainer: Trainer, step: int) -> None:
        """The step's update was left out, and undone if it had been made: the state is that before the step."""
        ...

    def resting(self, trainer: Trainer, step: int) -> None:
        """The state is not touched until the next update."""
        ...


def tell(watchers: Sequence[Watcher], moment: Moment, trainer: Trainer, step: int) -> None:
    """Let them look, in order."""
    for watcher in watchers:
        getattr(watcher, moment)(trainer, step)


def seed_step(trainer: Trainer, step: int) -> None:
    """Random numbers drawn within step `step` depend on it and the run's seed alone."""
    seed = seed_of(trainer.spec.train.seed, f"step {step}")
    if trainer.device.type == "cpu":
        torch.default_generator.manual_seed(seed)  # torch.manual_seed formats a traceback for each kind of device there could be
    else:
        torch.manual_seed(seed)


@dataclass(frozen=True)
class Stepped:
    """What one step did. Sums are over all ranks; `seconds` and `breakdown` are this rank's."""

    step: int  # 0 is the first
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    seconds: float
    breakdown: dict[str, float]
    memory: dict[str, int]
    stop: bool  # some rank was asked to stop
    spans: list[tuple[str, float, float]]  # action, start and end in seconds since the step began
    experts: dict[str, float]  # how even their load was in this step, in the layer where it was least so
    updates: int = 0  # updates made, this one among them
    skipped: str = ""  # why the update was left out, if it was


@dataclass(frozen=True)
class Totals:
    """Sums and extremes over all ranks that end a step."""

    squares: float
    loss: float
    stop: bool
    resident: int

    @property
    def norm(self) -> float:
        """The global norm of the gradients."""
        return self.squares**0.5


@dataclass(frozen=True)
class Accumulated:
    """A step up to its gradients, which are complete and unclipped on the parameters."""

    executed: Executed
    batches: list[Batch]
    marks: list[Mark]


@dataclass(frozen=True)
class Computed:
    """A step up to its gradients and what all ranks know of them."""

    totals: Totals
    accumulated: Accumulated

    @property
    def loss(self) -> float:
        return self.totals.loss

    @property
    def grad_norm(self) -> float:
        return self.totals.norm


class Referee(Protocol):
    """Answers numbers that are not finite, on all ranks together (`train.guard.Guard`)."""

    def rerun(self, step: int) -> None:
        """Report them, and put back what the step has left, so that it can be computed again."""
        ...

    def blame(self, error: gradients.NotFinite, step: int) -> None:
        """They came again: report which rank they come from. Raises Reported if somebody listens."""
        ...


def train_step(
    trainer: Trainer,
    microbatches: Sequence[Samples],
    *,
    step: int,
    stop: bool = False,
    watchers: Sequence[Watcher] = (),
    referee: Referee | None = None,
    tries: int = 0,
) -> Stepped:
    """Train on this rank's microbatches of step `step` (0 is the first). All ranks call it together.

    `stop`: this rank was asked to stop; every rank learns of it. `tries`: how often the step was computed before, with numbers that were
    not finite. With a `referee` it is computed once more. Raises gradients.NotFinite, before any weight has changed, naming step and
    parameters if the loss or a gradient is NaN or infinite and `stability` says that this ends the run.
    """
    if tries and referee:
        referee.rerun(step)
    began = time.perf_counter()
    accumulated = accumulate(trainer, microbatches)
    tell(watchers, "reduced", trainer, step)
    computed = gathered(trainer, accumulated, stop=stop)
    decision = decision_of(trainer, computed.totals, tries=tries, repeatable=referee is not None)
    if isinstance(decision, Rerun):
        again = {"step": step, "stop": stop, "watchers": watchers, "referee": referee}
        return train_step(trainer, microbatches, **again, tries=tries + 1)
    start, lr = trainer.executor.clock.mark(), trainer.lr
    skipped = carry_out(trainer, decision, step=step, watchers=watchers, referee=referee)
    optimizer = ("optimizer", start, trainer.executor.clock.mark())
    if trainer.device.type == "cuda":
        torch.cuda.synchronize(trainer.device)
    seconds, experts = time.perf_counter() - began, Balance(trainer).wait()
    found = stepped(trainer, computed.accumulated, computed.totals, experts, optimizer, step=step, lr=lr, seconds=seconds)
    return replace(found, updates=trainer.state.updates, skipped=skipped)


class Stepper:
    """Trains step by step, and tells of each at once."""

    def __init__(self, trainer: Trainer, *, watchers: Sequence[Watcher] = (), referee: Referee | None = None) -> None:
        """`referee`, one of the `watchers`, runs a step again whose gradients are not finite."""
        self.trainer, self.watchers, self.referee = trainer, watchers, referee

    def step(self, microbatches: Sequence[Samples], *, step: int, stop: bool = False) -> list[Stepped]:
        """Train on this rank's microbatches of step `step`, see train_step; the steps that are now known to be right."""
        return [train_step(self.trainer, microbatches, step=step, stop=stop, watchers=self.watchers, referee=self.referee)]

    def settle(self) -> list[Stepped]:
        """Check what is not checked yet; the steps that are now known to be right."""
        return []


def accumulate(trainer: Trainer, microbatches: Sequence[Samples], *, check: Check | None = None) -> Accumulated:
    """Forwards, backwards and what adds their gradients up. `check`: of the weights it begins with, see Executor.run."""
    clock = trainer.executor.clock
    start = clock.mark()
    batches = to_batches(trainer, microbatches, valid=count_valid(microbatches, groups=trainer.groups))
    ready = clock.mark()
    executed = trainer.executor.run(batches, check=check)
    done = clock.mark()
    gradients.add_up(trainer.parameters, trainer.shared, trainer.groups)
    return Accumulated(executed, batches, [("data", start, ready), ("communication", done, clock.mark())])


def to_batches(trainer: Trainer, microbatches: Sequence[Samples], *, valid: int) -> list[Batch]:
    """A step's microbatches on the device. `valid`: targets of the whole global batch that count."""
    spec = trainer.spec
    return [
        to_batch(
            samples,
            Cut.of(trainer),
            device=trainer.device,
            loss_scale=1 / valid,
            z_loss=spec.train.z_loss,
            sequences=spec.train.global_batch,
        )
        for samples in microbatches
    ]


def compute(trainer: Trainer, microbatches: Sequence[Samples], *, step: int, stop: bool = False) -> Computed:
    """Gradients, and what all ranks know of them. Raises gradients.NotFinite."""
    return conclude(trainer, accumulate(trainer, microbatches), step=step, stop=stop)


def conclude(trainer: Trainer, accumulated: Accumulated, *, step: int, stop: bool = False) -> Computed:
    """Wait for what all ranks know. Raises gradients.NotFinite."""
    computed = gathered(trainer, accumulated, stop=stop)
    decision = decision_of(trainer, computed.totals)
    if isinstance(decision, Skip | Stop):
        raise refusal(trainer, decision.reason, step=step)
    return computed


def gathered(trainer: Trainer, accumulated: Accumulated, *, stop: bool) -> Computed:
    """Wait for what all ranks know."""
    start = trainer.executor.clock.mark()
    totals = Gathering(trainer, accumulated.executed, stop=stop).wait()
    waited = ("communication", start, trainer.executor.clock.mark())
    return Computed(totals, replace(accumulated, marks=[*accumulated.marks, waited]))


def decision_of(trainer: Trainer, totals: Totals, *, tries: int = 0, repeatable: bool = False) -> Decision:
    """What becomes of the update; the same on every rank."""
    vitals = Vitals(totals.loss, totals.norm, skipped=trainer.state.skipped, tries=tries, repeatable=repeatable)
    return decide(vitals, optimizer=trainer.spec.optimizer, stability=trainer.spec.stability)


def carry_out(
    trainer: Trainer, decision: Decision, *, step: int, watchers: Sequence[Watcher] = (), referee: Referee | None = None
) -> str:
    """Do what was decided for a step whose gradients are there, and drop them; why the update was left out, if it was.

    Raises gradients.NotFinite, or what the referee raises, if the run is to stop.
    """
    match decision:
        case Update(factor):
            clipped_update(trainer, factor, step=step, watchers=watchers)
            trainer.take_in_loads()
            tell(watchers, "updated", trainer, step)
            skipped = ""
        case Skip(reason):
            skipped = f"{reason}; NaN or Inf in {gradients.where_not_finite(trainer.parameters, world=trainer.groups.world)}"
            trainer.drop()
            trainer.state.skipped += 1
            tell(watchers, "skipped", trainer, step)
        case Stop(reason):
            error = refusal(trainer, reason, step=step)
            if referee is not None:
                referee.blame(error, step)
            raise error
        case Rerun():
            raise AssertionError("a step that is computed again has nothing to carry out")
    tell(watchers, "resting", trainer, step)
    return skipped


def refusal(trainer: Trainer, reason: str, *, step: int) -> gradients.NotFinite:
    """The error of a step that ends the run, which names the parameters. All ranks call it together."""
    where = gradients.where_not_finite(trainer.parameters, world=trainer.groups.world)
    return gradients.not_finite(step, reason=reason, where=where)


def update(trainer: Trainer, computed: Computed, *, step: int, watchers: Sequence[Watcher] = ()) -> None:
    """Clip the gradients, update the weights, drop the gradients."""
    carry_out(trainer, decision_of(trainer, computed.totals), step=step, watchers=watchers)


def clipped_update(trainer: Trainer, factor: float, *, step: int, watchers: Sequence[Watcher] = ()) -> None:
    """Multiply the gradients by `factor`, update the weights, drop the gradients."""
    gradients.scale([p.grad for p in trainer.parameters.values() if p.grad is not None], factor)
    tell(watchers, "before_update", trainer, step)
    trainer.update()
    trainer.state.drop_gradients()


class Gathering:
    """The totals on their way: one gather over all ranks; sums are formed in rank order, so every rank gets the same bits in every run."""

    def __init__(self, trainer: Trainer, executed: Executed, *, stop: bool) -> None:
        names = gradients.counted(trainer.parameters, trainer.shared, trainer.groups)
        squares = gradients.sum_of_squares(p.grad for n in names if (p := trainer.parameters[n]).grad is not None)
        loss = executed.nll.double() * (trainer.groups.coordinates["tensor"] == 0)  # tensor ranks all have the whole loss
        other = torch.tensor([float(stop), float(resident_bytes())], dtype=torch.float64, device=trainer.device)
        self._mine = torch.cat((torch.stack((squares.to(trainer.device), loss)), other))
        self._everyone = self._mine.new_empty(trainer.groups.world.size() * len(self._mine))
        self._work: Any = dist.all_gather_into_tensor(self._everyone, self._mine, group=trainer.groups.world, async_op=True)
        self._copied: Any = None
        if trainer.device.type == "cuda":  # to the host beside the stream that computes, or waiting would mean until that is idle
            with torch.cuda.stream(torch.cuda.Stream(trainer.device)):
                self._work.wait()
                self._on_host = self._everyone.to("cpu", non_blocking=True)
                self._copied = torch.cuda.Event()
                self._copied.record()

    def wait(self) -> Totals:
        if self._copied is not None:
            self._copied.synchronize()
            table: Tensor = self._on_host
        else:
            self._work.wait()
            table = self._everyone
        table = table.view(-1, len(self._mine))
        return Totals(
            squares=float(table[:, 0].sum()),
            loss=float(table[:, 1].sum()),
            stop=bool(table[:, 2].any()),
            resident=int(table[:, 3].max()),
        )


class Balance:
    """How even the experts' loads of the last update were: the worst of all layers, wherever they are, on its way from all ranks."""

    def __init__(self, trainer: Trainer) -> None:
        self._work: Any = None
        if any(isinstance(block.mlp, MoeSpec) for block in trainer.model.blocks):
            found = [metrics for moe in trainer.routers().values() if (metrics := moe.metrics())]
            worst = [max((sign * m[name] for m in found), default=-math.inf) for name, sign in WORST.items()]
            self._worst = torch.tensor(worst, dtype=torch.float64, device=trainer.device)
            self._work = dist.all_reduce(self._worst, op=dist.ReduceOp.MAX, group=trainer.groups.world, async_op=True)

    def wait(self) -> dict[str, float]:
        """By their names; empty for a model without experts."""
        if self._work is None:
            return {}
        self._work.wait()
        return {name: sign * value for (name, sign), value in zip(WORST.items(), self._worst.tolist(), strict=True)}


def stepped(
    trainer: Trainer,
    accumulated: Accumulated,
    totals: Totals,
    experts: dict[str, float],
    optimizer: Mark,
    *,
    step: int,
    lr: float,
    seconds: float,
) -> Stepped:
    """What there is to tell of a step whose work on this rank is done."""
    spec, executed = trainer.spec, accumulated.executed
    return Stepped(
        step=step,
        loss=totals.loss,
        grad_norm=totals.norm,
        lr=lr,
        tokens=spec.train.global_batch * spec.train.seq_len,
        seconds=seconds,
        breakdown=_breakdown(trainer, executed, [*accumulated.marks, optimizer]),
        memory=trainer.state.bytes() | {"resident": totals.resident, "peak": peak_bytes(trainer.device)},
        stop=totals.stop,
        spans=_spans(trainer, accumulated),
        experts=experts,
    )


def _breakdown(trainer: Trainer, executed: Executed, parts: list[Mark]) -> dict[str, float]:
    """Seconds by what they went to. Waiting for another rank counts as `bubble`, starting messages as communication."""
    clock = trainer.executor.clock
    seconds = dict.fromkeys((*(name for name, _, _ in parts), "forward", "backward", "bubble"), 0.0)
    for name, start, end in parts:
        seconds[name] += clock.seconds(start, end)
    for name, start, end in executed.marks:
        kind = name.lstrip("0123456789").rstrip("0123456789")
        seconds[_WENT_TO.get(kind, "communication")] += clock.seconds(start, end)
    return seconds


_WENT_TO = {"F": "forward", "B": "backward", "I": "backward", "W": "backward", "WAIT": "bubble", "CHECK": "bubble"}
_WENT_TO |= {"LOST": "bubble", "UNDO": "optimizer"}  # of a row that was begun with an update that had to be undone


def _spans(trainer: Trainer, accumulated: Accumulated) -> list[tuple[str, float, float]]:
    """When each action ran, in seconds since the step began."""
    clock, (_, zero, _) = trainer.executor.clock, accumulated.marks[0]
    return [(name, clock.seconds(zero, start), clock.seconds(zero, end)) for name, start, end in accumulated.executed.marks]


def peak_bytes(device: torch.device) -> int:
    """The most bytes this rank ever held: on the GPU where it has one, else of its process."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else most_resident_bytes()
