"""A checkpoint folder is complete or absent, damage is named, and old checkpoints are deleted."""

import json
import os
from pathlib import Path

import pytest

from megalith import disk
from megalith.checkpoint import folder as files
from megalith.checkpoint.folder import Chunk, DamagedCheckpointError, Entry, Manifest


def make(folder: Path, step: int, *, content: bytes = b"values", keep: int = 9) -> Path:
    """Commit a checkpoint that consists of one file with arbitrary content."""
    folder.mkdir(exist_ok=True)
    written = folder / files.temporary(step)
    written.mkdir()
    (written / "rank-00000.safetensors").write_bytes(content)
    index = {"step": Entry((), "I64", (Chunk((), (), "rank-00000.safetensors"),))}
    digests = {
        files.INDEX: files.write_index(written, index),
        "rank-00000.safetensors": files.FileDigest(len(content), files._digest(content)),
    }
    files.write_manifest(written, Manifest(step, files.next_order(folder), {"step": step}, digests))
    path = files.commit(written, step)
    assert files.prune(folder, keep=keep) == []
    return path


def steps(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in files.committed(folder)]


def test_a_committed_checkpoint_is_intact_and_says_what_it_holds(tmp_path):
    path = make(tmp_path, 120)
    assert path.name == "step-00000120"
    assert files.verify(path) == []
    found = files.describe(tmp_path)
    assert (found.path, found.step, found.meta, found.tensors) == (path, 120, {"step": 120}, {"step": ((), "I64")})
    assert found.problems == ()
    assert found.bytes == sum((path / file).stat().st_size for file in (files.INDEX, "rank-00000.safetensors"))


def test_meta_comes_back_as_json_gives_it_back(tmp_path):
    meta = {"rng": [1, 2], "best": 0.1 + 0.2, 10: "ten", 2: "two", "text": "é", "spec": {"a": (1, 2)}}
    files.write_manifest(tmp_path, Manifest(1, 1, meta, {}))
    assert files.read_manifest(tmp_path).meta == json.loads(json.dumps(meta))


@pytest.mark.parametrize("file", [files.MANIFEST, files.INDEX, "rank-00000.safetensors"])
def test_a_changed_bit_anywhere_is_found_and_the_file_named(tmp_path, file):
    path = make(tmp_path, 1)
    content = bytearray((path / file).read_bytes())
    for place in range(len(content)):
        content[place] ^= 1
        (path / file).write_bytes(content)
        assert any(file in problem for problem in files.verify(path)), (file, place)
        content[place] ^= 1
    (path / file).write_bytes(content)
    assert files.verify(path) == []


@pytest.mark.parametrize("file", [files.MANIFEST, files.INDEX, "rank-00000.safetensors"])
def test_a_truncated_or_missing_file_is_found_and_named(tmp_path, file):
    path = make(tmp_path, 1)
    os.truncate(path / file, 3)
    assert any(file in problem for problem in files.verify(path))
    (path / file).unlink()
    (problem,) = files.verify(path)
    assert problem == f"step-00000001/{file} is missing"


def test_a_link_that_leads_nowhere_does_not_count_as_a_folder_without_checkpoints(tmp_path):
    (tmp_path / "checkpoints").symlink_to(tmp_path / "unmounted" / "checkpoints")
    with pytest.raises(OSError, match="leads to no folder now: mount its file system") as caught:
        files.committed(tmp_path / "checkpoints")
    assert disk.is_unavailable(caught.value), "an engine starts the run again, and a run in progress waits"
    make(tmp_path / "elsewhere", 3)
    (tmp_path / "checkpoints").unlink()
    (tmp_path / "checkpoints").symlink_to(tmp_path / "elsewhere")
    assert steps(tmp_path / "checkpoints") == [3]


def test_only_the_last_n_stay(tmp_path):
    for step in (10, 20, 30, 40):
        make(tmp_path, step, keep=2)
    assert steps(tmp_path) == [40, 30]


