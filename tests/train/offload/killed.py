"""Runs of two ranks whose state or activations are off the device, and the moments at which a rank of them may be killed."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megalith.checkpoint.folder import committed
from megalith.parallel.data import Weight
from megalith.spec.run import RunSpec
from megalith.train.offload.home import Disk
from megalith.train.offload.retained import DiskCopy, DiskFile, HostCopy, HostMemory
from megalith.train.offload.slot_file import PAGE, SlotFile
from megalith.train.offload.slots import Slots
from tests.fleet.conftest import until
from tests.parallel.running import trainer_of
from tests.patience import PATIENCE
from tests.runs import signal_yourself, when
from tests.specs import tiny_run


class Moment(NamedTuple):
    """A function at a call of which a rank is killed. `calls`: each step makes at least so many; `last`: what the rank still does."""

    owner: type
    name: str
    calls: int
    last: Callable[..., object] = lambda *args, **named: None


def _half_a_chunk(slots: Slots, chunk: int, body: Tensor, *, counts: bool = False) -> None:
    half = slots.layout.rooms[chunk] // 2 // PAGE * PAGE
    os.pwrite(slots.unused(chunk).descriptor, body.numpy()[:half].data, slots.layout.starts[chunk])


def _half_a_tensor(file: DiskFile, start: int, content: Tensor) -> None:
    octets = content.view(torch.uint8).numpy()
    os.pwrite(file._file.fileno(), octets[: len(octets) // 2].data, start)


def _link(file: SlotFile, path: Path) -> None:
    _LINK(file, path)


_LINK = SlotFile.link
WRITTEN, LINKED = Moment(Slots, "write", 10, _half_a_chunk), Moment(SlotFile, "link", 1, _link)
"""Half of a chunk is written; a checkpoint has linked a file, and is not complete."""

TIERS: dict[str, tuple[dict[str, Any], tuple[Moment, ...]]] = {
    "host": ({"state": {"optimizer": "host"}}, (Moment(Weight, "take_over", 8),)),
    "disk": ({"state": {"optimizer": "disk"}}, (WRITTEN, LINKED)),
    "release": ({"state": {"optimizer": "disk", "release": True}}, (WRITTEN, LINKED)),
    "weights": (
        {"zero": 3, "state": {"optimizer": "disk", "weights": "disk"}},
        (WRITTEN, LINKED, Moment(Slots, "read", 20)),
    ),
    "retain host": ({"retain": {"blocks": "host"}}, (Moment(HostMemory, "put", 2), Moment(HostCopy, "fetch", 2))),
    "retain disk": (
        {"retain": {"blocks": "disk"}},
        (Moment(DiskFile, "write", 2, _half_a_tensor), Moment(DiskFile, "read", 2), Moment(DiskCopy, "fetch", 2)),
    ),
}
"""Each tier's plan, and the moments at which its runs are killed."""


class Kill(NamedTuple):
    """A kill of the second rank at call number `call` of a moment after step `step` has begun."""

    tier: str
    moment: Moment
    step: int
    call: int

    def __str__(self) -> str:
        return f"{self.tier}: {self.moment.owner.__name__}.{self.moment.name} {self.call} of step {self.step}"


def drawn(kills: int, *, seed: int) -> list[Kill]:
    """Draw kills at random moments, of each tier about equally many."""
    random, names = Random(seed), [*TIERS]
    found = []
    for number in range(kills):
        tier = names[number % len(names)]
        moment = random.choice(TIERS[tier][1])
        found.append(Kill(tier, moment, random.randrange(3, 6), random.randrange(moment.calls)))
    return found


def two_ranks(data: Path, plan: dict[str, Any], **parts: dict[str, Any]) -> RunSpec:
    """Return a run of eight steps on two ranks, some of which are clipped. Keyword arguments update further tables."""
    return tiny_run(
        model={"layers": 2, "vocab": 264},
        plan={"data": 2, "zero": 1} | plan,
        data={"path": str(data)},
        train={"steps": 8, "global_batch": 2, "seq_len": 32, "precision": "bf16"},
        checkpoint={"every": 2},
        optimizer={"clip": 1.4},
        **parts,
    )


@contextmanager
def killed(kill: Kill, folder: Path) -> Iterator[None]:
    """In runs in `folder` that are started meanwhile, kill the second rank, once there is a checkpoint to resume from."""
    owner, name, _, last = kill.moment
    whole, left = getattr(owner, name), list[int]()

    def arm() -> None:
        until(lambda: bool(committed(folder / "checkpoints")), seconds=PATIENCE)
        left.append(kill.call)

    def called(*args: Any, **named: Any) -> Any:
        if left and left[0] == 0:
            last(*args, **named)
            signal_yourself(signal.SIGKILL)
        if left:
            left[0] -= 1
        return whole(*args, **named)

    with pytest.MonkeyPatch.context() as patch, when("step", kill.step, rank=1, act=arm):
        patch.setattr(owner, name, called)
        yield


def chunks(rank: int, spec: RunSpec) -> int:
    """Return the chunks of a rank's file."""
    home = trainer_of(spec).state.home
    assert isinstance(home, Disk)
    return len(home.slots.layout.rooms)
