"""A safetensors file that holds one slot of every chunk of a rank's state. If the file system supports it, I/O bypasses the page cache. The
file has no name until a checkpoint links it."""

import errno
import json
import os
import weakref
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megalith.checkpoint.digests import FileDigest, text, words_of
from megalith.fleet.exit_codes import ExitCode

PAGE = 4096
"""Alignment in bytes for I/O that bypasses the page cache: at least the sector size of common disks."""
FREE = "Make room on the folder's disk, or set plan.state.folder to a folder on another disk"
BACK = "The run resumes from its newest checkpoint. If this error recurs, set plan.state.folder to a folder on another disk"
NO_NAMELESS = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT)
"""The error numbers of open() on file systems and kernels without O_TMPFILE."""


class StateFileError(OSError):
    """The file with a rank's state or retained activations cannot be read or written, or its content differs from the written content.
    The run can resume from its newest checkpoint."""

    exit_code = ExitCode.LOST


def padded(size: int) -> int:
    """Return the size rounded up to whole pages."""
    return -(-size // PAGE) * PAGE


def memory_of(size: int) -> Tensor:
    """Allocate memory for a chunk: uint8 [size], aligned to a page."""
    whole = torch.empty(size + PAGE, dtype=torch.uint8)
    start = -whole.data_ptr() % PAGE if type(whole) is Tensor else 0  # a fake tensor has no memory
    return whole[start : start + size]


def tensor_name(chunk: int, segment: int) -> str:
    """Return the name of a chunk's segment in the file's header."""
    return f"{chunk}.{segment}"


class Layout:
    """The layout of chunks in a file. Each segment fills whole pages, and the file's header describes it as a tensor of bytes."""

    def __init__(self, chunks: Sequence[tuple[str, Sequence[int]]]) -> None:
        """`chunks`: for each chunk, its name and the size of each of its segments in bytes."""
        self.names = [name for name, _ in chunks]
        self.segments = [tuple(sizes) for _, sizes in chunks]
        self.rooms = [sum(map(padded, sizes)) for sizes in self.segments]
        self.header = self._header()
        self.starts = [*accumulate(self.rooms, initial=len(self.header))][:-1]
        self.payload = sum(map(sum, self.segments))
        """The bytes of all segments, without the padding at their ends."""
        self.bytes = len(self.header) + sum(self.rooms)
        """Bytes of a file."""

    def spans(self, chunk: int) -> list[slice]:
        """Return the range of bytes of each segment within its chunk."""
        ends = [*accumulate(map(padded, self.segments[chunk]), initial=0)]
        return [slice(start, end) for start, end in pairwise(ends)]

    def _header(self) -> bytes:
        fields, end = dict[str, Any](), 0
        for chunk, sizes in enumerate(self.segments):
            for segment, size in enumerate(sizes):
                begin, end = end, end + padded(size)
                fields[tensor_name(chunk, segment)] = {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
        described = json.dumps(fields, separators=(",", ":")).encode()
        room = padded(8 + len(described)) - 8
        return room.to_bytes(8, "little") + described.ljust(room)


class SlotFile:
    """A file that holds one slot of every chunk. Raises OSError if the disk has no room for it."""

    def __init__(self, path: Path, layout: Layout) -> None:
        """`path`: the file's name in messages; the file itself has no name."""
        self.path, self.layout = path, layout
        self._sums: dict[int, tuple[int, ...]] = {}  # of the segments of each chunk that was written
        self.descriptor, self.direct = _new(path, layout.header)  # direct: I/O bypasses the page cache
        weakref.finalize(self, os.close, self.descriptor)
        os.posix_fallocate(self.descriptor, 0, layout.bytes)

    def read(self, chunk: int, into: Tensor, segment: int | None = None) -> None:
        """Read a chunk, or one of its segments, into memory of its padded size. Bytes that were never written are zeros.

        Raises StateFileError if the content differs from what was written.
        """
        if chunk not in self._sums:
            into.zero_()
            return
        spans = self.layout.spans(chunk)
        first, last = (0, len(spans)) if segment is None else (segment, segment + 1)
        start, octets = spans[first].start, into.numpy()
        self._move(os.preadv, octets[: spans[last - 1].stop - start], chunk, start)
        for number in range(first, last):
            span = spans[number]
            found, known = words_of(octets[span.start - start : span.stop - start]), self._sums[chunk][number]
            if found != known:
                words = f"{self._said(chunk)} has the checksum {text(found)}, but {text(known)} was written: the disk altered it"
                raise StateFileError(errno.EIO, f"{words}. {BACK}")

    def write(self, chunk: int, body: Tensor) -> "SlotFile":
        """Write a chunk. Returns this file."""
        octets, sums = body.numpy()[: self.layout.rooms[chunk]], []
        for span, size in zip(self.layout.spans(chunk), self.layout.segments[chunk], strict=True):
            octets[span.start + size : span.stop] = 0
            sums.append(words_of(octets[span]))
        self._move(os.pwritev, octets, chunk, 0)
        self._sums[chunk] = tuple(sums)
        return self

    def sum_of(self, chunk: int) -> int:
        """Return the sum of the checksums of a chunk's segments. Each of them is a sum of 64-bit words modulo 2^64; the result may be
        larger."""
        return sum(self._sums.get(chunk, ()))

    def sync(self) -> None:
        """Sync the file, so that its content survives a power cut."""
        try:
            os.fdatasync(self.descriptor)
            # without direct I/O the cache would grow to the file's size
            os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise self._failed(error, f"{self.path} cannot be synced") from error

    # --- as a checkpoint has it ---

    @property
    def payload(self) -> int:
        """Bytes of all segments."""
        return self.layout.payload

    def link(self, path: Path) -> FileDigest:
        """Name the file `path`. Raises OSError if `path` is on another file system, or if the file system cannot give a name to an unnamed
        file."""
        os.fsync(self.descriptor)
        folder = os.open(path.parent, os.O_RDONLY)
        try:  # with a folder to start from, or Python would link the link in /proc rather than what it leads to
            os.link(f"/proc/self/fd/{self.descriptor}", path.name, dst_dir_fd=folder)
        finally:
            os.close(folder)
        total = words_of(np.frombuffer(self.layout.header, dtype=np.uint8)) + sum(map(self.sum_of, self._sums))
        return FileDigest(self.layout.bytes, words=text(total))

    # --- bytes ---

    def _said(self, chunk: int) -> str:
        return f"plan.state: chunk {chunk} of {self.path} ({self.layout.names[chunk]})"

    def _move(self, call: Callable[..., int], octets: "np.ndarray[Any, Any]", chunk: int, start: int) -> None:
        try:
            moved = move_all(call, self.descriptor, octets, self.layout.starts[chunk] + start)
        except OSError as error:
            raise self._failed(error, self._said(chunk)) from error
        if moved < len(octets):
            raise StateFileError(
                errno.EIO,
                f"{self._said(chunk)} ends early, so the file was truncated. No program except this run may change the file",
            )

    def _failed(self, error: OSError, what: str) -> StateFileError:
        words = f"{what}: {error.strerror}. {BACK}"
        return StateFileError(error.errno, words)


def move_all(call: Callable[..., int], file: int, octets: "np.ndarray[Any, Any]", start: int) -> int:
    """Read or write all of `octets` at byte `start` of a file, with several calls if needed. Return the number of bytes transferred, which
    is smaller if the file ends first."""
    memory, done = octets.data, 0
    while done < len(memory) and (moved := call(file, [memory[done:]], start + done)):
        done += moved
    return done


def _new(path: Path, header: bytes) -> tuple[int, bool]:
    """Return an open file with this header, and True if I/O bypasses the page cache: the file system may be unable to do so."""
    page = memory_of(len(header)).numpy()
    page[:] = np.frombuffer(header, dtype=np.uint8)
    try:
        return _opened(path, os.O_DIRECT, page), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return _opened(path, 0, page), False


def _opened(path: Path, flags: int, page: "np.ndarray[Any, Any]") -> int:
    file = _nameless(path, os.O_RDWR | flags)
    try:
        if os.pwrite(file, page.data, 0) < len(page):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        os.close(file)
        raise
    return file


def _nameless(path: Path, flags: int) -> int:
    """Open an unnamed file that can get a name later. If the file system does not support this, open a named file and remove the name;
    checkpoints then copy the file."""
    try:
        return os.open(path.parent, flags | os.O_TMPFILE, 0o666)
    except OSError as error:
        if error.errno not in NO_NAMELESS:
            raise
    file = os.open(path, flags | os.O_CREAT | os.O_TRUNC, 0o600)
    path.unlink()
    return file
