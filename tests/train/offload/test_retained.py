"""A file takes what blocks keep, uses its places again, and names what goes wrong with it."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.fleet import causes
from megalith.fleet.exit_codes import ExitCode
from megalith.spec.plan import RetainSpec
from megalith.train.offload.retained import DiskFile, HostMemory, HostMemoryError, pinned, tiers_of
from megalith.train.offload.slot_file import StateFileError

CPU = torch.device("cpu")


def test_what_is_put_is_read_back_in_any_order(tmp_path: Path) -> None:
    tensors = [torch.randn(5), torch.randn(7).bfloat16(), torch.arange(3), torch.randn(5) > 0]
    tier = DiskFile(tmp_path)
    coming = [copy.fetch() for copy in reversed(tier.put(tensors))]
    for one, tensor in zip(reversed(coming), tensors, strict=True):
        assert torch.equal(one.wait(), tensor) and one.wait().dtype == tensor.dtype
    assert not [*tmp_path.iterdir()], "no file has a name"


def test_a_place_in_the_file_is_used_again_once_its_content_was_read(tmp_path: Path) -> None:
    tier = DiskFile(tmp_path)
    for step in range(6):
        copies = [tier.put([torch.full((4,), step), torch.ones(2)]) for _ in range(2)]
        assert all(torch.equal(first.fetch().wait(), torch.full((4,), step)) for first, _ in copies)
        assert tier.counted.held > 0
        del copies
        assert tier.counted.held == 0
    assert tier.counted.most == 2 * (4 * 8 + 2 * 4) == os.fstat(tier._file.fileno()).st_size


def test_a_disk_that_is_full_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    tier = DiskFile(tmp_path)
    monkeypatch.setattr(os, "pwritev", full)
    coming = tier.put([torch.ones(5)])[0].fetch()
    said = (
        rf"20 bytes cannot be written in {tmp_path} \(No space left on device\). "
        "Make room on the folder's disk, or .* plan.retain.folder"
    )
    with pytest.raises(StateFileError, match=said):
        coming.wait()
    tier.put([torch.ones(5)])
    with pytest.raises(StateFileError, match=said):  # two blocks may be on their way, and the third waits for the first
        tier.put([torch.ones(5)])


@pytest.mark.parametrize("harm", ["altered", "cut"])
def test_content_that_the_disk_altered_is_found(tmp_path: Path, harm: str) -> None:
    tier = DiskFile(tmp_path)
    (copy,) = tier.put([torch.ones(5)])
    copy.written.result()  # pyright: ignore[reportAttributeAccessIssue]
    if harm == "cut":
        os.truncate(tier._file.fileno(), 8)
    else:
        os.pwrite(tier._file.fileno(), b"\1", 3)
    with pytest.raises(StateFileError, match=rf"20 bytes in {tmp_path} differ from what was written: the disk altered them"):
        copy.fetch().wait()


def test_pinned_memory_that_the_host_refuses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*shape: object, **how: object) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory\nCompile with ...")

    like = torch.ones(5)
    monkeypatch.setattr(torch, "empty", refused)
    said = r"refuses 20 bytes of pinned memory; 1,000 bytes hold .* \(CUDA error: out of memory\)\. Use plan\.retain\.blocks = \"disk\""
    with pytest.raises(HostMemoryError, match=said) as caught:
        pinned(like, held=1000)
    assert causes.status(caught.value) == ExitCode.FAILED


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StateFileError, match=rf"no file can be created in {tmp_path}/file/below .*plan.retain.folder"):
        DiskFile(tmp_path / "file" / "below")


def test_the_file_goes_to_the_named_folder_or_to_that_of_the_run(tmp_path: Path) -> None:
    named, own = tmp_path / "named", tmp_path / "own"
    assert tiers_of(RetainSpec(), CPU, own) == {}
    assert isinstance(tiers_of(RetainSpec(blocks="host"), CPU, own)["host"], HostMemory)
    for spec, folder in ((RetainSpec(blocks="disk"), own), (RetainSpec(blocks="disk", folder=str(named)), named)):
        tier = tiers_of(spec, CPU, own)["disk"]
        assert isinstance(tier, DiskFile) and tier.folder == folder and folder.is_dir()
