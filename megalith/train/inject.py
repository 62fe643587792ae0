"""Injects faults into tensors, computations and data shards. `train.offload.faults` injects faults into files with state, `fleet.actions`
into processes, connections and other files."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalith.fleet import hooks
from megalith.fleet.actions import ACTIONS, happen
from megalith.fleet.hooks import Faults
from megalith.fleet.injection import OWN_DATA, Injection
from megalith.parallel.tables import StreamedTable
from megalith.train.assemble import Trainer
from megalith.train.offload.faults import FAULTS, hurt

FLIPPED_BIT = 20  # of fp32's mantissa: a change of about 1 % of the value, far from NaN
WRONG_BY = 0.37
Reads = Callable[[int], tuple[Path, int, int]]
"""A function that returns, for a step, a data shard that this rank reads in this step, and the range of bytes."""

SLOW_SECONDS, SLOW_STEPS = 0.15, 3.0  # a slow rank works so much longer a step, or so many times what its steps took before


def step_hook(*, reads: Reads) -> "Injector | None":
    """Return the injector of this rank's faults; None if none are planned."""
    found = hooks.find()
    return Injector(found, reads) if found is not None else None


class Injector:
    """A step hook that causes a rank's planned faults at their points in the step."""

    def __init__(self, found: Faults, reads: Reads) -> None:
        self._faults, self._reads = found, reads
        self._hooks: list[Any] = []
        self._begun: float | None = None
        self._least = float("inf")  # seconds that this thread worked between the beginnings of two steps

    def before_step(self, trainer: Trainer, step: int) -> None:
        """At the start of a step, flip bits of its data, and prepare the faults in its gradients."""
        self._remove_hooks()
        now = time.thread_time()
        if self._begun is not None:
            self._least = min(self._least, now - self._begun)
        self._begun = now
        hooks.at("step", step)
        for one in self._faults.due("reading", step):
            flip_data(one, *self._reads(step))
        for one in self._faults.due("gradients", step):
            stage = trainer.runners[max(trainer.runners)].stage
            parameter = next(p for p in stage.parameters() if p.requires_grad)
            table = next((table for table in trainer.tables.values() if table.weight.compute is parameter), None)
            spoil = self._spoiler(one)
            self._hooks.append(parameter.register_hook(spoil) if table is None else _TableHook(table, spoil))

    def after_reduction(self, trainer: Trainer, step: int, nll: torch.Tensor) -> None:
        """Do nothing when gradients are complete."""

    def before_update(self, trainer: Trainer, step: int) -> None:
        """Do nothing when gradients are clipped."""

    def after_update(self, trainer: Trainer, step: int) -> None:
        """Do nothing after the update."""

    def update_skipped(self, trainer: Trainer, step: int) -> None:
        """Do nothing: the update was skipped."""

    def after_step(self, trainer: Trainer, step: int) -> None:
        """Cause the faults that are due between steps, when the step's checks are done and the state does not change until the next
        step."""
        for one in self._faults.due("resting", step):
            if one.kind in ACTIONS:
                happen(one, self._faults.rank_info)
            elif one.kind in FAULTS:
                hurt(trainer.state, one)
            else:
                flip(trainer, one)

    def _spoiler(self, one: Injection) -> Callable[[Tensor], Tensor]:
        came: list[int] = []

        def spoil(grad: Tensor) -> Tensor:
            if came and one.kind != "gradient":
                return grad
            came.append(one.number)
            if one.kind in ACTIONS:
                happen(one, self._faults.rank_info)
            if one.kind == "slow":
                work(max(SLOW_SECONDS, SLOW_STEPS * self._least) if self._least < float("inf") else SLOW_SECONDS)
                return grad
            spoilt = grad.clone()
            spoilt.view(-1)[int(one.place * grad.numel())] += torch.nan if one.kind == "nan" else WRONG_BY
            return spoilt

        return spoil

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


class _TableHook:
    """Changes the gradients of a table's tiles. A table that is read in tiles has no other gradient that a hook could change."""

    def __init__(self, table: StreamedTable, change: Callable[[Tensor], Tensor]) -> None:
        self._table, give = table, table.give
        table.give = lambda rows, gradient: give(rows, change(gradient))

    def remove(self) -> None:
        """Make the table take gradients unchanged again."""
        vars(self._table).pop("give", None)


def flip_data(one: Injection, shard: Path, begin: int, end: int) -> None:
    """Flip one bit of a shard between bytes `begin` and `end`, before these bytes are read. The shard must be a campaign's own copy of the
    data."""
    assert (shard.parent / OWN_DATA).exists(), f"{shard} is not a campaign's own copy of the data, so no bit may be flipped in it"
    at = begin + int(one.place * (end - begin))
    with shard.open("r+b", buffering=0) as file:
        byte = os.pread(file.fileno(), 1, at)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 1]), at)
    print(
        f"fault {one.number}: flipped a bit of byte {at} of {shard.name} before the data of step {one.step} is read", flush=True
    )


def work(seconds: float) -> None:
    """Keep this thread busy for `seconds`, because a throttled device computes for longer and does not idle."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@torch.no_grad()
def flip(trainer: Trainer, one: Injection) -> None:
    """Flip one bit of a weight or of a moment that this rank holds."""
    shares = trainer.state.shares("weights" if one.kind == "weight" else "optimizer")
    held = {name: share for name, share in shares.items() if share.numel()}
    names = sorted(name for name in held if held[name].dtype == torch.float32)
    if not names:
        print(f"fault {one.number}: no bit was flipped after step {one.step}, because no {one.kind} is in memory", flush=True)
        return
    name = names[int(one.place * len(names))]
    flat = held[name].view(-1)
    bits = flat[int(one.place * flat.numel()) :][:1].view(torch.int32)
    bits.bitwise_xor_(1 << FLIPPED_BIT)
    print(f"fault {one.number}: flipped a bit of {name} after step {one.step}", flush=True)
