"""Where text comes from: files, folders and the bundled novels, read as a stream of documents.

| source | a document is |
|---|---|
| `x.jsonl`, `.ndjson`, `.json` | one line's text field |
| `x.txt` or any other file | what `Reading.split` says; default: paragraphs, until they make `Reading.minimum` characters |
| a folder | a file (a line, in JSON lines); hidden files, links and binaries are left out |
| `bundled:austen` | a chapter, with the title page before it |

Each may be compressed (`.xz`, `.gz`, `.bz2`, `.zst`). Text is UTF-8; line ends become `\\n`; blank documents are left out.
"""

import bz2
import errno
import gzip
import hashlib
import importlib
import io
import json
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from megalith.data import bundled
from megalith.data.errors import DataError
from megalith.data.manifest import DEFAULT_READING, Reading, SourceRecord, file_digest

Advance = Callable[[int], None]

_DOMAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,199}")  # of a length that leaves room in the names of shards
_CHAPTERS = (
    r"heading:(CHAPTER|Chapter) [IVXL0-9]+|VOLUME [IVX]+$|(EMMA|MANSFIELD PARK|NORTHANGER ABBEY|Persuasion"
    r"|PRIDE AND PREJUDICE|SENSE AND SENSIBILITY)$"
)
_JSON_LINES = (".jsonl", ".ndjson")
_COMPRESSED = (".xz", ".gz", ".bz2", ".zst")


@dataclass(frozen=True)
class Source:
    """One place text comes from, and the domain its documents belong to."""

    domain: str
    path: str

    @property
    def name(self) -> str:
        """What the manifest calls it: its last path component, so that a manifest does not depend on where data lies."""
        return self.path if self.path == bundled.AUSTEN else Path(self.path).resolve().name


def parse_source(text: str) -> Source:
    """`NAME=PATH`, or `PATH` whose file or folder name becomes the domain's. Raises DataError for a name that cannot be one."""
    name, equals, path = text.partition("=")
    if equals and _DOMAIN.fullmatch(name) and path and not _exists(text):
        return Source(name, path)
    if text == bundled.AUSTEN:
        return Source("austen", text)
    name = _without_endings(Path(text).resolve().name)
    if not _DOMAIN.fullmatch(name):
        raise DataError(
            f"The source {text!r} gives its domain the name {name!r}; a name is made of at most 200 letters, digits and _ . - "
            f"and begins with a letter or digit. Write NAME={text} to choose one."
        )
    return Source(name, text)


def _exists(path: str) -> bool:
    """False also for what is too long to be a path."""
    try:
        return Path(path).exists()
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return False


def parse_sources(texts: Iterable[str | Source]) -> tuple[Source, ...]:
    """All sources, each of which must exist. Raises DataError with all problems at once."""
    sources: list[Source] = []
    problems: list[str] = []
    for text in texts:
        try:
            source = parse_source(text) if isinstance(text, str) else text
        except DataError as error:
            problems.append(str(error))
            continue
        if source.path != bundled.AUSTEN and not _exists(source.path):
            problems.append(
                f"The source {source.path!r} (domain {source.domain}) does not exist in {Path.cwd()}. "
                f"Give a file, a folder or {bundled.AUSTEN}, with NAME= before it to name its domain."
            )
        sources.append(source)
    if not (sources or problems):
        problems.append(f"No source was given. Give a file, a folder or {bundled.AUSTEN}.")
    if problems:
        raise DataError.of(problems, title="The sources cannot be read")
    return tuple(sources)


def size(source: Source, reading: Reading) -> int:
    """Bytes on disk that reading this source will go through."""
    if source.path == bundled.AUSTEN:
        return len(bundled.austen())
    return sum(path.stat().st_size for path in _files(source, reading))


def record(source: Source, reading: Reading, advance: Advance = lambda _: None) -> SourceRecord:
    """What a source holds now: names, sizes and contents of its files, reduced to one digest."""
    if source.path == bundled.AUSTEN:
        content = bundled.austen().encode()
        advance(len(content))
        return SourceRecord(
            domain=source.domain, name=source.name, files=1, bytes=len(content), sha256=hashlib.sha256(content).hexdigest()
        )
    paths = list(_files(source, reading))
    root = Path(source.path)
    lines = [f"{path.relative_to(root).as_posix()}\0{file_digest(path, advance)}\n" for path in paths]
    return SourceRecord(
        domain=source.domain,
        name=source.name,
        files=len(paths),
        bytes=sum(path.stat().st_size for path in paths),
        sha256=hashlib.sha256("".join(lines).encode()).hexdigest(),
    )


def documents(source: Source, reading: Reading = DEFAULT_READING, advance: Advance = lambda _: None) -> Iterator[str]:
    """The source's documents in order; `advance` is told of bytes on disk as they are read.

    Raises DataError for text that is not UTF-8, JSON lines without the field, damaged compression, a wrong `Reading.split`.
    """
    if source.path == bundled.AUSTEN:
        text = bundled.austen()
        yield from _split(io.StringIO(text), reading.split or _CHAPTERS, reading.minimum)
        advance(len(text))
        return
    folder = Path(source.path).is_dir()
    for path in _files(source, reading):
        before = 0

        def told(position: int) -> None:
            nonlocal before
            advance(position - before)
            before = position

        yield from _read(path, reading, told, whole=folder)
        told(path.stat().st_size)


