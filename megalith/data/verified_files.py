"""Verified reads of prepared data: bytes are checked as they are read, and come from the first folder with an intact copy.

`x.sum` beside a shard `x.bin` holds the CRC-32 of each of its blocks as little-endian uint32. These checksums can be derived from the
shard, so the manifest does not name `x.sum`. A shard without an `x.sum` is read unchecked, and `megalith data verify` writes its `x.sum`.
When a process first opens an index, it compares the index with the manifest's sha256.
"""

import contextlib
import errno
import os
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from megalith import disk
from megalith.data.errors import AwayDataError, DataError
from megalith.data.manifest import FILE, Shard, file_digest

BLOCK = 4096  # bytes summed together: a page, so that checking reads no more from the disk than reading does
MAX_FILES = 256  # of each sort that a reader keeps open: a process often may have 1,024


class DamagedDataError(DataError):
    """Every copy of a prepared file is damaged."""


@dataclass(frozen=True)
class Damage:
    """A file that has changed since it was prepared. `elsewhere`: the folder from which the file is read instead; None: no copy is
    intact."""

    file: str
    error: str
    elsewhere: Path | None


class BlockChecksums:
    """The checksums of a shard's blocks, computed while the shard is written."""

    def __init__(self) -> None:
        self._done, self._open, self._sum = array("I"), 0, 0

    def update(self, content: bytes) -> None:
        """Add the next bytes of the shard."""
        view = memoryview(content)
        while len(view):
            piece = view[: BLOCK - self._open]
            self._sum = crc32(piece, self._sum)
            self._open += len(piece)
            view = view[len(piece) :]
            if self._open == BLOCK:
                self._done.append(self._sum)
                self._open = self._sum = 0

    def file_content(self) -> bytes:
        """Return the content of `x.sum`."""
        sums = [*self._done, self._sum] if self._open else self._done
        return np.array(sums, "<u4").tobytes()


def sums_file(shard: Shard) -> str:
    """Return the name of the file with a shard's checksums."""
    return f"{shard.file.removesuffix('.bin')}.sum"


