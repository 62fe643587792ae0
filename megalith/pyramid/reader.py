"""Reader of a pyramid."""

import contextlib
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megalith.pyramid.format import FILE, HEAD, MAGIC, START, SUM, TYPES, Segment, arrays_of, record_bytes, segments

HEADS = 4096  # heads of a file's records that a reader remembers
BLOCK = 4096  # bytes: records up to this size are read together


@dataclass(frozen=True)
class View:
    """Some records of a table, oldest first. Arrays have one row for each record; `low`, `high` and `mean` have one column for
    each value."""

    piece: NDArray[np.int64]
    first: NDArray[np.int64]
    last: NDArray[np.int64]
    steps: NDArray[np.int64]
    time: NDArray[np.float64]
    bases: NDArray[np.float64]
    low: NDArray
    high: NDArray
    mean: NDArray

    def __len__(self) -> int:
        return len(self.first)


@dataclass(frozen=True)
class _At:
    """A record: its file, its offset in the file, and its head."""

    run: "_Run"
    offset: int
    head: "Head"


Head = tuple[int, int, int, float, float, float]
"""The head of a record: first step, last step, number of steps, time, and the two bases (reference numbers) of the values."""


@dataclass
class _Known:
    """The parts of a file that never change and are read only once: its format, and the heads of complete records."""

    kind: str
    width: int
    segment: Segment
    begin: bytes
    heads: dict[int, Head] = field(default_factory=dict)

    def holds_for(self, segment: Segment) -> bool:
        """True if this is still the same file, and it has not shrunk. Inodes are reused, so if the metadata have changed, the
        head of the first record must also be the same."""
        before, self.segment = self.segment, segment
        if before == segment:
            return True
        return before.inode == segment.inode and before.size <= segment.size and self.begin == _beginning(segment)


class _Run:
    """A file of a table. The file is opened at the first read of something that is not cached."""

    def __init__(self, segment: Segment, known: _Known) -> None:
        self.segment, self.kind, self.width, self._heads = segment, known.kind, known.width, known.heads
        self.record = record_bytes(known.kind, known.width, segment.level)
        self.count = max(0, (segment.size - FILE.size) // self.record)
        self._file: int | None = None

    def read(self, size: int, offset: int) -> bytes:
        """Return `size` bytes at an offset. Fewer bytes are returned at the end of the file, and none if the file was removed in
        the meantime."""
        if self._file is None:
            try:
                self._file = os.open(self.segment.path, os.O_RDONLY)
            except FileNotFoundError:
                return b""
        return os.pread(self._file, size, offset)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)

    def head(self, index: int) -> Head | None:
        if (known := self._heads.get(index)) is not None:
            return known
        read = self.read(START, FILE.size + index * self.record)
        if len(read) < START or SUM.unpack(read[HEAD.size :])[0] != zlib.crc32(read[: HEAD.size]):
            return None
        if len(self._heads) >= HEADS:
            self._heads.clear()
        return self._heads.setdefault(index, HEAD.unpack(read[: HEAD.size]))

    def index(self, step: int) -> int:
        """Return the index of the first record whose last step is `step` or later."""
        low, high = 0, self.count
        while low < high:
            middle = (low + high) // 2
            head = self.head(middle)
            low, high = (middle + 1, high) if head is not None and head[1] < step else (low, middle)
        return low


