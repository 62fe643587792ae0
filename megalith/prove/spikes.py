"""Injected loss spikes: train a run with faults, in this process or over ranks, with copies in memory to which the run can
rewind."""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megalith.checkpoint.checkpointer import Checkpointer
from megalith.checkpoint.memory import Memory
from megalith.data.stream import Batch, Stream
from megalith.events import EventLog
from megalith.fleet.heartbeat import Heartbeat
from megalith.fleet.rank_info import RankInfo
from megalith.fleet.secure.key import Key
from megalith.fleet.tiers import Source
from megalith.spec.run import RunSpec
from megalith.train.assemble import Trainer, assemble, mesh_groups
from megalith.train.copies import GOOD_COPIES
from megalith.train.guard import StateGuard
from megalith.train.loop import Loop
from megalith.train.measure.peak import Yardstick
from megalith.train.restore import Position, read_step, restore
from megalith.train.stability.history import room
from megalith.train.step_hooks import StepHook
from megalith.train.stream import open_stream
from megalith.train.validate import Validator

Kind = Literal["poison", "rate", "weight", "moment", "gradient"]
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Fault:
    """A fault that starts at step `step` (0 is the first); "poison" and "rate" last `lasts` steps.

    `strength`: for "poison" the fraction of random tokens, for "rate" the factor of the learning rate, otherwise the number of
    the flipped bit in fp32 (30: the exponent's highest). `place` in 0..1 selects the tensor and the element to flip. A flip in a
    gradient changes only the first computation of this gradient.
    """

    kind: Kind
    step: int
    strength: float
    lasts: int = 1
    place: float = 0.5

    @property
    def steps(self) -> range:
        return range(self.step, self.step + self.lasts)


class PoisonedStream:
    """A stream in which a fraction of the tokens of some samples is random. `read` has the numbers of all samples read so far."""

    def __init__(self, stream: Stream, faults: Sequence[Fault], *, batch: int) -> None:
        self._stream, self.read = stream, list[int]()
        self._shares = {n: f.strength for f in faults for step in f.steps for n in range(step * batch, (step + 1) * batch)}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def batch(self, part: Sequence[int]) -> Batch:
        """Return the samples whose numbers are in `part`. The random tokens are drawn with the number of the first sample as seed."""
        self.read += part
        found = self._stream.batch(part)
        share = max((self._shares.get(number, 0.0) for number in part), default=0.0)
        if not share:
            return found
        draw = np.random.default_rng(part[0])
        hit = draw.random(found.tokens.shape) < share
        noise = draw.integers(0, self._stream.vocab_size, found.tokens.shape)
        tokens = np.where(hit, noise, found.tokens)
        after = np.concatenate([tokens[:, 1:], found.targets[:, -1:]], axis=1)
        return replace(found, tokens=tokens, targets=np.where(found.targets < 0, found.targets, after))


class BitFlips(StepHook):
    """A step hook that flips bits. `step` is the run's current step."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.step = 0
        self._faults, self._come = faults, set[Fault]()
        self._hooks: list[Any] = []

    def _due(self, step: int, *kinds: Kind) -> list[Fault]:
        found = [one for one in self._faults if one.kind in kinds and one.step == step and one not in self._come]
        self._come.update(found)
        return found

    def before_step(self, trainer: Trainer, step: int) -> None:
        """Prepare the flip of a bit in a gradient, if one is due."""
        self.step = step
        for fault in self._due(step, "gradient"):
            stage = trainer.runners[max(trainer.runners)].stage
            computed = [parameter for parameter in stage.parameters() if parameter.requires_grad and parameter.numel()]
            self._hooks.append(_Once(computed[int(fault.place * len(computed))], fault))

    def after_step(self, trainer: Trainer, step: int) -> None:
        """Flip a bit of a weight or a moment, if one is due."""
        for fault in self._due(step, "weight", "moment"):
            shares = trainer.state.shares("weights" if fault.kind == "weight" else "optimizer")
            held = sorted(name for name, share in shares.items() if share.numel() and share.dtype == torch.float32)
            flip(shares[held[int(fault.place * len(held))]], fault)


class _Once:
    """Flips a bit of a parameter's gradient the first time that the gradient is computed."""

    def __init__(self, parameter: Tensor, fault: Fault) -> None:
        self._fault, self._hook = fault, parameter.register_hook(self._spoil)

    def _spoil(self, gradient: Tensor) -> Tensor:
        self._hook.remove()
        spoilt = gradient.clone()
        flip(spoilt, self._fault)
        return spoilt


