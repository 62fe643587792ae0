"""Small runs with planted spikes (`megalith.prove.spikes`)."""

from pathlib import Path
from typing import Any

import torch

from megalith.prove.spikes import Fault, RunEnd, train
from megalith.spec.run import RunSpec
from megalith.train.assemble import Trainer
from megalith.train.step_hooks import StepHook
from tests.keys import KEY
from tests.specs import tiny_run
from tests.train.prepared import VOCAB

BATCH = 8


class Wrong(StepHook):
    """A step hook that makes a weight badly wrong after each of some steps, once."""

    def __init__(self, *steps: int) -> None:
        self.left = set(steps)

    @torch.no_grad()
    def after_step(self, trainer: Trainer, step: int) -> None:
        share = trainer.state.shares("weights").get("weights.head.norm.weight")
        if step in self.left and share is not None and share.numel():
            share[0] += 300.0
        self.left.discard(step)


def spiky_run(data: str, *, plan: dict[str, Any] | None = None, steps: int = 60, **stability: Any) -> RunSpec:
    """A run whose bands are computed from 16 updates, with copies kept every ten steps."""
    return tiny_run(
        model={"layers": 2, "vocab": VOCAB},
        plan=plan or {},
        data={"path": data},
        train={"steps": steps, "global_batch": BATCH},
        optimizer={"lr": 3e-3, "warmup": 4, "schedule": "constant"},
        stability={"window": 16, "keep_every": 10, "patience": 4} | stability,
        fleet={"verify_every": 0, "digest": False},
    )


def spike(rank: int, spec: RunSpec, folder: Path, faults: tuple[Fault, ...], wrong: tuple[int, ...] = (), **rest: Any) -> RunEnd:
    """Train on one of the plan's ranks. After each step in `wrong`, a weight is made wrong."""
    return train(rank, spec, folder, faults, key=KEY, step_hooks=[Wrong(*wrong)], **rest)