def _files(source: Source, reading: Reading) -> Iterator[Path]:
    root = Path(source.path)
    if not root.is_dir():
        yield root
        return
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(folder, name)
            wanted = reading.extensions is None or name.endswith(reading.extensions)
            if wanted and not name.startswith(".") and path.is_file() and not path.is_symlink():
                yield path


def _read(path: Path, reading: Reading, told: Advance, *, whole: bool) -> Iterator[str]:
    """One file's documents; in a folder (`whole`) a plain file is one document, and one that is not text is left out."""
    try:
        with path.open("rb") as raw, _unpacked(raw, path) as stream:
            endings = _JSON_LINES if whole else (*_JSON_LINES, ".json")  # among sources, .json is configuration
            if path.name.removesuffix(_ending(path, _COMPRESSED)).endswith(endings):
                for text in _json_lines(stream, path, reading.field):
                    told(raw.tell())
                    yield text
            elif whole:
                yield from _whole_file(stream)
            else:
                lines = io.TextIOWrapper(stream, encoding="utf-8-sig")
                for text in _split(lines, reading.split or "blank", reading.minimum):
                    told(raw.tell())
                    yield text
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text: byte {error.object[error.start]:#04x} ({error.reason}). "
            f"Convert it, for example with `iconv -f latin1 -t utf-8`, or leave it out."
        ) from error
    except Exception as error:  # five libraries unpack, with no common error
        if not _is_damage(error):
            raise
        raise DataError(f"{path} does not unpack: {error}. Copy or download it again.") from error


def _whole_file(stream: IO[bytes]) -> Iterator[str]:
    head = stream.read(8192)
    if b"\0" in head:  # what git, too, takes for a binary file
        return
    try:
        text = (head + stream.read()).decode("utf-8-sig")
    except UnicodeDecodeError:
        return
    if text.strip():
        yield text.replace("\r\n", "\n").replace("\r", "\n")


def _json_lines(stream: IO[bytes], path: Path, field: str) -> Iterator[str]:
    for number, line in enumerate(stream, start=1):
        if not line.strip():
            continue
        try:
            value: Any = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}:{number} is not a line of JSON: {error}. Each line holds one object.") from error
        text = value.get(field) if isinstance(value, dict) else None
        if not isinstance(text, str):
            held = ", ".join(value) if isinstance(value, dict) else type(value).__name__
            raise DataError(
                f"{path}:{number} has no text in field {field!r} (it holds: {held}). Name the right one with --field."
            )
        if text.strip():
            # JSON can hold half a surrogate pair, which is no character and cannot be encoded
            yield text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _split(lines: Iterable[str], how: str, minimum: int) -> Iterator[str]:
    """Documents of a stream of lines. White space at either end of a document is cut off, but for one final line end."""
    for block in _blocks(lines, how, minimum):
        text = "".join(block).strip("\n")
        if text.strip():
            yield text + "\n" if how != "line" else text


def _blocks(lines: Iterable[str], how: str, minimum: int) -> Iterator[Sequence[str]]:
    name, _, argument = how.partition(":")
    if name == "line" and not argument:
        yield from ([line] for line in lines)
        return
    if name == "file" and not argument:
        yield list(lines)
        return
    starts, keep_line, minimum = _boundary(how, minimum)
    block: list[str] = []
    length = 0
    for line in lines:
        if starts(line) and length >= minimum:
            yield block
            block, length = [], 0
            if not keep_line:
                continue
        block.append(line)
        length += len(line)
    yield block


def _boundary(how: str, minimum: int) -> tuple[Callable[[str], bool], bool, int]:
    """What makes a line end the document before it, whether that line is kept, and the characters a document needs first."""
    name, _, argument = how.partition(":")
    if how == "blank":
        return (lambda line: not line.strip()), True, minimum
    if name not in ("heading", "delimiter") or not argument:
        raise DataError(f"split={how!r} is not one of: blank, line, file, heading:REGEX, delimiter:REGEX.")
    try:
        pattern = re.compile(argument)
    except re.error as error:
        raise DataError(f"split={how!r}: {argument!r} is not a regular expression: {error}.") from error
    return (lambda line: pattern.match(line) is not None), name == "heading", minimum if name == "heading" else 0


def _unpacked(raw: IO[bytes], path: Path) -> IO[bytes]:
    match _ending(path, _COMPRESSED):
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
    for module in ("compression.zstd", "zstandard"):  # Python 3.14's own, or the package
        try:
            return importlib.import_module(module).open(raw, "rb")
        except ImportError:
            continue
    raise DataError(f"{path} needs Python 3.14 or the package zstandard to unpack. Install it, or pack the file as .xz or .gz.")


def _is_damage(error: Exception) -> bool:
    """Whether a library says that compressed bytes are not whole; bz2 and gzip say it as OSError without an error number."""
    named = isinstance(error, (lzma.LZMAError, zlib.error, EOFError)) or type(error).__name__ == "ZstdError"
    return named or (isinstance(error, OSError) and error.errno is None)


def _ending(path: Path, endings: tuple[str, ...]) -> str:
    return next((ending for ending in endings if path.name.endswith(ending)), "")


def _without_endings(name: str) -> str:
    for endings in (_COMPRESSED, (*_JSON_LINES, ".json", ".txt")):
        name = name.removesuffix(next((ending for ending in endings if name.endswith(ending)), ""))
    return name