@torch.no_grad()
def flip(tensor: Tensor, fault: Fault) -> None:
    """Flip bit `strength` of the element at `place` of an fp32 tensor."""
    flat = tensor.view(-1)
    number = flat[int(fault.place * flat.numel()) :][:1].view(torch.int32)
    (mask,) = struct.unpack("<i", struct.pack("<I", 1 << int(fault.strength)))
    number.bitwise_xor_(mask)


def hasty(trainer: Trainer, faults: Sequence[Fault], flips: BitFlips) -> Trainer:
    """Return the trainer with a learning rate that is wrong in some steps."""

    class Hasty(Trainer):
        @property
        def scheduled_lr(self) -> float:
            wrong = (one.strength for one in faults if one.kind == "rate" and flips.step in one.steps)
            return super().scheduled_lr * next(wrong, 1.0)

    return Hasty(**{each.name: getattr(trainer, each.name) for each in fields(Trainer)})


@dataclass(frozen=True)
class RunEnd:
    """The end of a run. `state`: unsharded tensors; `read`: numbers of the samples that this rank read; `validation`: the
    validation loss, NaN without validation."""

    state: dict[str, Tensor]
    position: Position
    read: list[int]
    validation: float


def train(
    rank: int,
    spec: RunSpec,
    folder: Path,
    faults: Sequence[Fault],
    *,
    key: Key,
    source: Source | None = None,
    step_hooks: Sequence[StepHook] = (),
    after: Callable[[Loop, int], object] = lambda loop, step: None,
) -> RunEnd:
    """Train as one of the plan's ranks, on the CPU. All ranks are on one node, whose copies in memory are in `folder`. `after` is called
    after each step. `source`: the copy to restore; None: the newest checkpoint, if there is one."""
    flips = BitFlips(faults)
    trainer = hasty(assemble(spec, groups=mesh_groups(spec, CPU), device=CPU), faults, flips)
    poison = [one for one in faults if one.kind == "poison"]
    stream: Any = PoisonedStream(open_stream(spec, "train"), poison, batch=spec.train.global_batch)
    rank_info = RankInfo(rank, spec.plan.ranks, ("n0",), folder / "memory", key=key)
    good = GOOD_COPIES if "rewind" in spec.stability.answers else 0
    memory = Memory(
        trainer.state.shares(), rank_info=rank_info, keep=spec.fleet.memory_keep, good=good, text_bytes=room(spec.stability)
    )
    checkpointer = Checkpointer(folder / "checkpoints", keep=spec.checkpoint.keep)
    position = restore(trainer, checkpointer, stream, group=None, warn=print, source=source, memory=memory)
    guard = StateGuard(
        trainer, rank_info=rank_info, read=lambda step, data: read_step(stream, spec, position, step, data), memory=memory
    )
    guard.begin(position.step, position.samples)
    validator = Validator(trainer, open_stream(spec, "validation")) if spec.validation.samples and spec.validation.every else None
    loop = Loop(
        trainer,
        stream,
        checkpointer,
        position,
        validator=None,
        yardstick=Yardstick(1.0, None, ""),
        log=EventLog(folder) if rank == 0 else None,
        heartbeat=Heartbeat.find(),
        guard=guard,
        step_hooks=[flips, *step_hooks],
    )
    loop.run(stop=False, after_step=lambda step: after(loop, step))
    whole = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in trainer.state.tensors().items()}
    loss = validator.run()[0] if validator else float("nan")
    return RunEnd({name: tensor.clone() for name, tensor in whole.items()}, loop.position, stream.read, loss)