class Reader:
    """Reads a table, also while a writer appends to it. Damaged files are left out."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[str, _Known] = {}

    @contextlib.contextmanager
    def _files(self) -> Iterator[dict[int, dict[int, list[_Run]]]]:
        """The table's files, by piece and level."""
        found: dict[int, dict[int, list[_Run]]] = {}
        files: list[_Run] = []
        known = dict[str, _Known]()
        try:
            for segment in segments(self.folder):
                with contextlib.suppress(OSError):
                    before = self._known.get(segment.path)
                    now = before if before is not None and before.holds_for(segment) else _format(segment)
                    if now is not None:
                        known[segment.path] = now
                        files.append(_Run(segment, now))
                        found.setdefault(segment.piece, {}).setdefault(segment.level, []).append(files[-1])
            self._known = known
            yield found
        finally:
            for one in files:
                one.close()

    def width(self) -> int:
        """Number of values per step in the newest piece; 0 if there is no piece."""
        for segment in reversed(segments(self.folder)):
            if (what := _format(segment)) is not None:
                return what.width
        return 0

    def span(self) -> tuple[int, int] | None:
        """The first and the last step in the table; None if it has no step."""
        with self._files() as pieces:
            ends = [end for levels in pieces.values() if (end := _ends(levels)) is not None]
        return (min(first for first, _ in ends), max(last for _, last in ends)) if ends else None

    def newest(self) -> tuple[int, int, float, float] | None:
        """The piece, number and two bases of the newest step; None if the table has no step."""
        with self._files() as pieces:
            for piece in sorted(pieces, reverse=True):
                for run in reversed(pieces[piece].get(0, ())):
                    if run.count and (head := run.head(run.count - 1)) is not None:
                        return piece, head[1], head[4], head[5]
        return None

    def read(
        self,
        values: Sequence[slice],
        *,
        first: int = 0,
        last: int = 2**62,
        most: int = 600,
        width: int | None = None,
        until: tuple[int, int] | None = None,
    ) -> View:
        """Return about `most` records of the steps from `first` to `last`, with only the values in the slices `values`.

        A step that the run repeated occurs once for each piece that has it. Pieces with another `width` than the given one
        (default: the newest piece's) are left out. If `until` is (A, B), the records of piece A after step B are left out, and so
        are all later pieces. Time and memory are proportional to `most` times the number of values, whatever the run's length.
        """
        with self._files() as pieces:
            wanted = width or max(((number, _width(levels)) for number, levels in pieces.items()), default=(0, 0))[1]
            same = {number: levels for number, levels in pieces.items() if _width(levels) == wanted}
            ends = {
                number: (max(a, first), min(b, last)) for number, levels in same.items() for a, b in [_ends(levels) or (1, 0)]
            }
            if until is not None:
                ends = {n: (a, min(b, until[1]) if n == until[0] else b) for n, (a, b) in ends.items() if n <= until[0]}
            lengths = {number: b - a + 1 for number, (a, b) in ends.items() if b >= a}
            whole = sum(lengths.values())
            chosen = [
                (number, at)
                for number, length in sorted(lengths.items())
                for at in _choose(same[number], *ends[number], most=max(1, most * length // whole))
            ]
            return _view(chosen, values)


def _format(segment: Segment) -> _Known | None:
    read = _beginning(segment)
    if len(read) >= FILE.size:
        magic, kind, level, width = FILE.unpack_from(read)
        if magic == MAGIC and kind < len(TYPES) and level == segment.level:
            return _Known(list(TYPES)[kind], width, segment, read)
    return None


def _beginning(segment: Segment) -> bytes:
    """Return the head of a file and the head of its first record; empty if the file cannot be read."""
    with contextlib.suppress(OSError), open(segment.path, "rb") as file:
        return file.read(FILE.size + START)
    return b""


def _width(levels: dict[int, list[_Run]]) -> int:
    return next((run.width for runs in levels.values() for run in runs), 0)


def _ends(levels: dict[int, list[_Run]]) -> tuple[int, int] | None:
    heads = [head for runs in levels.values() for run in runs for i in (0, run.count - 1) if run.count and (head := run.head(i))]
    return (min(head[0] for head in heads), max(head[1] for head in heads)) if heads else None


def _choose(levels: dict[int, list[_Run]], first: int, last: int, *, most: int) -> list[_At]:
    """Return the records of one piece from the finest level that covers the steps with at most `most` records (if none does, from
    the coarsest), and further records of finer levels for the newest steps, which are not yet in a complete record of that level."""
    begin = max(first, min(runs[0].segment.first for runs in levels.values()))
    for level in sorted(levels):
        runs = levels[level]
        number = sum(run.index(last + 1) - run.index(first) for run in runs)
        if runs[0].segment.first <= begin and number <= most:
            break
    else:
        level = max(levels)
    found: list[_At] = []
    for finer in range(level, -1, -1):
        for run in levels.get(finer, ()):
            for index in range(run.index(first), run.count):
                head = run.head(index)
                if head is None or head[1] > last:
                    break
                if head[0] < first and finer < level:
                    continue
                found.append(_At(run, FILE.size + index * run.record + START, head))
        first = max(first, found[-1].head[1] + 1) if found else first
    return found


def _view(chosen: Sequence[tuple[int, _At]], values: Sequence[slice]) -> View:
    kind = chosen[0][1].run.kind if chosen else "numbers"
    size = sum(one.stop - one.start for one in values)
    arrays = np.zeros((3, len(chosen), size), dtype=TYPES[kind])
    for begin, end in _stretches([at for _, at in chosen]):
        at = chosen[begin][1]
        number = arrays_of(at.run.kind, at.run.segment.level)
        read = _read if at.run.record > BLOCK else _read_block
        for k in range(3):
            arrays[k, begin:end] = read([one for _, one in chosen[begin:end]], min(k, number - 1), values)
    heads = [at.head for _, at in chosen]
    column = lambda i, what: np.array([head[i] for head in heads], dtype=what)  # noqa: E731
    bases = np.array([head[4:] for head in heads], dtype=np.float64).reshape(-1, 2)
    pieces = np.array([piece for piece, _ in chosen], dtype=np.int64)
    return View(pieces, column(0, np.int64), column(1, np.int64), column(2, np.int64), column(3, np.float64), bases, *arrays)


def _stretches(chosen: Sequence[_At]) -> Iterator[tuple[int, int]]:
    """Yield the index ranges of records that are contiguous in one file."""
    begin = 0
    for end in range(1, len(chosen) + 1):
        before = chosen[end - 1]
        if end == len(chosen) or chosen[end].run is not before.run or chosen[end].offset != before.offset + before.run.record:
            yield begin, end
            begin = end


def _read(stretch: Sequence[_At], array: int, values: Sequence[slice]) -> NDArray:
    """Read some values of one array from wide records, one record at a time. Values beyond the end of the file are zeros."""
    run, dtype = stretch[0].run, TYPES[stretch[0].run.kind]
    rows = []
    for at in stretch:
        start, parts = at.offset + array * run.width * dtype.itemsize, []
        for one in values:
            wanted = (one.stop - one.start) * dtype.itemsize
            parts.append(run.read(wanted, start + one.start * dtype.itemsize).ljust(wanted, b"\0"))
        rows.append(np.frombuffer(b"".join(parts), dtype=dtype))
    return np.stack(rows)


def _read_block(stretch: Sequence[_At], array: int, values: Sequence[slice]) -> NDArray:
    """Read some values of one array from narrow records, with one read for all records."""
    run, dtype = stretch[0].run, TYPES[stretch[0].run.kind]
    whole = run.read(len(stretch) * run.record, stretch[0].offset - START).ljust(len(stretch) * run.record, b"\0")
    table = np.frombuffer(whole, dtype=np.uint8).reshape(len(stretch), run.record)[
        :, START + array * run.width * dtype.itemsize :
    ]
    columns = [table[:, one.start * dtype.itemsize : one.stop * dtype.itemsize] for one in values]
    return np.ascontiguousarray(np.concatenate(columns, axis=1)).view(dtype)
