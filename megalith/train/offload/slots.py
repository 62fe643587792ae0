"""Chunks of bytes in a file, each with two slots: a write goes to the unused slot, and becomes valid once everything is synced.

So an update that stops halfway, or turns out to be wrong, has its state from before whole in the other slots. The file belongs to one
process, and has no name once it is open: it disappears when the process ends for any reason. What starts next starts from a
checkpoint.
"""

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megalith.fleet.exit_codes import ExitCode

PAGE = 4096
"""Bytes to whose multiples direct I/O is aligned: a disk's sector, and more than most need."""
WORDS = 1 << 64
FREE = "Make room there, or name a folder on another disk by plan.state.folder"
BACK = "The run resumes from its newest checkpoint. If it comes again, name a folder on another disk by plan.state.folder"


class StateFileError(OSError):
    """The file with a rank's state cannot be read or written, or does not hold what was written. The newest checkpoint is intact."""

    exit_code = ExitCode.LOST


def padded(size: int) -> int:
    """The size with what fills up its last page."""
    return -(-size // PAGE) * PAGE


def memory_of(size: int) -> Tensor:
    """Get memory for a chunk: uint8 [size], its first byte on a page's border."""
    whole = torch.empty(size + PAGE, dtype=torch.uint8)
    start = -whole.data_ptr() % PAGE if _is_real(whole) else 0
    return whole[start : start + size]


class SlotFile:
    """One rank's chunks. A chunk is a row of segments, each read by itself or all at once.

    Raises StateFileError where there is no room for all slots: they are reserved now, so that no step finds the disk full.
    """

    def __init__(self, path: Path, chunks: Sequence[tuple[str, Sequence[int]]], *, dry: bool = False) -> None:
        """`chunks`: what each is of, and the bytes of its segments. `dry`: nothing is written or read."""
        self.path, self.names = path, [name for name, _ in chunks]
        self.segments = [tuple(sizes) for _, sizes in chunks]
        self.rooms = [sum(map(padded, sizes)) for sizes in self.segments]
        self._starts = [2 * sum(self.rooms[:number]) for number in range(len(chunks))]
        self._used: dict[int, int] = {}  # slot in use, of each chunk that was ever written
        self._fresh: dict[int, int] = {}  # slots written since: they count once they are settled
        self._before: dict[int, int] = {}
        self._sums: dict[tuple[int, int], tuple[int, ...]] = {}  # of each segment, by chunk and slot
        self.dry = dry
        self._file = None if dry else self._open()

    @property
    def bytes(self) -> int:
        """Bytes of the file: both slots of all chunks."""
        return 2 * sum(self.rooms)

    def _open(self) -> int:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = _direct(self.path)
            self.path.unlink()
            if self.bytes:
                os.posix_fallocate(file, 0, self.bytes)
        except OSError as error:
            free = _free(self.path.parent)
            needs = f"plan.state: the optimizer's state needs {self.bytes:,} bytes in {self.path.parent}"
            text = f"{needs} ({error.strerror}; {free:,} are free). {FREE}"
            raise StateFileError(error.errno, text) from error
        return file

    # --- what an update does ---

    def read(self, chunk: int, into: Tensor, segment: int | None = None) -> None:
        """Read a chunk, or one of its segments, into memory of its padded size. What was never written is zeros.

        Raises StateFileError if the content differs from what was written.
        """
        if self._file is None:
            return
        slot = self._fresh.get(chunk, self._used.get(chunk))
        if slot is None:
            into.zero_()
            return
        spans = self._spans(chunk)
        first, last = (0, len(spans)) if segment is None else (segment, segment + 1)
        start = spans[first].start
        octets = into.numpy()
        self._move(os.preadv, octets[: spans[last - 1].stop - start], chunk, self._at(chunk, slot) + start)
        for number in range(first, last):
            span = spans[number]
            found, known = _sum(octets[span.start - start : span.stop - start]), self._sums[chunk, slot][number]
            if found != known:
                text = f"{self._said(chunk)} has the sum {found:016x}, and {known:016x} was written: the disk altered it"
                raise StateFileError(errno.EIO, f"{text}. {BACK}")

    def write(self, chunk: int, body: Tensor, *, counts: bool = False) -> None:
        """Write a chunk into the slot that is not in use. `counts`: into the one in use, as is right where nothing can be undone."""
        used = self._used.get(chunk, 1)
        slot = used if counts and chunk in self._used else self._fresh.get(chunk, 1 - used)
        if self._file is None:
            return
        octets = body.numpy()[: self.rooms[chunk]]
        sums = []
        for span, size in zip(self._spans(chunk), self.segments[chunk], strict=True):
            octets[span.start + size : span.stop] = 0
            sums.append(_sum(octets[span]))
        self._move(os.pwritev, octets, chunk, self._at(chunk, slot))
        self._sums[chunk, slot] = tuple(sums)
        (self._used if counts else self._fresh)[chunk] = slot

    def settle(self) -> None:
        """Sync to disk, then make the written slots valid."""
        if self._file is None:
            return
        try:
            os.fdatasync(self._file)
            os.posix_fadvise(
                self._file, 0, 0, os.POSIX_FADV_DONTNEED
            )  # without direct I/O the cache would grow to the file's size
        except OSError as error:
            raise self._failed(error, f"{self.path} cannot be synced") from error
        self._before = {chunk: self._used.get(chunk, -1) for chunk in self._fresh}
        self._used |= self._fresh
        self._fresh = {}

    def drop(self) -> None:
        """Forget what was written since the last `settle`."""
        self._fresh = {}

    def undo(self) -> None:
        """Go back to what counted before the last `settle`."""
        self._used = {chunk: slot for chunk, slot in (self._used | self._before).items() if slot >= 0}
        self._before, self._fresh = {}, {}

    @property
    def sum(self) -> int:
        """The sum of all 64-bit words that count, modulo 2^64."""
        return sum(sum(self._sums[chunk, slot]) for chunk, slot in self._used.items()) % WORDS

    def close(self) -> None:
        """Close the file, which deletes it."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    # --- bytes ---

    def _at(self, chunk: int, slot: int) -> int:
        return self._starts[chunk] + slot * self.rooms[chunk]

    def _spans(self, chunk: int) -> list[slice]:
        """Return the bytes of its chunk that each segment takes."""
        ends, end = [], 0
        for size in self.segments[chunk]:
            ends.append(slice(end, end + padded(size)))
            end += padded(size)
        return ends

    def _said(self, chunk: int) -> str:
        return f"plan.state: chunk {chunk} of {self.path} ({self.names[chunk]})"

    def _move(self, call: Any, octets: "np.ndarray[Any, Any]", chunk: int, start: int) -> None:
        """Read or write all of `octets`; a call may take less than it is given."""
        assert self._file is not None
        memory, done = octets.data, 0
        while done < len(memory):
            try:
                moved = call(self._file, [memory[done:]], start + done)
            except OSError as error:
                raise self._failed(error, self._said(chunk)) from error
            if not moved:
                raise StateFileError(
                    errno.EIO, f"{self._said(chunk)} ends early: the file was truncated. It belongs to this run alone"
                )
            done += moved

    def _failed(self, error: OSError, what: str) -> StateFileError:
        text = f"{what}: {error.strerror}. {BACK}"
        return StateFileError(error.errno, text)


def _sum(octets: "np.ndarray[Any, Any]") -> int:
    """The sum of the 64-bit words modulo 2^64, by numpy: it starts no threads, and lets others run."""
    return int(octets.view(np.uint64).sum(dtype=np.uint64))


def _direct(path: Path) -> int:
    """Open a file past the page cache, or through it where its file system knows no other way."""
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC
    page = memory_of(PAGE).zero_().numpy()
    try:
        file = os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o600)
    try:
        os.pwrite(file, page.data, 0)
    except OSError as error:
        os.close(file)
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o600)
    return file


def _free(folder: Path) -> int:
    try:
        found = os.statvfs(folder)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize


def _is_real(tensor: Tensor) -> bool:
    """False for a fake tensor, which has no memory."""
    return type(tensor) is Tensor
