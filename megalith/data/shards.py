"""Writer and reader of shards: concatenated token ids, and the offsets of documents.

`x.bin` is little-endian uint16 or uint32, with one end-of-text id after every document; `x.idx` is int64: the offset of each document's
first token, then the number of tokens. A document never spans two shards. `x.sum` has the checksums with which `verified_files` checks what
is read.
"""

import contextlib
import hashlib
import os
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from megalith.data.manifest import Shard, Split
from megalith.data.verified_files import BlockChecksums, Damage, VerifiedFiles, sums_file

Tokens = npt.NDArray[np.unsignedinteger[Any]]


class SplitWriter:
    """Writes one split of one domain as shards `{name}-00000.bin`, `.idx`, ... in `folder`."""

    def __init__(self, folder: Path, name: str, *, dtype: np.dtype[Any], shard_tokens: int, end_of_text: int) -> None:
        self._folder, self._name, self._dtype, self._shard_tokens = folder, name, dtype, shard_tokens
        self._end = np.array([end_of_text], dtype)
        self._done: list[Shard] = []
        self._file: IO[bytes] | None = None
        self._digest, self._sums = hashlib.sha256(), BlockChecksums()
        self._offsets = array("q", [0])
        self._bytes = 0

    @property
    def documents(self) -> int:
        """Documents written so far."""
        return sum(shard.documents for shard in self._done) + len(self._offsets) - 1

    def write(self, tokens: Tokens, *, text_bytes: int) -> None:
        """Append one document, and add its end-of-text id."""
        if self._offsets[-1] and self._offsets[-1] + len(tokens) + 1 > self._shard_tokens:
            self._close_shard()
        if self._file is None:
            self._file = (self._folder / f"{self._stem}.bin").open("xb")
        content = np.concatenate([tokens.astype(self._dtype, copy=False), self._end]).tobytes()
        self._file.write(content)
        self._digest.update(content)
        self._sums.update(content)
        self._offsets.append(self._offsets[-1] + len(tokens) + 1)
        self._bytes += text_bytes

    def close(self) -> Split:
        """Close the last shard, and return the manifest's record of this split."""
        if self._file is not None:
            self._close_shard()
        return Split(
            tokens=sum(shard.tokens for shard in self._done),
            documents=sum(shard.documents for shard in self._done),
            bytes=self._bytes,
            shards=tuple(self._done),
        )

    def abandon(self) -> None:
        """Close the open file after a failure; the caller deletes the folder."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # a full disk takes no more of what is still buffered
                self._file.close()

    @property
    def _stem(self) -> str:
        return f"{self._name}-{len(self._done):05d}"

    def _close_shard(self) -> None:
        assert self._file is not None
        settle(self._file)
        offsets = np.array(self._offsets, "<i8").tobytes()
        with (self._folder / f"{self._stem}.idx").open("xb") as index:
            index.write(offsets)
            settle(index)
        shard = Shard(
            file=f"{self._stem}.bin",
            index=f"{self._stem}.idx",
            dtype="uint16" if self._dtype.itemsize == 2 else "uint32",
            tokens=self._offsets[-1],
            documents=len(self._offsets) - 1,
            sha256=self._digest.hexdigest(),
            index_sha256=hashlib.sha256(offsets).hexdigest(),
        )
        with (self._folder / sums_file(shard)).open("xb") as sums:
            sums.write(self._sums.file_content())
            settle(sums)
        self._done.append(shard)
        self._file, self._digest, self._sums, self._offsets = None, hashlib.sha256(), BlockChecksums(), array("q", [0])


class SplitReader:
    """One split of one domain as one long sequence of tokens, read from a prepared folder or, if a file in this folder is damaged, from
    `copies`.

    `on_damage` is called once for each damaged file or block. Reading raises DamagedDataError if no copy is intact.
    """

    def __init__(
        self,
        folder: Path,
        split: Split,
        *,
        copies: Sequence[Path] = (),
        on_damage: Callable[[Damage], None] = lambda damage: None,
    ) -> None:
        self._split, self._files = split, VerifiedFiles(folder, copies, on_damage=on_damage)
        self._starts = list(accumulate((shard.tokens for shard in split.shards), initial=0))
        self.tokens: int = split.tokens
        self.documents: int = split.documents

    def read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return tokens `start` to `stop` - 1, int64 [stop - start]."""
        pieces = [self._files.tokens(shard, low, high) for shard, _, low, high in self._overlaps(start, stop)]
        return np.concatenate(pieces).astype(np.int64) if len(pieces) > 1 else pieces[0].astype(np.int64)

    def bytes_of(self, start: int, stop: int) -> tuple[Path, int, int]:
        """Locate the first of tokens `start` to `stop` - 1: return its shard, and the byte range of the requested tokens in this shard."""
        shard, _, low, high = self._overlaps(start, stop)[0]
        width = int(shard.dtype[4:]) // 8
        return self._files.folder_of(shard), low * width, high * width

    def documents_between(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the starts of the documents that begin at tokens `start` to `stop` - 1, int64 [documents]."""
        found: list[npt.NDArray[np.int64]] = []
        for shard, begin, low, high in self._overlaps(start, stop):
            offsets = self._files.offsets(shard)[:-1]
            first, last = np.searchsorted(offsets, (low, high))
            found.append(offsets[first:last] + begin)
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def document(self, number: int) -> npt.NDArray[np.int64]:
        """Return the tokens of one document, including its end-of-text token, int64 [tokens]."""
        assert 0 <= number < self.documents, (number, self.documents)
        firsts = self._first_documents
        which = bisect_right(firsts, number) - 1
        shard = self._split.shards[which]
        low, high = self._files.offsets(shard)[number - firsts[which] : number - firsts[which] + 2]
        return self._files.tokens(shard, int(low), int(high)).astype(np.int64)

    def document_lengths(self, at_most: int) -> npt.NDArray[np.int64]:
        """Return the length in tokens of every document, or, if there are more than `at_most` documents, of evenly spaced documents, as
        int64."""
        step = max(1, -(-self.documents // at_most))
        lengths = [np.diff(self._files.offsets(shard))[::step] for shard in self._split.shards]
        return np.concatenate(lengths) if lengths else np.empty(0, np.int64)

    @cached_property
    def _first_documents(self) -> list[int]:
        return list(accumulate((shard.documents for shard in self._split.shards), initial=0))

    def _overlaps(self, start: int, stop: int) -> list[tuple[Shard, int, int, int]]:
        """Return the shards that hold tokens `start` to `stop` - 1: each shard, its first token, and the requested range in it."""
        assert 0 <= start <= stop <= self.tokens, (start, stop, self.tokens)
        found: list[tuple[Shard, int, int, int]] = []
        which = bisect_right(self._starts, start) - 1
        while which < len(self._split.shards) and self._starts[which] < stop:
            begin, end = self._starts[which], self._starts[which + 1]
            found.append((self._split.shards[which], begin, max(start - begin, 0), min(stop, end) - begin))
            which += 1
        return found


def settle(file: IO[bytes]) -> None:
    """Sync a file to disk, then close it, so that a later rename is never visible before the content."""
    file.flush()
    os.fsync(file.fileno())
    file.close()
