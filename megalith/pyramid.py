"""A table that grows by one row of values a step, kept so that any part of it can be drawn in the time that its pixels take.

Level 0 has a record for each step. A record of level n + 1 covers FAN records of level n: of each value the least and the most, and of
numbers their mean. A reader takes the finest level with no more records than it has columns to draw. Each level keeps its newest
`keep` bytes; older steps remain at coarser levels, so the files of a run of any length have a bounded size.

Files are only appended to. `PIECE-LEVEL-STEP.bin` holds records from STEP on: a piece is the output of one writer between two
returns to an earlier step. A record that was truncated by a full disk or a dead writer ends its file; the next writer begins
another file.
"""

import contextlib
import os
import re
import struct
import time as clock
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

FAN = 4
LEVELS = 13  # FAN ** 12 is 16 million steps: the coarsest record covers so many
KEEP = 64 << 20  # bytes of a level, all pieces together
LEAST = 512  # records of a level that are kept in any case
HEADS = 4096  # heads of a file's records that a reader remembers
BLOCK = 4096  # bytes: records up to this size are read together
SEGMENTS = 8  # files into which the kept bytes of a level are cut: the oldest one goes

Kind = Literal["codes", "numbers"]
"""uint8 with 0 for a value that is missing, or float32 with NaN for it."""

_TYPES: dict[str, np.dtype] = {"codes": np.dtype("<u1"), "numbers": np.dtype("<f4")}
_FILE = struct.Struct("<8sIIQ")  # magic, kind, level, width
_MAGIC = b"mgltpyr1"
_HEAD = struct.Struct("<qqqddd")  # first step, last step, steps, time, and two numbers that values are measured by
_SUM = struct.Struct("<I")
_START = _HEAD.size + _SUM.size
_NAME = re.compile(r"(\d{6})-(\d{2})-(\d{15})\.bin")


def _arrays(kind: str, level: int) -> int:
    """Arrays in a record: the values, or their least and most, and of numbers their mean."""
    return 1 if level == 0 else 2 if kind == "codes" else 3


def record_bytes(kind: str, width: int, level: int) -> int:
    """Return the bytes of a record of `width` values."""
    return _START + _arrays(kind, level) * width * _TYPES[kind].itemsize


@dataclass
class _Sum:
    """A record of the next level that is not whole yet."""

    first: int
    last: int
    steps: int
    records: int
    time: float
    bases: NDArray[np.float64]
    low: NDArray
    high: NDArray
    total: NDArray[np.float64] | None
    known: NDArray[np.int64] | None


