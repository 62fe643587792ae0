"""One optimizer step: batch, program, gradients, norm, update."""

import math
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalith.data.stream import Batch as Samples
from megalith.parallel import gradients
from megalith.parallel.execute import Executed
from megalith.train.assemble import Trainer
from megalith.train.batches import count_valid, to_batch
from megalith.train.optimizer import learning_rate


@dataclass(frozen=True)
class Stepped:
    """What one step did. Sums are over all ranks; `seconds` and `breakdown` are this rank's."""

    loss: float
    grad_norm: float
    lr: float
    tokens: int
    seconds: float
    breakdown: dict[str, float]
    memory: dict[str, int]
    stop: bool  # some rank was asked to stop
    spans: list[tuple[str, float, float]]  # action, start and end in seconds since the step began


@dataclass(frozen=True)
class _Totals:
    """Sums and extremes over all ranks that end a step, from one gather."""

    squares: float
    loss: float
    stop: bool
    resident: int


@dataclass(frozen=True)
class Computed:
    """A step up to its gradients, which are complete and unclipped on the parameters."""

    loss: float
    grad_norm: float
    resident: int
    stop: bool
    executed: Executed
    marks: dict[str, tuple[Any, Any]]


def train_step(trainer: Trainer, microbatches: Sequence[Samples], *, step: int, stop: bool = False) -> Stepped:
    """Train on this rank's microbatches of step `step` (0 is the first). All ranks call it together.

    `stop`: this rank was asked to stop; every rank learns of it. Raises gradients.NotFinite, before any weight has changed, naming
    step and parameters if the loss or a gradient is NaN or infinite.
    """
    began = time.perf_counter()
    computed = compute(trainer, microbatches, step=step, stop=stop)
    start = trainer.executor.clock.mark()
    lr = update(trainer, computed, step=step)
    marks = computed.marks | {"optimizer": (start, trainer.executor.clock.mark())}
    if trainer.device.type == "cuda":
        torch.cuda.synchronize(trainer.device)
    return Stepped(
        loss=computed.loss,
        grad_norm=computed.grad_norm,
        lr=lr,
        tokens=trainer.spec.train.global_batch * trainer.spec.train.seq_len,
        seconds=time.perf_counter() - began,
        breakdown=_breakdown(trainer, computed.executed, marks),
        memory=trainer.bytes() | {"resident": computed.resident, "peak": peak_bytes(trainer.device)},
        stop=computed.stop,
        spans=_spans(trainer, computed),
    )


def compute(trainer: Trainer, microbatches: Sequence[Samples], *, step: int, stop: bool = False) -> Computed:
    """Forwards, backwards and what adds their gradients up. Raises gradients.NotFinite."""
    spec, clock = trainer.spec, trainer.executor.clock
    start = clock.mark()
    valid = count_valid(microbatches, group=trainer.groups.data)
    masked, z_loss = spec.data.document_mask, spec.train.z_loss
    batches = [to_batch(s, masked=masked, device=trainer.device, loss_scale=1 / valid, z_loss=z_loss) for s in microbatches]
    ready = clock.mark()
    executed = trainer.executor.run(batches)
    done = clock.mark()
    gradients.add_up(trainer.parameters, trainer.shared, trainer.groups)
    totals = _totals(trainer, executed, stop=stop)
    norm = totals.squares**0.5
    if not math.isfinite(norm) or not math.isfinite(totals.loss):
        raise gradients.not_finite(trainer.parameters, step=step, loss=totals.loss, norm=norm)
    marks = {"data": (start, ready), "communication": (done, clock.mark())}
    return Computed(totals.loss, norm, totals.resident, totals.stop, executed, marks)


def update(trainer: Trainer, computed: Computed, *, step: int) -> float:
    """Clip the gradients, update the weights, drop the gradients; the learning rate."""
    spec = trainer.spec
    grads = [p.grad for p in trainer.parameters.values() if p.grad is not None]
    gradients.clip(grads, norm=computed.grad_norm, limit=spec.optimizer.clip)
    lr = learning_rate(step, spec=spec.optimizer, steps=spec.train.steps)
    trainer.optimizer.step(step, lr=lr)
    return lr


def _totals(trainer: Trainer, executed: Executed, *, stop: bool) -> _Totals:
    """One gather over all ranks; sums are formed in rank order, so every rank gets the same bits in every run."""
    names = gradients.counted(trainer.parameters, trainer.shared, trainer.groups)
    squares = gradients.sum_of_squares(p.grad for n in names if (p := trainer.parameters[n]).grad is not None)
    loss = executed.nll.double() * (trainer.groups.coordinates["tensor"] == 0)  # tensor ranks all have the whole loss
    other = torch.tensor([float(stop), float(resident_bytes())], dtype=torch.float64, device=trainer.device)
    mine = torch.cat((torch.stack((squares.to(trainer.device), loss)), other))
    everyone = mine.new_empty(dist.get_world_size() * len(mine))
    dist.all_gather_into_tensor(everyone, mine)
    table: Tensor = everyone.cpu().view(-1, len(mine))
    return _Totals(
        squares=float(table[:, 0].sum()),
        loss=float(table[:, 1].sum()),
        stop=bool(table[:, 2].any()),
        resident=int(table[:, 3].max()),
    )


def _breakdown(trainer: Trainer, executed: Executed, parts: dict[str, tuple[Any, Any]]) -> dict[str, float]:
    """Seconds by what they went to. Waiting for a neighbour counts as `bubble`, starting messages as communication."""
    clock = trainer.executor.clock
    seconds = {name: clock.seconds(*marks) for name, marks in parts.items()} | {"forward": 0.0, "backward": 0.0, "bubble": 0.0}
    for name, start, end in executed.marks:
        kind = name.lstrip("0123456789").rstrip("0123456789")
        into = {"F": "forward", "B": "backward", "I": "backward", "W": "backward", "WAIT": "bubble"}.get(kind, "communication")
        seconds[into] += clock.seconds(start, end)
    return seconds


def _spans(trainer: Trainer, computed: Computed) -> list[tuple[str, float, float]]:
    """When each action ran, in seconds since the step began."""
    clock, zero = trainer.executor.clock, computed.marks["data"][0]
    return [(name, clock.seconds(zero, start), clock.seconds(zero, end)) for name, start, end in computed.executed.marks]


def resident_bytes() -> int:
    """Bytes of this process that are in memory now (Linux; elsewhere the most there ever were)."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()
    except OSError:
        return _most_resident()


def _most_resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def peak_bytes(device: torch.device) -> int:
    """The most bytes this rank ever held: on the GPU where it has one, else of its process."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _most_resident()
