"""Chunks with two slots: the settled slot counts, and chunks that the disk altered are named."""

import contextlib
import errno
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megalith.fleet.exit_codes import ExitCode
from megalith.spec.state import DISK_SLOTS
from megalith.train.offload.home import Disk
from megalith.train.offload.slot_file import PAGE, StateFileError, memory_of
from megalith.train.offload.slots import Slots
from megalith.train.offload.stream import BUFFERS, Stream

SIZES = (40, 5000)


def _file(folder: Path, chunks: int = 3) -> Slots:
    return Slots(folder / "state", [(f"part {number}", SIZES) for number in range(chunks)])


def _body(file: Slots, value: int) -> torch.Tensor:
    return memory_of(file.layout.rooms[0]).fill_(value)


def _value(file: Slots, chunk: int) -> int:
    body = _body(file, 77)
    file.read(chunk, body)
    assert body[:40].unique().numel() == body[PAGE : PAGE + 5000].unique().numel() == 1
    assert not body[40:PAGE].any()  # bytes of no other chunk
    return int(body[0])


def test_what_was_never_written_is_zeros(tmp_path: Path) -> None:
    file = _file(tmp_path)
    assert _value(file, 2) == file.sum == 0
    assert file.bytes == 3 * (1 + 3 * 3) * PAGE  # one page for the header


def test_an_update_counts_once_it_is_settled_and_can_be_undone_once(tmp_path: Path) -> None:
    file = _file(tmp_path)
    for chunk in range(3):
        file.write(chunk, _body(file, 1), counts=True)
    known = file.sum
    file.write(0, _body(file, 2))
    assert _value(file, 0) == 2 and file.sum == known  # read during the update, which is not yet in effect
    file.undo()
    assert _value(file, 0) == 1
    for chunk in range(3):
        file.write(chunk, _body(file, 3))
    file.write(1, _body(file, 4))  # an update that visits its parts twice
    file.settle()
    assert [_value(file, chunk) for chunk in range(3)] == [3, 4, 3] and file.sum != known
    file.undo()
    assert [_value(file, chunk) for chunk in range(3)] == [1, 1, 1] and file.sum == known


def test_the_first_update_can_be_undone_to_zeros(tmp_path: Path) -> None:
    file = _file(tmp_path)
    file.write(0, _body(file, 5))
    file.settle()
    file.undo()
    assert _value(file, 0) == 0


def test_the_file_is_gone_with_its_process(tmp_path: Path) -> None:
    file = _file(tmp_path)
    assert not list(tmp_path.iterdir())
    file.close()


@pytest.mark.parametrize("where", [0, 39, PAGE, PAGE + 4999])
def test_an_altered_byte_is_named(tmp_path: Path, where: int) -> None:
    file = _file(tmp_path)
    file.write(1, _body(file, 6), counts=True)
    _flip(file, file.layout.starts[1] + where)
    with pytest.raises(
        StateFileError, match=r"chunk 1 of .*state \(part 1\) has the checksum [0-9a-f]{16}, but .* newest checkpoint"
    ):
        _value(file, 1)
    assert _value(file, 0) == 0


def test_a_torn_write_is_named(tmp_path: Path) -> None:
    """The disk kept only one of a chunk's three pages."""
    file = _file(tmp_path)
    file.write(1, _body(file, 6), counts=True)
    at = file.layout.starts[1]
    os.pwrite(_descriptor(file), memory_of(2 * PAGE).zero_().numpy().data, at + PAGE)
    with pytest.raises(StateFileError, match="chunk 1"):
        _value(file, 1)


def test_a_file_that_was_cut_off_is_named(tmp_path: Path) -> None:
    file = _file(tmp_path)
    file.write(2, _body(file, 6), counts=True)
    os.ftruncate(_descriptor(file), PAGE)
    with pytest.raises(StateFileError, match="ends early"):
        _value(file, 2)