class Writer:
    """Appends a piece to the table in a folder. One process writes at a time; a new writer always begins a new piece."""

    def __init__(self, folder: Path, *, kind: Kind, width: int, keep: int = KEEP) -> None:
        """`width` values a step. Raises OSError where the folder cannot be made or read."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._kind, self._width, self._keep = folder, kind, width, keep
        self._type = _TYPES[kind]
        self._piece = 1 + max((segment.piece for segment in _segments(folder)), default=-1)
        self._files: dict[int, tuple[int, int]] = {}  # level -> descriptor, records in it
        self._open: dict[int, _Sum] = {}

    def append(self, step: int, values: NDArray, *, time: float | None = None, bases: tuple[float, float] = (0.0, 0.0)) -> None:
        """Append the values of a step later than those before. `bases`: numbers that the values are measured by, averaged in coarser
        records. Raises OSError if the disk cannot take it: the step is lost, and later ones may follow."""
        row = np.ascontiguousarray(values, dtype=self._type)
        assert row.shape == (self._width,), (row.shape, self._width)
        at = clock.time() if time is None else time
        self._write(0, step, step, 1, at, bases, [row])
        self._feed(1, step, step, 1, at, np.array(bases), row, row, None, None)

    def _feed(
        self,
        level: int,
        first: int,
        last: int,
        steps: int,
        time: float,
        bases: NDArray[np.float64],
        low: NDArray,
        high: NDArray,
        total: NDArray[np.float64] | None,
        known: NDArray[np.int64] | None,
    ) -> None:
        """Add a record of the level below to the one of this level that is not whole yet."""
        if level >= LEVELS:
            return
        if self._kind == "numbers" and total is None:
            known = np.isfinite(low).astype(np.int64)
            total = np.where(known > 0, low, 0.0).astype(np.float64)
        held = self._open.get(level)
        if held is None:
            held = self._open[level] = _Sum(first, last, 0, 0, time, np.zeros(2), low.copy(), high.copy(), None, None)
            held.total, held.known = (None, None) if total is None or known is None else (total.copy(), known.copy())
        else:
            held.low, held.high = self._least(held.low, low), np.fmax(held.high, high)
            if total is not None and known is not None and held.total is not None and held.known is not None:
                held.total, held.known = held.total + total, held.known + known
        held.last, held.time = last, time
        held.steps, held.records, held.bases = held.steps + steps, held.records + 1, held.bases + bases * steps
        if held.records == FAN:
            self._end(level)

    def _least(self, one: NDArray, other: NDArray) -> NDArray:
        if self._kind == "numbers":
            return np.fmin(one, other)
        return np.minimum(one - np.uint8(1), other - np.uint8(1)) + np.uint8(1)  # 0, a missing value, counts as the most

    def _end(self, level: int) -> None:
        """Write the record of a level that has been added up, and add it to the level above."""
        held = self._open.pop(level)
        arrays, bases = [held.low, held.high], held.bases / held.steps
        if held.total is not None and held.known is not None:
            with np.errstate(invalid="ignore"):
                arrays.append((held.total / held.known).astype(self._type))
        self._write(level, held.first, held.last, held.steps, held.time, (float(bases[0]), float(bases[1])), arrays)
        self._feed(level + 1, held.first, held.last, held.steps, held.time, bases, held.low, held.high, held.total, held.known)

    def _write(
        self, level: int, first: int, last: int, steps: int, time: float, bases: tuple[float, float], arrays: Sequence[NDArray]
    ) -> None:
        head = _HEAD.pack(first, last, steps, time, *bases)
        record = head + _SUM.pack(zlib.crc32(head)) + b"".join(array.tobytes() for array in arrays)
        if level in self._files and self._files[level][1] >= self._most(level):
            os.close(self._files.pop(level)[0])
        if level not in self._files:
            self._files[level] = self._begin(level, first), 0
        file, records = self._files[level]
        try:
            if os.write(file, record) < len(record):
                raise OSError(28, os.strerror(28))
        except OSError:
            os.close(self._files.pop(level)[0])  # what follows goes to another file
            raise
        self._files[level] = file, records + 1

    def _most(self, level: int) -> int:
        """Records of a file."""
        return max(self._keep // SEGMENTS // record_bytes(self._kind, self._width, level), LEAST // SEGMENTS)

    def _begin(self, level: int, first: int) -> int:
        """Begin a file, and remove the oldest ones of its level that are beyond what is kept."""
        older = [segment for segment in _segments(self._folder) if segment.level == level]
        room = max(self._keep, LEAST * record_bytes(self._kind, self._width, level))
        for segment in reversed(older):
            room -= segment.size
            if room < 0:
                Path(segment.path).unlink(missing_ok=True)
        path = self._folder / _name(self._piece, level, first)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC, 0o644)
        os.write(file, _FILE.pack(_MAGIC, list(_TYPES).index(self._kind), level, self._width))
        return file

    def close(self) -> None:
        """Write incomplete records as shorter ones, and close the files. No OSError is raised."""
        with contextlib.suppress(OSError):
            for level in range(1, LEVELS):
                if level in self._open:
                    self._end(level)
        for file, _ in self._files.values():
            os.close(file)
        self._files.clear()


def _name(piece: int, level: int, first: int) -> str:
    return f"{piece:06d}-{level:02d}-{first:015d}.bin"


@dataclass(frozen=True)
class _Segment:
    """A file, as its name and size say."""

    path: str
    piece: int
    level: int
    first: int
    size: int
    inode: int


def _segments(folder: Path) -> list[_Segment]:
    """The files of a table, by piece, level and first step."""
    found = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if match := _NAME.fullmatch(entry.name):
                    with contextlib.suppress(FileNotFoundError):
                        piece, level, first = map(int, match.groups())
                        stat = entry.stat()
                        found.append(_Segment(entry.path, piece, level, first, stat.st_size, stat.st_ino))
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(found, key=lambda one: (one.piece, one.level, one.first))


@dataclass(frozen=True)
class View:
    """Some records of a table, oldest first. Arrays have a row a record; `low`, `high` and `mean` have a column a value."""

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
    """A record: its file, its place there, its head."""

    run: "_Run"
    offset: int
    head: "Head"


Head = tuple[int, int, int, float, float, float]
"""First step, last step, steps, time, and two numbers that values are measured by."""


@dataclass
class _Known:
    """Parts of a file that never change, read once: its format, and heads of whole records."""

    kind: str
    width: int
    segment: _Segment
    heads: dict[int, Head] = field(default_factory=dict)

    def holds_for(self, segment: _Segment) -> bool:
        """True if the file is the same and has only grown."""
        return self.segment.inode == segment.inode and self.segment.size <= segment.size


class _Run:
    """A file of a table. It is opened when something unknown is read."""

    def __init__(self, segment: _Segment, known: _Known) -> None:
        self.segment, self.kind, self.width, self._heads = segment, known.kind, known.width, known.heads
        self.record = record_bytes(known.kind, known.width, segment.level)
        self.count = max(0, (segment.size - _FILE.size) // self.record)
        self._file: int | None = None

    def read(self, size: int, offset: int) -> bytes:
        """Return bytes at a place: fewer at the end of the file, none if it was removed meanwhile."""
        if self._file is None:
            try:
                self._file = os.open(self.segment.path, os.O_RDONLY)
            except FileNotFoundError:
                return b""
        return os.pread(self._file, size, offset)

    def close(self) -> None:
        """Close the file, if it was opened."""
        if self._file is not None:
            os.close(self._file)

    def head(self, index: int) -> Head | None:
        """The head of a record; None for one that is not whole."""
        if (known := self._heads.get(index)) is not None:
            return known
        read = self.read(_START, _FILE.size + index * self.record)
        if len(read) < _START or _SUM.unpack(read[_HEAD.size :])[0] != zlib.crc32(read[: _HEAD.size]):
            return None
        if len(self._heads) >= HEADS:
            self._heads.clear()
        return self._heads.setdefault(index, _HEAD.unpack(read[: _HEAD.size]))

    def index(self, step: int) -> int:
        """The first record that ends at a step or later."""
        low, high = 0, self.count
        while low < high:
            middle = (low + high) // 2
            head = self.head(middle)
            low, high = (middle + 1, high) if head is not None and head[1] < step else (low, middle)
        return low


class Reader:
    """Reads a table while it is written, or later. A file that is damaged is left out."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, _Known] = {}

    @contextlib.contextmanager
    def _files(self) -> Iterator[dict[int, dict[int, list[_Run]]]]:
        """Piece -> level -> files."""
        found: dict[int, dict[int, list[_Run]]] = {}
        files: list[_Run] = []
        known = dict[str, _Known]()
        try:
            for segment in _segments(self._folder):
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
        """Values a step of the newest piece; 0 while there is none."""
        for segment in reversed(_segments(self._folder)):
            if (what := _format(segment)) is not None:
                return what.width
        return 0

    def span(self) -> tuple[int, int] | None:
        """The first and the last step; None while there is none."""
        with self._files() as pieces:
            ends = [end for levels in pieces.values() if (end := _ends(levels)) is not None]
        return (min(first for first, _ in ends), max(last for _, last in ends)) if ends else None

    def newest(self) -> tuple[int, int, float, float] | None:
        """The newest step's piece, number and two bases; None while there is none."""
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
        """Return the records of steps from `first` to `last`, about `most` of them, with the values in `values` alone.

        Steps that were done again come again. Pieces of another `width` than the newest one (or the one given) are left out, and so is
        what was written after step B of piece A where `until` is (A, B). Time and memory follow `most` times the number of values,
        whatever the length of the run.
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


def _format(segment: _Segment) -> _Known | None:
    with contextlib.suppress(OSError), open(segment.path, "rb") as file:
        read = file.read(_FILE.size)
        if len(read) == _FILE.size:
            magic, kind, level, width = _FILE.unpack(read)
            if magic == _MAGIC and kind < len(_TYPES) and level == segment.level:
                return _Known(list(_TYPES)[kind], width, segment)
    return None


def _width(levels: dict[int, list[_Run]]) -> int:
    return next((run.width for runs in levels.values() for run in runs), 0)


def _ends(levels: dict[int, list[_Run]]) -> tuple[int, int] | None:
    """The first and the last step of a piece."""
    heads = [head for runs in levels.values() for run in runs for i in (0, run.count - 1) if run.count and (head := run.head(i))]
    return (min(head[0] for head in heads), max(head[1] for head in heads)) if heads else None


def _choose(levels: dict[int, list[_Run]], first: int, last: int, *, most: int) -> list[_At]:
    """Records of one piece from the finest level that has them all and no more than `most`; what is not in a whole record of that level
    yet, from finer ones."""
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
                found.append(_At(run, _FILE.size + index * run.record + _START, head))
        first = max(first, found[-1].head[1] + 1) if found else first
    return found


def _view(chosen: Sequence[tuple[int, _At]], values: Sequence[slice]) -> View:
    kind = chosen[0][1].run.kind if chosen else "numbers"
    size = sum(one.stop - one.start for one in values)
    arrays = np.zeros((3, len(chosen), size), dtype=_TYPES[kind])
    for begin, end in _stretches([at for _, at in chosen]):
        at = chosen[begin][1]
        number = _arrays(at.run.kind, at.run.segment.level)
        read = _read if at.run.record > BLOCK else _read_block
        for k in range(3):
            arrays[k, begin:end] = read([one for _, one in chosen[begin:end]], min(k, number - 1), values)
    heads = [at.head for _, at in chosen]
    column = lambda i, what: np.array([head[i] for head in heads], dtype=what)  # noqa: E731
    bases = np.array([head[4:] for head in heads], dtype=np.float64).reshape(-1, 2)
    pieces = np.array([piece for piece, _ in chosen], dtype=np.int64)
    return View(pieces, column(0, np.int64), column(1, np.int64), column(2, np.int64), column(3, np.float64), bases, *arrays)


def _stretches(chosen: Sequence[_At]) -> Iterator[tuple[int, int]]:
    """Yield from where to where records follow each other in one file."""
    begin = 0
    for end in range(1, len(chosen) + 1):
        before = chosen[end - 1]
        if end == len(chosen) or chosen[end].run is not before.run or chosen[end].offset != before.offset + before.run.record:
            yield begin, end
            begin = end


def _read(stretch: Sequence[_At], array: int, values: Sequence[slice]) -> NDArray:
    """Some values of one array of wide records; missing ones where the file ends early."""
    run, dtype = stretch[0].run, _TYPES[stretch[0].run.kind]
    rows = []
    for at in stretch:
        start, parts = at.offset + array * run.width * dtype.itemsize, []
        for one in values:
            wanted = (one.stop - one.start) * dtype.itemsize
            parts.append(run.read(wanted, start + one.start * dtype.itemsize).ljust(wanted, b"\0"))
        rows.append(np.frombuffer(b"".join(parts), dtype=dtype))
    return np.stack(rows)


def _read_block(stretch: Sequence[_At], array: int, values: Sequence[slice]) -> NDArray:
    """Do the same for narrow records, which are read together."""
    run, dtype = stretch[0].run, _TYPES[stretch[0].run.kind]
    whole = run.read(len(stretch) * run.record, stretch[0].offset - _START).ljust(len(stretch) * run.record, b"\0")
    table = np.frombuffer(whole, dtype=np.uint8).reshape(len(stretch), run.record)[
        :, _START + array * run.width * dtype.itemsize :
    ]
    columns = [table[:, one.start * dtype.itemsize : one.stop * dtype.itemsize] for one in values]
    return np.ascontiguousarray(np.concatenate(columns, axis=1)).view(dtype)
