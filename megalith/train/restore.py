"""Where a run stands: its first step, its newest checkpoint, or other weights to start from."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megalith.checkpoint.checkpointer import Checkpointer
from megalith.checkpoint.load import load
from megalith.data.stream import Stream
from megalith.spec.run import RunSpec
from megalith.train.assemble import Trainer


@dataclass(frozen=True)
class Position:
    """Steps done and samples consumed: with the seed, all that the order of data and random numbers depend on."""

    step: int = 0
    samples: int = 0


def meta(position: Position, *, spec: RunSpec, stream: Stream) -> dict[str, Any]:
    """What a checkpoint says besides its tensors."""
    return {
        "position": asdict(position),
        "rng": {"seed": spec.train.seed, "rule": "every draw is a function of the seed and a name or step"},
        "data": stream.fingerprint,
        "spec": spec.model_dump(mode="json"),
    }


def restore(
    trainer: Trainer, checkpointer: Checkpointer, stream: Stream, *, group: dist.ProcessGroup | None, warn: Callable[[str], None]
) -> Position:
    """Load the newest intact checkpoint of the run, or `train.init_from`'s weights, or keep the first weights.

    Raises data errors if the data or tokenizer are not those the checkpoint was trained on.
    """
    spec = trainer.spec
    loaded = checkpointer.load(trainer.state())
    if loaded is not None:
        stream.check_same(loaded.meta["data"])
        return Position(**loaded.meta["position"])
    if spec.train.init_from:
        load(Path(spec.train.init_from), trainer.weights(), group=group, partial=True, cast=True, warn=warn)
    return Position()