def test_a_file_system_without_direct_io_is_used_through_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message says so."""
    real = os.open

    def indirect(path: Any, flags: int, *mode: int, **how: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *mode, **how)

    monkeypatch.setattr(os, "open", indirect)
    file = _file(tmp_path)
    _update(file, 4)
    assert [_value(file, chunk) for chunk in range(3)] == [4, 4, 4] and not file.direct
    home = Disk.__new__(Disk)
    home.slots = file
    assert f"the file system of {tmp_path} has no direct I/O" in home.warning


def test_a_full_disk_is_named_before_anything_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", _full)
    with pytest.raises(
        StateFileError,
        match=r"needs another file of 40,960 bytes in .* \(No space left on device; [0-9,]+ bytes are free\)\. Make room",
    ) as caught:
        _file(tmp_path)
    assert caught.value.errno == errno.ENOSPC and caught.value.exit_code == ExitCode.LOST


def test_a_disk_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    file = _file(tmp_path)
    monkeypatch.setattr(os, "pwritev", broken)
    with pytest.raises(StateFileError, match=r"chunk 0 of .* \(part 0\): Input/output error\. The run resumes"):
        file.write(0, _body(file, 1))


def test_chunks_pass_through_few_buffers_in_order(tmp_path: Path) -> None:
    file = _file(tmp_path, chunks=20)
    stream = Stream(file)
    assert len(stream.buffers) == BUFFERS
    for chunk, body in stream.over(range(20)):
        body[:40] = chunk
    file.settle()
    seen = [(chunk, int(body[0])) for chunk, body in stream.over([*range(19, -1, -1)], counts=None)]
    assert seen == [(chunk, chunk) for chunk in range(19, -1, -1)]
    stream.close()


def test_an_error_on_the_way_is_raised_where_the_chunks_are_used(tmp_path: Path) -> None:
    file = _file(tmp_path, chunks=9)
    stream = Stream(file)
    for _, body in stream.over(range(9)):
        body.fill_(1)
    file.settle()
    _flip(file, file.layout.starts[7])
    with pytest.raises(StateFileError, match="chunk 7"):
        for _ in stream.over(range(9)):
            pass
    assert [chunk for chunk, _ in stream.over(range(7), counts=None)] == [*range(7)]  # and the slots still work
    stream.close()


def test_a_held_file_is_never_written_again(tmp_path: Path) -> None:
    """Ten updates later the file still has its bytes, also after state was loaded, which takes effect at once."""
    file = _file(tmp_path)
    for value in (1, 2):
        _update(file, value)
    held, name = file.hold(), tmp_path / "linked"
    assert held is not None and held is file.hold()  # nothing was written since, so it is held once
    digest, saved = held.link(name), name.read_bytes()
    for chunk in range(3):
        file.write(chunk, _body(file, 9), counts=True)
    assert [_value(file, chunk) for chunk in range(3)] == [9, 9, 9] and name.read_bytes() == saved
    for value in range(10, 20):
        _update(file, value)
        file.undo()
        assert _value(file, 0) == (9 if value == 10 else value - 1)
        _update(file, value)
    assert name.read_bytes() == saved and name.stat().st_ino == os.fstat(held.descriptor).st_ino
    assert digest.bytes == len(saved)
    with name.open("rb", buffering=0) as content:
        assert digest.problem(content) is None
    tensors = load_file(name)
    assert all(tensors[f"{chunk}.0"][:40].eq(2).all() and tensors[f"{chunk}.1"][:5000].eq(2).all() for chunk in range(3))


def test_updates_are_undone_to_what_a_checkpoint_holds_and_not_beyond(tmp_path: Path) -> None:
    file = _file(tmp_path)
    for value in (1, 2):
        _update(file, value)
    assert file.hold() is not None
    for value in (3, 4):
        _update(file, value)
        assert _value(file, 0) == value
        file.undo()
        assert _value(file, 0) == 2
    assert file.hold() is not None
    file.undo()
    assert _value(file, 0) == 2


@pytest.mark.slow
def test_files_that_nothing_needs_give_their_room_back(tmp_path: Path) -> None:
    """Each update is saved, and only the newest checkpoint is kept. That takes three files, the number in `bytes`, and one more
    during a save."""
    file = _file(tmp_path)
    for value in range(10):
        _update(file, value)
        held = file.hold()
        assert held is not None
        held.link(tmp_path / f"{value}")
        assert len(_room(tmp_path)) == DISK_SLOTS + (value > 0)
        (tmp_path / f"{value - 1}").unlink(missing_ok=True)
        del held
        gc.collect()
        assert sum(_room(tmp_path)) <= file.bytes
    _update(file, 10)
    assert len(_room(tmp_path)) == DISK_SLOTS
    file.close()
    gc.collect()
    assert len(_room(tmp_path)) == 1


def test_without_room_nothing_is_held_and_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, asked = _file(tmp_path), list[int]()
    _update(file, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", lambda *given: (asked.append(1), _full(*given)))
        assert file.hold() is None and file.hold() is None and asked == [1]
    _update(file, 2)
    assert _value(file, 0) == 2 and len(_room(tmp_path)) == 2
    file.write(0, _body(file, 3))
    assert file.hold() is None  # in the middle of an update
    file.drop()
    assert file.hold() is not None, "there is room again"


def _update(file: Slots, value: int) -> None:
    for chunk in range(3):
        file.write(chunk, _body(file, value))
    file.settle()


def _room(folder: Path) -> list[int]:
    """Return the sizes of the files in a folder, including unnamed files that are open here."""
    opened = (number.stat() for number in _open_in(folder))
    return [*{found.st_ino: found.st_size for found in (*opened, *(path.stat() for path in folder.iterdir()))}.values()]


def _open_in(folder: Path) -> Iterator[Path]:
    for number in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(number.readlink()).startswith(f"{folder}/"):
                yield number


def _full(*args: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _descriptor(file: Slots) -> int:
    (used,) = {*file._used.values()}
    return used.descriptor


def _flip(file: Slots, at: int) -> None:
    """Change one bit of the file with the current state."""
    page, start = memory_of(PAGE), at // PAGE * PAGE
    os.preadv(_descriptor(file), [page.numpy().data], start)
    page[at - start] ^= 4
    os.pwrite(_descriptor(file), page.numpy().data, start)
