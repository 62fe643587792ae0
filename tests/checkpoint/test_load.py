"""Any plan loads the checkpoint of any other, bit for bit. Damage is found and named. Nothing from a file is ever executed."""

import errno
import os
import pickle
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from megalith.checkpoint import folder as files
from megalith.checkpoint.checkpointer import Checkpointer, SaveResult
from megalith.checkpoint.folder import AwayError, DamagedCheckpointError
from megalith.checkpoint.load import MismatchError, load
from megalith.checkpoint.read import read_full
from tests.checkpoint.states import Layout, State, differing, laid_out, local, values, zeros
from tests.full import sampled
from tests.ranks import run_ranks

SAVED: list[Layout] = [{}, {"dp_replicate": 2}, {"dp_shard": 4}, {"dp_shard": 3, "tensor": 2}, {"pipeline": 2, "dp_shard": 2}]
LOADED: list[Layout] = [{}, {"dp_shard": 3}, {"dp_shard": 2, "tensor": 2}, {"pipeline": 2, "dp_replicate": 2, "tensor": 2}]


def _save(rank: int, folder: Path, layout: Layout) -> list:
    checkpointer = Checkpointer(folder)
    checkpointer.save(7, laid_out(values(), layout), {"samples": 42}, asynchronous=False)
    return checkpointer.wait()


def _load_each(rank: int, folders: list[Path], layout: Layout) -> list:
    expected, state, found = laid_out(values(), layout), laid_out(zeros(), layout), []
    for folder in folders:
        for tensor in state.values():
            local(tensor).zero_()
        loaded = Checkpointer(folder).load(state)
        assert loaded is not None
        found.append((loaded.step, loaded.meta, differing(state, expected)))
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> list[Path]:
    """Return a folder with a checkpoint of the same values in every layout."""
    folders = [tmp_path_factory.mktemp("saved") for _ in SAVED]
    for folder, layout in zip(folders, SAVED, strict=True):
        outcomes = run_ranks(_save, prod(layout.values()), folder, layout)
        assert all(isinstance(outcome, SaveResult) for rank in outcomes for outcome in rank), outcomes
    return folders


@pytest.mark.slow
@pytest.mark.parametrize("layout", LOADED, ids=str)
@sampled(1)
def test_a_layout_loads_what_every_layout_saved_bit_for_bit(saved, layout):
    for rank in run_ranks(_load_each, prod(layout.values()), saved, layout):
        assert rank == [(7, {"samples": 42}, [])] * len(saved)


@pytest.mark.slow
def test_one_process_reads_whole_tensors_of_what_every_layout_saved(saved):
    for folder in saved:
        assert differing(read_full(folder), values()) == []
    assert read_full(saved[3], ["step"]).keys() == {"step"}
    with pytest.raises(KeyError, match=r"weights\.nothing"):
        read_full(saved[3], ["step", "weights.nothing"])


@pytest.mark.slow
def test_replicas_are_written_once_and_by_all_ranks(saved):
    """With two copies everything is held twice. Each copy writes about half, and together they write as much as one process."""
    alone, copies = (files.read_manifest(files.find(folder)) for folder in saved[:2])
    size = {file: digest.bytes for file, digest in copies.files.items() if file != files.INDEX}
    assert len(size) == 2
    assert abs(size["rank-00000.safetensors"] - size["rank-00001.safetensors"]) < 1500
    assert abs(sum(size.values()) - alone.files["rank-00000.safetensors"].bytes) < 1500  # headers


# --- one process from here on ------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Checkpoints of steps 10 and 20."""
    checkpointer = Checkpointer(tmp_path, keep=5)
    for step in (10, 20):
        checkpointer.save(step, values(seed=step), {"seed": step}, asynchronous=False)
    assert all(isinstance(outcome, SaveResult) for outcome in checkpointer.wait())
    return tmp_path


def _damage(path: Path, how: str) -> None:
    if how == "truncated":
        os.truncate(path, path.stat().st_size - 1)
    elif how == "missing":
        path.unlink()
    else:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 0x10
        path.write_bytes(content)


@pytest.mark.parametrize("how", ["truncated", "altered", "missing"])
@pytest.mark.parametrize("file", ["manifest.json", "index.json", "rank-00000.safetensors"])
def test_a_damaged_file_is_named_and_the_older_checkpoint_is_used(folder, file, how):
    _damage(folder / "step-00000020" / file, how)
    warnings: list[str] = []
    state = zeros()
    loaded = Checkpointer(folder, warn=warnings.append).load(state)
    assert loaded
    assert (loaded.step, loaded.meta) == (10, {"seed": 10})
    assert differing(state, values(seed=10)) == []
    assert len(warnings) == 1
    assert f"step-00000020/{file}" in warnings[0]


