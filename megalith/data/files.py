"""The files of a source: selects the files to read, gives reasons why other files are not read, and opens files.

A folder's files are found in the order of their names. Hidden entries, links, special files, binary files, and files with the
same bytes as an earlier one are not read, but counted and named.
"""

import bz2
import gzip
import importlib
import io
import lzma
import os
import stat
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from megalith.data.errors import DataError
from megalith.data.manifest import Reading, SkippedFiles

JSON_LINES = (".jsonl", ".ndjson")
COMPRESSED = (".xz", ".gz", ".bz2", ".zst")
PARQUET = ".parquet"
KINDS_READ = (
    f"Megalith reads JSON lines ({', '.join(JSON_LINES)}) and UTF-8 text under any other name, "
    f"plain or compressed ({', '.join(COMPRESSED)}), and Parquet ({PARQUET}, with the extra `parquet`)."
)
HEAD = 8192
"""A file counts as binary if one of its first HEAD bytes is zero, as in git."""

BINARY, NO_PARQUET, COPY, HIDDEN, LINK, SPECIAL, ENDING = (
    "binary",
    "Parquet without the extra `parquet`",
    "the same bytes as another file",
    "hidden",
    "links",
    "neither files nor folders",
    "another ending than asked for",
)
_PIECE, _BUFFER = 1 << 16, 1 << 20
_NAMES_SHOWN = 5
_ENDINGS_SHOWN = 10

# Formats that may have no zero byte in their head. Of the tables, which hold text as well, Parquet alone is read.
_TABLES = (PARQUET, ".arrow", ".feather", ".orc", ".avro")
_BINARY = (*_TABLES, ".pdf", ".zip", ".tar", ".tgz", ".7z", ".rar", ".lz4", ".br", ".docx", ".xlsx", ".epub")


@dataclass(frozen=True)
class SourceFiles:
    """The files of a source in order; the files among them that are not read, with reasons; the entries that the search skipped, with
    reasons."""

    root: Path
    files: tuple[Path, ...]
    unread: Mapping[Path, str]
    passed: Mapping[Path, str]

    def left_out(self) -> tuple[SkippedFiles, ...]:
        """Return all files left out, grouped by reason, for the manifest."""
        reasons: dict[str, list[Path]] = {}
        for path, reason in sorted({**self.unread, **self.passed}.items()):
            reasons.setdefault(reason, []).append(path.relative_to(self.root))
        return tuple(_left_out(reason, paths) for reason, paths in sorted(reasons.items()))


def find(root: Path, reading: Reading) -> SourceFiles:
    """Find the files of a source. Raises DataError for a file in a format that Megalith does not read, a folder without readable files, and
    a subfolder that cannot be listed."""
    if not root.is_dir():
        if is_named_binary(root) and not (is_parquet(root) and reads_parquet()):
            raise unreadable_kind(root)
        return SourceFiles(root, (root,), {}, {})
    files: list[Path] = []
    passed: dict[Path, str] = {}
    for path, reason in _walk(root, reading):
        if reason:
            passed[path] = reason
        else:
            files.append(path)
    found = SourceFiles(root, tuple(files), {path: reason for path in files if (reason := _unread(path))}, passed)
    if len(found.unread) == len(found.files):
        raise _nothing_read(found)
    return found


def _nothing_read(found: SourceFiles) -> DataError:
    left = found.left_out()
    reason = f"{found.root} holds no file that Megalith can read" + (
        f"; left out are {'; '.join(map(str, left))}" if left else ""
    )
    return DataError(reason, f"{KINDS_READ} {_conversion(next(iter(found.unread), found.root))}")


def files(root: Path, reading: Reading) -> Iterator[Path]:
    """Yield the regular files of a source in order, including binary ones. If the source is a file, yield this file."""
    if root.is_dir():
        yield from (path for path, reason in _walk(root, reading) if not reason)
    else:
        yield root


def _walk(root: Path, reading: Reading) -> Iterator[tuple[Path, str]]:
    """Yield the files of a folder, each with the reason to skip it, or ""."""
    for folder, folders, names in os.walk(root, onerror=_refuse_unlisted):
        entered: list[str] = []
        for name in sorted(folders):
            path = Path(folder, name)
            if reason := HIDDEN if name.startswith(".") else LINK if path.is_symlink() else "":
                yield path, reason
            else:
                entered.append(name)
        folders[:] = entered
        for name in sorted(names):
            path = Path(folder, name)
            yield path, _reason(path, reading)


def _reason(path: Path, reading: Reading) -> str:
    if path.name.startswith("."):
        return HIDDEN
    if path.is_symlink():
        return LINK
    if not path.is_file():
        return SPECIAL
    return "" if reading.extensions is None or path.name.endswith(reading.extensions) else ENDING


def _refuse_unlisted(error: OSError) -> None:
    raise DataError(
        f"The folder {error.filename} cannot be listed: {error.strerror}", "Make the folder readable, or move it away."
    ) from error


def refuse_special(path: Path) -> None:
    """Raise DataError for a pipe, a socket or a device, because opening it may block forever."""
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode) or stat.S_ISREG(mode):
        return
    what = "a pipe, as the shell's <(...) is" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device"
    raise DataError(
        f"The source {str(path)!r} is {what}; only files and folders can be sources, because each source is read twice, once "
        "for its digest",
        "Write the text to a file, such as text.jsonl, and name that file.",
    )


def is_binary(path: Path, head: bytes) -> bool:
    """True if a file in a folder is not text, judging by its ending or its first unpacked bytes."""
    return is_named_binary(path) or b"\0" in head