def test_a_run_sent_back_to_an_older_step_keeps_what_it_saves_since(tmp_path):
    """Steps 30 and 40 belong to a discarded past: the run continues from 25, not from 40."""
    for step in (20, 30, 40):
        make(tmp_path, step)
    make(tmp_path, 25, keep=2)
    assert steps(tmp_path) == [25, 40]
    assert files.latest(tmp_path) == tmp_path / "step-00000025"


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path):
    make(tmp_path, 10, content=b"old")
    path = make(tmp_path, 10, content=b"new")
    assert (path / "rank-00000.safetensors").read_bytes() == b"new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000010"]


def test_one_that_is_being_read_is_not_removed(tmp_path):
    old = make(tmp_path, 10)
    with files.reading(old):
        make(tmp_path, 20, keep=1)
        assert steps(tmp_path) == [20, 10]
    make(tmp_path, 30, keep=1)
    assert steps(tmp_path) == [30]


def test_unreadable_ones_never_take_the_place_of_one_that_can_be_loaded(tmp_path):
    make(tmp_path, 10)
    broken = make(tmp_path, 20)
    (broken / files.MANIFEST).unlink()
    assert files.latest(tmp_path) == tmp_path / "step-00000010"
    make(tmp_path, 30, keep=2)
    assert steps(tmp_path) == [30, 10]


def test_what_dead_saves_left_is_removed_and_nothing_else(tmp_path):
    make(tmp_path, 10)
    (tmp_path / files.temporary(20)).mkdir()
    (tmp_path / "notes").mkdir()
    files.clean(tmp_path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["notes", "step-00000010"]


def test_a_run_folder_a_folder_of_checkpoints_and_a_checkpoint_all_mean_the_newest_intact(tmp_path):
    checkpoints = tmp_path / "checkpoints"
    old, new = make(checkpoints, 10), make(checkpoints, 20)
    assert files.find(tmp_path) == files.find(checkpoints) == files.find(new) == new
    (new / "rank-00000.safetensors").write_bytes(b"valueS")
    warnings: list[str] = []
    assert files.find(tmp_path, warn=warnings.append) == old
    assert len(warnings) == 1
    assert "step-00000020/rank-00000.safetensors is altered" in warnings[0]
    with pytest.raises(DamagedCheckpointError, match=r"step-00000020/rank-00000\.safetensors is altered"):
        files.find(new)


def test_where_there_is_no_checkpoint_the_error_says_what_to_give(tmp_path):
    with pytest.raises(FileNotFoundError, match="Give a checkpoint"):
        files.find(tmp_path)
    make(tmp_path, 10)
    with pytest.raises(FileNotFoundError, match="the folder has \\['step-00000010'\\]"):
        files.find(tmp_path / "step-00000011")


def test_names_that_lead_out_of_the_folder_are_refused(tmp_path):
    files.write_manifest(tmp_path, Manifest(1, 1, {}, {"../secret": files.FileDigest(1, "")}))
    with pytest.raises(DamagedCheckpointError, match="outside its folder"):
        files.read_manifest(tmp_path)
    index = {"x": Entry((), "I64", (Chunk((), (), "../secret"),))}
    files.write_manifest(tmp_path, Manifest(1, 1, {}, {files.INDEX: files.write_index(tmp_path, index)}))
    with pytest.raises(DamagedCheckpointError, match="secret"):
        files.read_index(tmp_path, files.read_manifest(tmp_path))


def test_a_folder_without_a_checkpoint_is_distinguished_from_one_that_does_not_exist(tmp_path: Path) -> None:
    assert files.nothing_text(tmp_path).startswith(f"{tmp_path}: no checkpoint here. Give")
    assert "does not exist, so there is no checkpoint here (relative paths start at" in files.nothing_text(tmp_path / "absent")
    (tmp_path / "config.json").write_text("{}")
    assert f"Convert this model: megalith import {tmp_path} --out FOLDER" in files.nothing_text(tmp_path)