def test_when_none_is_intact_each_is_told_with_what_is_wrong(folder):
    _damage(folder / "step-00000010" / "rank-00000.safetensors", "missing")
    _damage(folder / "step-00000020" / "rank-00000.safetensors", "altered")
    with pytest.raises(DamagedCheckpointError) as error:
        Checkpointer(folder).load(zeros())
    assert "step-00000010/rank-00000.safetensors is missing" in str(error.value)
    assert "step-00000020/rank-00000.safetensors is altered" in str(error.value)


@pytest.mark.parametrize("what", ["manifest", "files"])
def test_a_checkpoint_that_cannot_be_read_is_not_damaged_and_no_other_takes_its_place(folder, monkeypatch, what):
    def away(*_: Any) -> NoReturn:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as now:
        if what == "manifest":
            now.setattr(files, "read_manifest", away)
        else:
            now.setattr(files.hashlib, "file_digest", away)
        for step in (None, 20):
            with pytest.raises(AwayError, match=r"cannot be read: .*Input/output error.*may be intact"):
                load(folder if step is None else folder / "step-00000020", zeros())
    loaded = load(folder, zeros())
    assert loaded.step == 20


def test_a_step_that_is_asked_for_is_not_replaced_by_another(folder):
    state = zeros()
    loaded = Checkpointer(folder).load(state, step=10)
    assert loaded
    assert differing(state, values(seed=10)) == []
    _damage(folder / "step-00000010" / "rank-00000.safetensors", "altered")
    with pytest.raises(DamagedCheckpointError, match="step-00000010"):
        Checkpointer(folder).load(state, step=10)
    with pytest.raises(FileNotFoundError, match="no checkpoint here"):
        Checkpointer(folder).load(state, step=15)


def test_a_new_run_has_nothing_to_load(tmp_path):
    assert Checkpointer(tmp_path / "checkpoints").load(zeros()) is None


def test_a_damaged_checkpoint_leaves_the_state_untouched(folder):
    """Digests are checked before the first value is copied."""
    _damage(folder / "step-00000020" / "rank-00000.safetensors", "altered")
    state = zeros()
    with pytest.raises(DamagedCheckpointError):
        load(folder / "step-00000020", state)
    assert differing(state, zeros()) == []


def _wrong(state: State) -> State:
    state["weights.blocks.7.mlp.up.weight"] = torch.zeros(2, 2)
    state["weights.head.norm.weight"] = torch.zeros(4)
    state["step"] = torch.zeros((), dtype=torch.int32)
    del state["samples"]
    return state


def test_every_difference_is_named_at_once(folder):
    with pytest.raises(MismatchError) as error:
        Checkpointer(folder).load(_wrong(zeros()))
    for text in (
        "weights.blocks.7.mlp.up.weight is not in the checkpoint",
        "weights.head.norm.weight has shape (3,) in the checkpoint, but (4,) here",
        "step is I64 in the checkpoint, but I32 here",
        "samples is in the checkpoint, but was not requested",
    ):
        assert text in str(error.value)


def _mismatch(rank: int, folder: Path) -> str:
    state = zeros()
    if rank == 1:
        state["only.here"] = torch.zeros(2)
    with pytest.raises(MismatchError) as error:
        Checkpointer(folder).load(state)
    return str(error.value)


def test_a_difference_on_one_rank_is_told_on_all(folder):
    texts = run_ranks(_mismatch, 2, folder)
    assert "only.here is not in the checkpoint" in texts[0]
    assert texts[0] == texts[1]


def test_a_part_of_the_state_can_be_loaded_and_converted(folder):
    """A run can start in this way from the weights of another run, without optimizer state and in another precision."""
    state = {key: value.bfloat16() for key, value in zeros().items() if key.startswith("weights.")}
    loaded = load(folder, state, partial=True, cast=True)
    assert loaded.path == folder / "step-00000020"
    assert differing(state, {key: values(seed=20)[key].bfloat16() for key in state}) == []


class _Trap:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def test_nothing_from_a_checkpoint_is_executed(folder, monkeypatch):
    """A planted pickle file is not read, and no unpickling function is called."""
    monkeypatch.chdir(folder)
    for name in (".metadata", "rank-00001.safetensors", "__0_0.distcp"):
        (folder / "step-00000020" / name).write_bytes(pickle.dumps(_Trap()))

    def refuse(*args, **kwargs):
        raise AssertionError("a checkpoint was unpickled")

    for module, function in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, function, refuse)
    state = zeros()
    assert Checkpointer(folder).load(state)
    assert differing(state, values(seed=20)) == []
    assert differing(read_full(folder), values(seed=20)) == []
    assert files.describe(folder).problems == ()
    assert not (folder / "executed").exists()


def test_no_pickle_is_written(folder):
    for path in (folder / "step-00000020").iterdir():
        assert path.suffix in {".json", ".safetensors"}
        assert not path.read_bytes().startswith(b"\x80")
