"""Summarises a step for the log: its totals over all ranks, its seconds by use, and the balance of the experts' loads."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from megalith.events import Event
from megalith.machine.resident import most_resident_bytes
from megalith.models.batch import Batch
from megalith.parallel.execute import RowResult
from megalith.spec.model import MoeSpec
from megalith.spec.noise import Noise
from megalith.train.assemble import Trainer
from megalith.train.measure.noise import noise_of
from megalith.train.stability.loss_scale import Overflow, Scale

Mark = tuple[str, Any, Any]  # what, from when, to when

WORST = {"max_load": 1.0, "entropy": -1.0, "dropped": 1.0}
"""The measures of the experts' balance. 1: a larger value is worse; -1: a smaller value is worse."""


@dataclass(frozen=True)
class StepTotals:
    """Sums and extremes over all ranks at the end of a step."""

    squares: float
    loss: float
    stop: bool
    resident: int
    apart: float = 0.0  # squares of the gradients that `trainer.noise` looks at, before they are added up over data ranks
    together: float = 0.0  # and after

    @property
    def norm(self) -> float:
        """The global norm of the gradients."""
        return self.squares**0.5


@dataclass(frozen=True)
class StepGradients:
    """A step whose gradients are complete but not yet clipped."""

    executed: RowResult
    batches: list[Batch]
    marks: list[Mark]
    scale: Scale | None  # the loss scale that the gradients had until then

    def followed_by(self, second: "StepGradients") -> "StepGradients":
        """Return this pass over the step with the times of both passes."""
        executed = replace(self.executed, marks=[*self.executed.marks, *second.executed.marks])
        return replace(self, executed=executed, marks=[*self.marks, *second.marks])


@dataclass(frozen=True)
class Outcome:
    """The fate of a step's update. `skipped`: the reason why the update was skipped; empty: it was made. `spike`: the update was skipped
    because of a spike. `events`: events about the step. `overflow`: the overflow that lowered the loss scale. `clipped`: the gradients were
    clipped before the update. `passes`: the number of passes over the step that the update took. `second`: the second one, until its times
    are known."""

    skipped: str = ""
    spike: bool = False
    events: tuple[Event, ...] = ()
    overflow: Overflow | None = None
    clipped: bool = False
    passes: int = 1
    second: StepGradients | None = None


NO_OUTCOME = Outcome()


@dataclass(frozen=True)
class StepResult:
    """Result of one step. Totals are over all ranks; `seconds` and `breakdown` are those of this rank."""

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
    outcome: Outcome = NO_OUTCOME
    scale: float | None = None  # the loss scale that it was computed with, if any
    noise: Noise | None = None  # noise estimates from the step's gradients, if there are any

    @property
    def overflow(self) -> Overflow | None:
        """The overflow because of which the update was skipped; None if there was none."""
        return self.outcome.overflow

    @property
    def passes(self) -> int:
        """Number of passes (forwards and backwards) over the step that the update took. The number is two if the first pass freed the
        gradients inside the backward but made no update, or made an update that must be undone and made otherwise (for example with
        clipping)."""
        return self.outcome.passes

    @property
    def skipped(self) -> str:
        """The reason why the update was skipped; empty if it was made."""
        return self.outcome.skipped


class Balance:
    """The balance of the experts' loads in the newest update: for each measure, the worst value of all layers on all ranks."""

    def __init__(self, trainer: Trainer) -> None:
        self._work: Any = None
        if any(isinstance(block.mlp, MoeSpec) for block in trainer.model.blocks):
            found = [metrics for moe in trainer.routers().values() if (metrics := moe.metrics())]
            worst = [max((sign * m[name] for m in found), default=-math.inf) for name, sign in WORST.items()]
            self._worst = torch.tensor(worst, dtype=torch.float64, device=trainer.device)
            self._work = dist.all_reduce(self._worst, op=dist.ReduceOp.MAX, group=trainer.groups.world, async_op=True)

    def wait(self) -> dict[str, float]:
        """Wait until the measures are known, and return them by name; empty for a model without experts."""
        if self._work is None:
            return {}
        self._work.wait()
        return {name: sign * value for (name, sign), value in zip(WORST.items(), self._worst.tolist(), strict=True)}


def stepped(
    trainer: Trainer,
    accumulated: StepGradients,
    totals: StepTotals,
    experts: dict[str, float],
    optimizer: Mark,
    *,
    step: int,
    lr: float,
    seconds: float,
) -> StepResult:
    """Return the summary of a finished step."""
    spec, executed = trainer.spec, accumulated.executed
    return StepResult(
        step=step,
        loss=totals.loss,
        grad_norm=totals.norm,
        lr=lr,
        tokens=trainer.samples * spec.train.seq_len,
        seconds=seconds,
        breakdown=_breakdown(trainer, executed, [*accumulated.marks, optimizer]),
        memory=trainer.state.bytes() | {"resident": totals.resident, "peak": peak_bytes(trainer.device)},
        stop=totals.stop,
        spans=_spans(trainer, accumulated),
        experts=experts,
        scale=accumulated.scale and accumulated.scale.value,
        noise=None if trainer.filled else noise_of(spec, small=totals.apart, large=totals.together),
    )


def _breakdown(trainer: Trainer, executed: RowResult, parts: list[Mark]) -> dict[str, float]:
    """Return the seconds of a step by use. A wait for another rank counts as `bubble`; starting messages counts as communication."""
    clock = trainer.executor.clock
    seconds = dict.fromkeys((*(name for name, _, _ in parts), "forward", "backward", "bubble"), 0.0)
    for name, start, end in parts:
        seconds[name] += clock.seconds(start, end)
    for name, start, end in (mark for mark in executed.marks if mark[0] != "UPDATE"):  # an update runs while actions compute
        seconds[_went_to(name)] += clock.seconds(start, end)
        if name == "UPDATE_WAIT":  # inside an action, it is no part of the action's own time
            for other, begin, finish in executed.marks:
                if other not in (name, "UPDATE") and clock.seconds(begin, start) >= 0 and clock.seconds(end, finish) >= 0:
                    seconds[_went_to(other)] -= clock.seconds(start, end)
                    break
    return seconds


def _went_to(name: str) -> str:
    return _WENT_TO.get(name.lstrip("0123456789").rstrip("0123456789"), "communication")


_WENT_TO = {"F": "forward", "B": "backward", "I": "backward", "W": "backward", "WAIT": "bubble", "CHECK": "bubble"}
_WENT_TO |= {"LOST": "bubble", "UNDO": "optimizer"}  # of a row that was begun with an update that had to be undone
_WENT_TO |= {"UPDATE_WAIT": "optimizer"}


def _spans(trainer: Trainer, accumulated: StepGradients) -> list[tuple[str, float, float]]:
    """Return when a step's actions ran. Updates of the previous step may have begun before this one."""
    clock, (_, zero, _) = trainer.executor.clock, accumulated.marks[0]
    spans = ((name, clock.seconds(zero, start), clock.seconds(zero, end)) for name, start, end in accumulated.executed.marks)
    return [(name, max(0.0, start), end) for name, start, end in spans if end > 0]


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory of this rank in bytes: memory on its GPU or, without a GPU, memory of its process."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else most_resident_bytes()