class VerifiedFiles:
    """Shards of one split, in a prepared folder and in `copies` of it. `on_damage` is called once for each damaged file or block."""

    def __init__(
        self, folder: Path, copies: Sequence[Path] = (), *, on_damage: Callable[[Damage], None] = lambda damage: None
    ) -> None:
        self._folders, self._on_damage = (folder, *copies), on_damage
        self._reported: set[tuple[str, str]] = set()
        self._file = lru_cache(maxsize=3 * MAX_FILES // 4)(_open)  # a shard and its sums
        self._index = lru_cache(maxsize=MAX_FILES // 4)(self._map_index)
        self._right: dict[str, Path] = {}  # indices that have been compared -> where

    def tokens(self, shard: Shard, low: int, high: int) -> npt.NDArray[Any]:
        """Return tokens `low` to `high` - 1 of a shard, uint16 or uint32 [high - low]. If no copy is intact, raises
        DamagedDataError, or AwayDataError if a folder is unreachable."""
        dtype = np.dtype("<u2" if shard.dtype == "uint16" else "<u4")
        first, last = low * dtype.itemsize // BLOCK, -(-high * dtype.itemsize // BLOCK)
        end = min(last * BLOCK, shard.tokens * dtype.itemsize)
        content = self._from_first(shard.file, lambda folder: self._blocks(folder, shard, first, end))
        skipped = low - first * BLOCK // dtype.itemsize
        return np.frombuffer(content, dtype)[skipped : skipped + high - low]

    def offsets(self, shard: Shard) -> npt.NDArray[np.int64]:
        """Return a shard's index, int64 [documents + 1], as a memory map. Raises DamagedDataError."""
        return self._index(shard.index, shard.index_sha256)

    def folder_of(self, shard: Shard) -> Path:
        """Return the path of a shard in the first folder."""
        return self._folders[0] / shard.file

    def _from_first(self, name: str, read: Callable[[Path], Any]) -> Any:
        """Return the result of `read` for the first folder with an intact copy. If no copy is intact, raises AwayDataError if a folder is
        unreachable, else DamagedDataError."""
        wrong: list[str] = []
        away: Path | None = None
        for folder in self._folders:
            try:
                found = read(folder)
            except (OSError, _WrongError) as error:
                wrong.append(f"{folder / name} {_words(error)}")
                away = away or (folder / name if _is_away(folder, error) else None)
                continue
            if wrong:
                self._note(Damage(name, "; ".join(wrong), folder))
            return found
        if away is not None:
            raise AwayDataError(away, "; ".join(wrong))
        self._note(Damage(name, "; ".join(wrong), None))
        more = "" if len(self._folders) > 1 else ", or name a folder with a copy of the data in data.copies"
        raise DamagedDataError(
            f"{'; '.join(wrong)}. Restore the file from a copy{more}; `megalith data verify` lists all damaged files."
        )

    def _note(self, damage: Damage) -> None:
        key = damage.file, damage.error
        if key not in self._reported:
            self._reported.add(key)
            self._on_damage(damage)

    def _blocks(self, folder: Path, shard: Shard, first: int, end: int) -> bytes:
        """Return a shard's bytes from block `first` to byte `end`. The bytes are copied, so that exactly the checked bytes are used."""
        begin = first * BLOCK
        file, sums = self._file(folder, shard.file), self._file(folder, sums_file(shard))
        if file is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder / shard.file))
        content = file.read(begin, end - begin)
        if len(content) < end - begin:
            raise _WrongError(f"ends at byte {begin + len(content)}, but was prepared with at least {end} bytes")
        if sums is None:
            if not disk.is_there(folder / FILE):  # they may be there, and only their folder is away
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
            return content
        known = np.frombuffer(sums.read(4 * first, 4 * -(-len(content) // BLOCK)), "<u4").tolist()
        view = memoryview(content)
        found = [crc32(view[at : at + BLOCK]) for at in range(0, len(content), BLOCK)]
        if found != known:
            which = next((i for i, (a, b) in enumerate(zip(found, known, strict=False)) if a != b), len(known))
            at, told = begin + which * BLOCK, f"{known[which]:08x}" if which < len(known) else "missing"
            raise _WrongError(
                f"has changed: the checksum of the block from byte {at} on is {found[which]:08x}, but should be {told}"
            )
        return content

    def _map_index(self, name: str, digest: str) -> npt.NDArray[np.int64]:
        if name not in self._right:
            self._right[name] = self._from_first(name, lambda folder: _with_digest(folder, name, digest))
        # a plain array over the map: slicing np.memmap itself costs several microseconds
        return np.asarray(np.memmap(self._right[name] / name, "<i8", "r"))


class _WrongError(Exception):
    """A copy of a file is damaged; the message describes the damage."""


def _is_away(folder: Path, error: Exception) -> bool:
    """True if a prepared folder is unreachable. A missing file counts as damage if the folder's manifest exists."""
    if isinstance(error, FileNotFoundError):
        with contextlib.suppress(OSError):
            return not disk.is_there(folder / FILE)
        return True
    return disk.is_away(error)


def _words(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "is missing"
    return f"cannot be read: {error.strerror or error}" if isinstance(error, OSError) else str(error)


class _Opened:
    """A file that is read in pieces, and closed when no object refers to it any longer. If the file is truncated, `read` returns
    fewer bytes; a memory map would end the process."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)

    def read(self, offset: int, size: int) -> bytes:
        """Return the bytes from an offset on; fewer than requested at the end of the file."""
        return os.pread(self._file, size, offset)


def _open(folder: Path, name: str) -> _Opened | None:
    """Open a file; None if it does not exist."""
    try:
        return _Opened(folder / name)
    except FileNotFoundError:
        return None


def _with_digest(folder: Path, name: str, digest: str) -> Path:
    found = file_digest(folder / name)
    if found != digest:
        raise _WrongError(f"has sha256 {found}, but {digest} according to the manifest")
    return folder