def is_named_binary(path: Path) -> bool:
    """True if a file's ending belongs to a binary format, compressed or not."""
    return path.name.lower().removesuffix(ending(path, COMPRESSED)).endswith(_BINARY)


def is_json_lines(path: Path, *, in_folder: bool) -> bool:
    """True if a file is JSON lines, judging by its ending. In folders .json files do not count, because they are usually configuration."""
    endings = JSON_LINES if in_folder else (*JSON_LINES, ".json")
    return path.name.lower().removesuffix(ending(path, COMPRESSED)).endswith(endings)


def is_parquet(path: Path) -> bool:
    """True if a file is a Parquet table, judging by its ending. A Parquet file that is itself compressed (.parquet.gz) is not read."""
    return path.name.lower().endswith(PARQUET)


def reads_parquet() -> bool:
    """True if pyarrow is installed, which is part of the extra `parquet`."""
    return find_spec("pyarrow") is not None


def _unread(path: Path) -> str:
    """Return the reason why a file in a folder is not read; empty if it is read."""
    if is_parquet(path):
        return "" if reads_parquet() else NO_PARQUET
    if is_named_binary(path):
        return BINARY
    if is_json_lines(path, in_folder=True):
        return ""
    with opened(path) as (_, stream):
        return BINARY if is_binary(path, stream.read(HEAD)) else ""


def unreadable_kind(path: Path) -> DataError:
    """Return the error for a file that is not text, or is Parquet without pyarrow."""
    if is_parquet(path):
        return DataError(f"{path} is Parquet, but the package pyarrow is not installed", _conversion(path))
    return DataError(f"{path} is not text: Megalith does not read {_ending_of(path)} files", f"{KINDS_READ} {_conversion(path)}")


def _conversion(path: Path) -> str:
    if is_parquet(path):
        target = f"{path.stem}.jsonl"
        call = f"pandas.read_parquet({path.name!r}).to_json({target!r}, orient='records', lines=True)"
        return f"Install the extra `parquet` (pip install pyarrow), or convert the file on another machine: {call}."
    return "Convert the file to a format that Megalith reads, or leave the source out."


def _left_out(reason: str, paths: list[Path]) -> SkippedFiles:
    endings = Counter(map(_ending_of, paths)).most_common(_ENDINGS_SHOWN)
    names = tuple(printable(path.as_posix()) for path in paths[:_NAMES_SHOWN])
    return SkippedFiles(reason=reason, count=len(paths), endings=dict(endings), names=names)


def printable(path: str) -> str:
    """Return a path with bytes that are not UTF-8 escaped, as the manifest needs."""
    return path.encode("utf-8", "backslashreplace").decode()


def _ending_of(path: Path) -> str:
    last = path.suffixes[-2:] if path.suffix in COMPRESSED else path.suffixes[-1:]
    return printable("".join(last)) if last else "no ending"


@contextmanager
def opened(path: Path) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Yield two streams of a file: the bytes on disk, and the unpacked bytes. Raises DataError if a read in the block finds damage."""
    try:
        with path.open("rb") as raw, _unpacked(raw, path) as stream:
            yield raw, stream
    except Exception as error:  # five libraries unpack, with no common error
        if not _is_damage(error):
            raise
        raise DataError(f"{path} cannot be unpacked: {error}. Copy or download the file again.") from error


def _unpacked(raw: IO[bytes], path: Path) -> IO[bytes]:
    match ending(path, COMPRESSED):
        case ".xz":
            return lzma.open(raw)
        case ".gz":
            return gzip.open(raw)  # type: ignore[return-value]
        case ".bz2":
            return bz2.open(raw)
        case ".zst":
            return _zstandard(raw, path)
    return raw


def _zstandard(raw: IO[bytes], path: Path) -> IO[bytes]:
    with suppress(ImportError):
        return importlib.import_module("compression.zstd").open(raw, "rb")  # Python 3.14's own
    try:
        package = importlib.import_module("zstandard")
    except ImportError:
        raise DataError(
            f"{path} needs Python 3.14 or the package zstandard to unpack. Install zstandard, or compress the file as .xz or .gz."
        ) from None
    return io.BufferedReader(_Frames(raw, package.ZstdDecompressor().decompressobj), _BUFFER)


class _Frames(io.RawIOBase):
    """The unpacked content of a file's zstd frames. The reader of the package `zstandard` gives no lines, and takes a cut frame for the
    end."""

    def __init__(self, packed: IO[bytes], new_frame: Callable[[], Any]) -> None:
        self._file, self._new_frame = packed, new_frame
        self._frame: Any = None
        self._packed, self._unpacked = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._unpacked:
            packed = self._packed or self._file.read(_PIECE)
            if not packed and self._frame is not None:
                raise EOFError("the file ends within a frame")
            if not packed:
                return 0
            frame = self._frame or self._new_frame()
            self._unpacked = memoryview(frame.decompress(packed))
            self._packed = frame.unused_data  # the beginning of the next frame
            self._frame = None if frame.eof else frame
        count = min(len(buffer), len(self._unpacked))
        buffer[:count] = self._unpacked[:count]
        self._unpacked = self._unpacked[count:]
        return count


def _is_damage(error: Exception) -> bool:
    """True if a library reports that compressed bytes are damaged; bz2 and gzip raise OSError without an error number."""
    named = isinstance(error, (lzma.LZMAError, zlib.error, EOFError)) or type(error).__name__ == "ZstdError"
    return named or (isinstance(error, OSError) and error.errno is None)


def ending(path: Path, endings: tuple[str, ...]) -> str:
    """Return the first of `endings` with which a file's name ends, in capitals or not; or ""."""
    return next((one for one in endings if path.name.lower().endswith(one)), "")
