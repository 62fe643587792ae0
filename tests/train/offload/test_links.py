"""Checkpoints of state on disk: the file with the state gets a second name, and training continues in another file."""

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.checkpoint import folder as files
from megalith.checkpoint import tensors
from megalith.checkpoint.checkpointer import Checkpointer, SaveResult
from megalith.checkpoint.read import read_full
from megalith.checkpoint.shares import as_tensor, shares
from megalith.spec.run import RunSpec
from megalith.train.assemble import Trainer
from megalith.train.step import train_step
from tests.parallel.running import microbatches, trainer_of
from tests.ranks import run_ranks
from tests.specs import brief_run

pytestmark = pytest.mark.slow

Held = dict[str, Tensor]


def _spec(place: dict[str, Any], plan: dict[str, Any] | None = None) -> RunSpec:
    state = {"optimizer": "disk", **place}
    return brief_run(plan={"state": state, **(plan or {})}, model={"layers": 2}, train={"precision": "bf16"})


def _train(trainer: Trainer, first: int, steps: int) -> None:
    for step in range(first, first + steps):
        train_step(trainer, microbatches(trainer, step), step=step)


def _state(trainer: Trainer) -> Held:
    return {key: as_tensor(share).clone() for key, share in shares(trainer.state.laid()).items()}


def _linked(checkpoint: Path) -> list[str]:
    return sorted(path.name for path in checkpoint.glob("*.state-*"))


def _bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _ten_steps_later(rank: int, spec: RunSpec, folder: Path) -> tuple[Held, bool]:
    """Return the state as saved after two steps, and whether the checkpoint has the same bytes ten steps and five checkpoints
    later."""
    trainer, saver = trainer_of(spec), Checkpointer(folder, keep=9)
    _train(trainer, 0, 2)
    saver.save(2, trainer.state.laid(), {})
    before = _state(trainer)
    saver.wait()
    saved = _bytes_of(folder / files.name(2))
    for step in range(2, 12, 2):
        _train(trainer, step, 2)
        saver.save(step + 2, trainer.state.laid(), {})
    assert all(isinstance(outcome, SaveResult) for outcome in saver.wait())
    return before, saved == _bytes_of(folder / files.name(2))


@pytest.mark.parametrize("plan", [{}, {"data": 2, "zero": 3}], ids=str)
def test_a_checkpoint_has_its_bytes_ten_steps_later(plan: dict[str, Any], tmp_path: Path) -> None:
    """The state is a link, and beside it ranks write only compute weights."""
    spec, folder = _spec({"folder": str(tmp_path / "state")}, plan), tmp_path / "checkpoints"
    found = run_ranks(_ten_steps_later, spec.plan.ranks, spec, folder)
    assert all(same for _, same in found)
    checkpoint = folder / files.name(2)
    assert _linked(checkpoint) == [f"rank-{rank:05d}.state-0.safetensors" for rank in range(spec.plan.ranks)]
    assert not files.verify(checkpoint)
    linked = {
        chunk.file for key, entry in _index(checkpoint).items() for chunk in entry.chunks if not key.startswith("weights.loss")
    }
    assert linked == {*_linked(checkpoint)}
    whole = read_full(checkpoint)
    for before, _ in found:
        for key, share in before.items():
            halves = [whole[key]] if whole[key].shape == share.shape else [*whole[key].chunk(2)]
            assert any(torch.equal(half, share) for half in halves), key


def _index(checkpoint: Path) -> files.Index:
    return files.read_index(checkpoint, files.read_manifest(checkpoint))


def _copied(rank: int, spec: RunSpec, folder: Path) -> Held:
    """Return the state as saved if three steps pass before a byte of it is written."""
    trainer, saver = trainer_of(spec), Checkpointer(folder)
    _train(trainer, 0, 2)
    trained, write = threading.Event(), tensors.write

    def later(*args: Any) -> Any:
        assert trained.wait(600)
        return write(*args)

    def elsewhere(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensors, "write", later)
        patch.setattr(os, "link", elsewhere)
        saver.save(2, trainer.state.laid(), {}, asynchronous=True)
        before = _state(trainer)
        _train(trainer, 2, 3)
        trained.set()
        (outcome,) = saver.wait()
    assert isinstance(outcome, SaveResult), outcome
    return before


def test_on_another_file_system_it_is_copied_while_training_goes_on(tmp_path: Path) -> None:
    (before,) = run_ranks(_copied, 1, _spec({"folder": str(tmp_path / "state")}), tmp_path / "saved")
    checkpoint = files.latest(tmp_path / "saved")
    assert checkpoint is not None and not _linked(checkpoint) and not files.verify(checkpoint)
    whole = read_full(checkpoint)
    assert before.keys() == whole.keys() and all(torch.equal(whole[key], before[key]) for key in whole)


def _without_room(rank: int, spec: RunSpec, folder: Path) -> Held:
    trainer, saver = trainer_of(spec), Checkpointer(folder)
    _train(trainer, 0, 2)

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        saver.save(2, trainer.state.laid(), {}, asynchronous=True)
    before = _state(trainer)
    _train(trainer, 2, 1)
    assert isinstance(saver.wait()[0], SaveResult)
    return before


def test_without_room_for_another_file_training_waits_for_a_copy(tmp_path: Path) -> None:
    (before,) = run_ranks(_without_room, 1, _spec({"folder": str(tmp_path / "state")}), tmp_path / "saved")
    whole = read_full(tmp_path / "saved")
    assert all(torch.equal(whole[key], before[key]) for key in whole)


def _twice(rank: int, spec: RunSpec, folder: Path) -> None:
    trainer, saver = trainer_of(spec), Checkpointer(folder, keep=1)
    _train(trainer, 0, 2)
    for step in (2, 3):  # the step between them was skipped
        saver.save(step, trainer.state.laid(), {})
    saver.wait()


def test_ranks_that_hold_the_same_state_copy_a_part_each(tmp_path: Path) -> None:
    """Links to both files would keep all of the state twice."""
    spec = _spec({"folder": str(tmp_path / "state")}, {"data": 2, "zero": 0})
    run_ranks(_twice, 2, spec, tmp_path / "saved")
    checkpoint = tmp_path / "saved" / files.name(3)
    assert not _linked(checkpoint) and not files.verify(checkpoint)


def test_an_altered_byte_of_a_linked_file_is_named_and_an_older_checkpoint_is_used(tmp_path: Path) -> None:
    spec = _spec({"folder": str(tmp_path / "state")})
    run_ranks(_ten_steps_later, 1, spec, tmp_path / "saved")
    newest = tmp_path / "saved" / files.name(12)
    (name,) = _linked(newest)
    with (newest / name).open("r+b") as file:
        file.seek(-5000, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-5000, os.SEEK_END)
        file.write(bytes([byte ^ 1]))
    warnings = list[str]()
    assert files.find(tmp_path / "saved", warn=warnings.append).name == files.name(10)
    assert f"{newest.name}/{name} is altered: sum of 64-bit words" in warnings[0]


def test_an_older_version_would_name_the_format_of_a_linked_checkpoint(tmp_path: Path) -> None:
    run_ranks(_twice, 1, _spec({"folder": str(tmp_path / "state")}), tmp_path / "linked")
    run_ranks(_twice, 1, _spec({"optimizer": "host"}), tmp_path / "copied")
    formats = [files.latest(tmp_path / each) for each in ("linked", "copied")]
    assert ['"megalith-checkpoint-2"' in (one / files.MANIFEST).read_text() for one in formats if one] == [True, False]
