"""Weights that are made from master weights on disk: how they wait there, and the errors of a bad disk."""

import errno
import gc
import os
import resource
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.spec.run import RunSpec
from megalith.train.assemble import assemble, mesh_groups
from megalith.train.offload.aside import Aside
from megalith.train.offload.home import Disk
from megalith.train.offload.slot_file import PAGE, StateFileError, memory_of
from megalith.train.step import compute
from tests.parallel.running import CPU, microbatches, trainer_of
from tests.ranks import run_ranks
from tests.specs import brief_run


def _spec(folder: Path, data: int) -> RunSpec:
    state = {"optimizer": "disk", "weights": "disk", "folder": str(folder)}
    return brief_run(plan={"data": data, "zero": 3, "state": state}, train={"precision": "bf16"})


def _altered(rank: int, spec: RunSpec) -> str:
    """The error of a forward after a byte of the second block's master weights changed on the disk."""
    trainer = trainer_of(spec)
    home = trainer.state.home
    assert isinstance(home, Disk)
    ((chunk, _, _), *_) = home.pieces["blocks.1.mlp.up.weight"]
    file = home.slots._used[chunk]
    os.pwrite(file.descriptor, memory_of(PAGE).fill_(1).numpy().data, file.layout.starts[chunk])
    try:
        compute(trainer, microbatches(trainer), step=0)
    except StateFileError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_a_chunk_that_the_disk_altered_is_named_where_its_weights_are_gathered(tmp_path: Path) -> None:
    (said,) = run_ranks(_altered, 1, _spec(tmp_path, 1))
    assert "blocks.1.mlp.up.weight" in said and "the disk altered it. The run resumes from its newest checkpoint" in said


def _without_room(rank: int, spec: RunSpec) -> str:
    """The error of a model whose master weights find no room while it is built."""

    def full(**how: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megalith.train.offload.aside.tempfile.TemporaryFile", full)
        try:
            trainer_of(spec)
        except StateFileError as error:
            return str(error)
    return ""


@pytest.mark.slow
def test_no_room_for_master_weights_while_the_model_is_built_is_named(tmp_path: Path) -> None:
    for said in run_ranks(_without_room, 2, _spec(tmp_path, 2)):
        assert f"bytes of weights have no room in {tmp_path} while the model is built (No space left on device)" in said
        assert "plan.state.folder" in said


def _built_with_few_files(rank: int, spec: RunSpec) -> int:
    """Number of parameters that are built where 24 files may be open besides those of the groups."""
    groups = mesh_groups(spec, CPU)
    most = len([*Path("/proc/self/fd").iterdir()]) + 24
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return len(assemble(spec, groups=groups, device=CPU).parameters)


@pytest.mark.slow
def test_master_weights_wait_in_one_file_while_the_model_is_built(tmp_path: Path) -> None:
    spec = _spec(tmp_path, 1)
    model = spec.model.model_copy(update={"layers": 8})
    (parameters,) = run_ranks(_built_with_few_files, 1, spec.model_copy(update={"model": model}))
    assert parameters > 48
    assert not [*tmp_path.iterdir()], "no file has a name"


def _aside(folder: Path, *tensors: torch.Tensor) -> list[Callable[[], torch.Tensor]]:
    return [*map(Aside(folder), tensors)]


def test_what_waits_is_read_back_in_any_order(tmp_path: Path) -> None:
    tensors = [torch.randn(5, 3), torch.randn(7).bfloat16(), torch.randn(4, 6).t(), torch.randn(1)]
    for take, tensor in reversed([*zip(_aside(tmp_path, *tensors), tensors, strict=True)]):
        assert torch.equal(take(), tensor) and take().dtype == tensor.dtype


def test_what_cannot_be_read_back_is_named_with_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put = Aside(tmp_path)
    put(torch.randn(5))
    take = put(torch.randn(7))
    os.truncate(put._opened(), 36)
    with pytest.raises(
        StateFileError, match=rf"28 bytes of weights in {tmp_path} cannot be read back .* ends after 16 bytes of these weights"
    ):
        take()

    def broken(*given: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(StateFileError, match=rf"{tmp_path} cannot be read back .*Input/output error.*plan.state.folder"):
        take()


def test_a_folder_in_which_nothing_may_be_written_is_not_said_to_be_full(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(StateFileError, match=rf"20 bytes of weights cannot be written in {tmp_path}/file/state"):
        _aside(tmp_path / "file" / "state", torch.randn(5))


def _left_without_collection(rank: int, spec: RunSpec, places: list[str]) -> list[bool]:
    """Return whether the home of a trainer's state is still there when the trainer is gone and no garbage was collected."""
    found = []
    gc.disable()
    for place in places:
        state = spec.plan.state.model_copy(update={"optimizer": place, "weights": place})
        trainer = trainer_of(spec.model_copy(update={"plan": spec.plan.model_copy(update={"state": state})}))
        assert trainer.state.home is not None
        home = weakref.ref(trainer.state.home)
        compute(trainer, microbatches(trainer), step=0)
        del trainer
        found.append(home() is not None)
    return found


@pytest.mark.slow
def test_files_and_memory_go_with_the_trainer(tmp_path: Path) -> None:
    (left,) = run_ranks(_left_without_collection, 1, _spec(tmp_path, 1), ["host", "disk"])
    assert left == [False, False]
