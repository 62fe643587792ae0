"""A run with state on disk in which a rank is killed repeatedly in the middle of an update."""

import os
import shutil
import signal
from collections.abc import Callable
from itertools import count as count_up
from pathlib import Path
from random import Random
from typing import Any

import pytest
from torch import Tensor

from megalith.checkpoint.digests import FileDigest
from megalith.events import RunStarted, of_kind, read
from megalith.spec.run import RunSpec
from megalith.train.offload.home import Disk
from megalith.train.offload.slot_file import PAGE, SlotFile
from megalith.train.offload.slots import Slots
from tests.parallel.running import trainer_of
from tests.ranks import run_ranks
from tests.runs import finish, start, train
from tests.specs import tiny_run


def two_ranks(data: Path, place: dict[str, Any], *, zero: int = 1, **parts: dict[str, Any]) -> RunSpec:
    """Return a run of eight steps on two ranks, with state at `place`. Keyword arguments update further tables."""
    return tiny_run(
        model={"layers": 2, "vocab": 264},
        plan={"data": 2, "zero": zero, "state": place},
        data={"path": str(data)},
        train={"steps": 8, "global_batch": 2, "seq_len": 32, "precision": "bf16"},
        checkpoint={"every": 2},
        **parts,
    )


def train_killed(spec: RunSpec, folder: Path, *, times: int, seed: int) -> int:
    """Train to the end, while the second rank dies this many times: the last time once a checkpoint has linked its file and is not
    complete, before that when half of a random chunk is written. Every third time the run begins anew, as each start may save one
    checkpoint more and the last one comes at the run's end. Return how often ranks started to train."""
    random = Random(seed)
    train(spec.model_copy(update={"train": spec.train.model_copy(update={"steps": 2})}), folder)
    number, begun, starts = run_ranks(chunks, 2, spec)[1], folder.with_name(f"{folder.name}-begun"), 0
    shutil.copytree(folder, begun)
    for time in range(times):
        if time % 3 == 0:
            starts += _starts(folder) - 1
            shutil.rmtree(folder)
            shutil.copytree(begun, folder)
        with pytest.MonkeyPatch.context() as patch:
            if time == times - 1:
                patch.setattr(SlotFile, "link", _dying_once_linked(1))
            else:  # the first writes are the master weights and the loaded state
                patch.setattr(Slots, "write", _dying(1, at=5 * number + random.randrange(2 * number)))
            codes = finish(start(spec, folder))
        assert codes[1] == -signal.SIGKILL
    train(spec, folder)
    return starts + _starts(folder)


def _starts(folder: Path) -> int:
    return len([*of_kind(read(folder), RunStarted)])


def chunks(rank: int, spec: RunSpec) -> int:
    """Return the chunks of a rank's file."""
    home = trainer_of(spec).state.home
    assert isinstance(home, Disk)
    return len(home.slots.layout.rooms)


def _dying_once_linked(rank: int) -> Callable[..., FileDigest]:
    """A `SlotFile.link` that is the rank's end."""
    link = SlotFile.link

    def linked(self: SlotFile, path: Path) -> FileDigest:
        digest = link(self, path)
        if os.environ.get("RANK") == str(rank):
            os.kill(os.getpid(), signal.SIGKILL)
        return digest

    return linked


def _dying(rank: int, *, at: int) -> Callable[..., None]:
    """A `Slots.write` that kills the rank at its `at`-th call."""
    write, calls = Slots.write, count_up()

    def written(self: Slots, chunk: int, body: Tensor, *, counts: bool = False) -> None:
        if os.environ.get("RANK") == str(rank) and next(calls) == at:
            other, layout = next(file for file in self._pair if file is not self._used[chunk]), self.layout
            half = layout.rooms[chunk] // 2 // PAGE * PAGE
            os.pwrite(other.descriptor, body.numpy()[:half].data, layout.starts[chunk])
            os.kill(os.getpid(), signal.SIGKILL)
        write(self, chunk, body, counts=counts)

    return written
