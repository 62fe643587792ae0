"""Weights that are made from master weights on disk: what a bad disk does is named."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from megalith.spec.run import RunSpec
from megalith.train.offload.home import Disk
from megalith.train.offload.slot_file import PAGE, StateFileError, memory_of
from megalith.train.step import compute
from tests.parallel.running import microbatches, trainer_of
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


def test_no_room_for_master_weights_while_the_model_is_built_is_named(tmp_path: Path) -> None:
    for said in run_ranks(_without_room, 2, _spec(tmp_path, 2)):
        assert f"bytes of weights have no room in {tmp_path} while the model is built (No space left on device)" in said
        assert "plan.state.folder" in said
