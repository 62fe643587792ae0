"""Sources of text: files, folders and the bundled novels, read as a stream of documents.

| source | a document is |
|---|---|
| `x.jsonl`, `.ndjson`, `.json` | one line's text field |
| `x.parquet` | one row's text column (with the extra `parquet`) |
| `x.txt` or any other file | what `Reading.split` says; default: paragraphs, until they make `Reading.minimum` characters |
| a folder | a file (a line, in JSON lines); what `files` leaves out is counted and named |
| `bundled:austen` | a chapter; the first chapter includes the novel's title page |

Each may be compressed (`.xz`, `.gz`, `.bz2`, `.zst`). Text is UTF-8; line ends become `\\n`; blank documents are left out.
"""

import codecs
import errno
import hashlib
import io
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from megalith.data import bundled, files
from megalith.data.errors import DataError
from megalith.data.files import SourceFiles
from megalith.data.manifest import DEFAULT_READING, Reading, SourceRecord, file_digest
from megalith.data.parquet import rows

Advance = Callable[[int], None]

_DOMAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,199}")  # of a length that leaves room in the names of shards
_CHAPTERS = (
    r"heading:(CHAPTER|Chapter) [IVXL0-9]+|VOLUME [IVX]+$|(EMMA|MANSFIELD PARK|NORTHANGER ABBEY|Persuasion"
    r"|PRIDE AND PREJUDICE|SENSE AND SENSIBILITY)$"
)
_CHUNK = 1 << 20
_LEAK = "documents held out for validation would also be among the training data"
_ONCE = "Give each text once. To read a domain more often, use [data] weights."


@dataclass(frozen=True)
class Source:
    """A source of text, and the domain of its documents."""

    domain: str
    path: str

    @property
    def name(self) -> str:
        """Name in the manifest: the last path component, so that a manifest does not depend on the location of the data."""
        return self.path if self.path == bundled.AUSTEN else files.printable(Path(self.path).resolve().name)


def parse_source(text: str) -> Source:
    """Parse `NAME=PATH`, or `PATH`, whose file or folder name becomes the domain's name. Raises DataError for an invalid name,
    and for a pipe, a socket or a device."""
    source = _named(text)
    if source.path != bundled.AUSTEN and _exists(source.path):
        files.refuse_special(Path(source.path))
    if not _DOMAIN.fullmatch(source.domain):
        raise DataError(
            f"The source {text!r} gives its domain the name {source.domain!r}, but a name has at most 200 letters, digits and "
            f"_ . - and begins with a letter or digit. Write NAME={text} to choose a valid name."
        )
    return source


def _named(text: str) -> Source:
    """Parse a source, without a check of the domain's name."""
    name, equals, path = text.partition("=")
    if equals and _DOMAIN.fullmatch(name) and path and not _exists(text):
        return Source(name, path)
    if text == bundled.AUSTEN:
        return Source("austen", text)
    return Source(_without_endings(Path(text).resolve().name), text)


def _exists(path: str) -> bool:
    """True if a path exists; False also for text that is too long for a path."""
    try:
        return Path(path).exists()
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return False


def parse_sources(texts: Iterable[str | Source]) -> tuple[Source, ...]:
    """Parse all sources. Each source must exist and be given only once. Raises DataError with all problems at once."""
    sources: list[Source] = []
    problems: list[str | DataError] = []
    for text in texts:
        try:
            source = parse_source(text) if isinstance(text, str) else text
        except DataError as error:
            problems.append(error)
            continue
        if source.path != bundled.AUSTEN and not _exists(source.path):
            problems.append(
                f"The source {source.path!r} (domain {source.domain}) does not exist in {Path.cwd()}. "
                f"Give a file, a folder or {bundled.AUSTEN}, with NAME= before it to name its domain."
            )
        sources.append(source)
    if not (sources or problems):
        problems.append(f"No source was given. Give a file, a folder or {bundled.AUSTEN}.")
    problems += _given_twice(sources)
    if problems:
        raise DataError.of(problems, title="The sources cannot be read")
    return tuple(sources)


def _given_twice(sources: Sequence[Source]) -> Iterator[DataError]:
    """Yield a problem for each source that is the same file or folder as an earlier one, perhaps through a link."""
    for number, source in enumerate(sources):
        for other in sources[:number]:
            if _is_same(source, other):
                given = f"{other.path!r} (domain {other.domain}) and {source.path!r} (domain {source.domain})"
                yield DataError(f"The sources {given} are the same: {_LEAK}", _ONCE)


def _is_same(one: Source, other: Source) -> bool:
    if bundled.AUSTEN in (one.path, other.path):
        return one.path == other.path
    first, second = Path(one.path), Path(other.path)
    return _exists(one.path) and _exists(other.path) and first.samefile(second)


def find(source: Source, reading: Reading) -> SourceFiles | None:
    """Find the files of a source; None for the bundled text. Raises DataError if there is no readable file."""
    return None if source.path == bundled.AUSTEN else files.find(Path(source.path), reading)


def size(source: Source, reading: Reading) -> int:
    """Return the bytes on disk that will be read for this source."""
    if source.path == bundled.AUSTEN:
        return len(bundled.austen())
    return sum(path.stat().st_size for path in files.files(Path(source.path), reading))


def record(
    source: Source, reading: Reading, advance: Advance = lambda _: None, seen: MutableMapping[str, Path] | None = None
) -> tuple[SourceRecord, SourceFiles | None]:
    """Return the record of a source (with a digest over the names and contents of its files), and its files.

    `seen`: digest -> file, for the files of earlier sources; this call adds the files of this source. A file with the same bytes as an
    earlier file is not read. Raises DataError if no file is left to read.
    """
    found = find(source, reading)
    if found is None:
        content = bundled.austen().encode()
        advance(len(content))
        digest = hashlib.sha256(content).hexdigest()
        return SourceRecord(domain=source.domain, name=source.name, files=1, bytes=len(content), sha256=digest), None
    seen = {} if seen is None else seen
    unread, lines, total, copy = dict(found.unread), [], 0, ""
    for path in found.files:
        digest, length = file_digest(path, advance), path.stat().st_size
        lines.append(f"{path.relative_to(found.root).as_posix()}\0{digest}\n")
        total += length
        if path in unread or not length:
            continue
        if digest in seen:
            unread[path] = files.COPY
            copy = f"{path} has the same bytes as {seen[digest]}"
        else:
            seen[digest] = path
    if copy and len(unread) == len(found.files):
        raise DataError(f"The source {source.path!r} holds only text that is also in another source: {copy}, and {_LEAK}", _ONCE)
    found = replace(found, unread=unread)
    recorded = SourceRecord(
        domain=source.domain,
        name=source.name,
        files=len(found.files),
        bytes=total,
        sha256=hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest(),
        left_out=found.left_out(),
    )
    return recorded, found


def check_split(reading: Reading) -> None:
    """Raise DataError for a wrong `Reading.split`, also if no source contains text that is split."""
    if reading.split is not None:
        next(iter(_blocks((), reading.split, 0)), None)


def documents(
    source: Source, reading: Reading = DEFAULT_READING, advance: Advance = lambda _: None, unread: Collection[Path] = ()
) -> Iterator[str]:
    """Yield the source's documents in order, without those in the files `unread`; `advance` is called with the bytes read from disk.

    Raises DataError for text that is not UTF-8, JSON lines without the field, damaged compression, a wrong `Reading.split`.
    """
    check_split(reading)
    if source.path == bundled.AUSTEN:
        text = bundled.austen()
        yield from _split(io.StringIO(text), reading.split or _CHAPTERS, reading.minimum)
        advance(len(text))
        return
    folder = Path(source.path).is_dir()
    for path in files.files(Path(source.path), reading):
        if path in unread:
            advance(path.stat().st_size)
            continue
        before = 0

        def advance_to(position: int) -> None:
            nonlocal before
            advance(position - before)
            before = position

        yield from _read(path, reading, advance_to, whole=folder)
        advance_to(path.stat().st_size)


def _read(path: Path, reading: Reading, advance_to: Advance, *, whole: bool) -> Iterator[str]:
    """Yield one file's documents. In a folder (`whole`), a plain text file is one document, and a binary file is left out."""
    if files.is_parquet(path) and files.reads_parquet():
        yield from rows(path, reading.field, advance_to)
        return
    if not whole and files.is_named_binary(path):
        raise files.unreadable_kind(path)
    with files.opened(path) as (raw, stream):
        if files.is_json_lines(path, in_folder=whole):
            for text in _json_lines(stream, path, reading.field):
                advance_to(raw.tell())
                yield text
            return
        try:
            if whole:
                yield from _whole_file(stream, path)
            else:
                lines = io.TextIOWrapper(stream, encoding="utf-8-sig")
                for text in _split(lines, reading.split or "blank", reading.minimum):
                    advance_to(raw.tell())
                    yield text
        except UnicodeDecodeError as error:
            raise _not_utf8(path) from error


def _whole_file(stream: IO[bytes], path: Path) -> Iterator[str]:
    head = stream.read(files.HEAD)
    if files.is_binary(path, head):
        return
    text = (head + stream.read()).decode("utf-8-sig")
    if text.strip():
        yield text.replace("\r\n", "\n").replace("\r", "\n")


def _not_utf8(path: Path) -> DataError:
    """Return the error for a file that is not UTF-8. The file is read again to find the byte, because the reader that failed had read
    ahead."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset, line = 0, 1
    with files.opened(path) as (_, stream):
        while True:
            piece = stream.read(_CHUNK)
            pending = decoder.getstate()[0]
            try:
                decoder.decode(piece, final=not piece)
            except UnicodeDecodeError as error:
                if offset == 0 and b"\0" in piece[: files.HEAD]:
                    return files.unreadable_kind(path)
                line += error.object[: error.start].count(b"\n")
                return _wrong_byte(path, line, offset - len(pending) + error.start, error)
            if not piece:
                return DataError(f"{path} changed while it was read", "Run the command again.")
            offset += len(piece)
            line += piece.count(b"\n")


def _wrong_byte(path: Path, line: int, offset: int, error: UnicodeDecodeError) -> DataError:
    unpacked = " of the unpacked text" if files.ending(path, files.COMPRESSED) else ""
    return DataError(
        f"{path}:{line} is not UTF-8 text: byte {error.object[error.start]:#04x} at offset {offset}{unpacked} ({error.reason})",
        "Convert the file, for example with `iconv -f latin1 -t utf-8`, or leave the file out: --extension selects the files "
        "of a folder.",
    )


def _json_lines(stream: IO[bytes], path: Path, field: str) -> Iterator[str]:
    end = 0
    for number, line in enumerate(stream, start=1):
        start, end = end, end + len(line)
        if not line.strip():
            continue
        try:
            value: Any = json.loads(line)
        except UnicodeDecodeError as error:
            raise _wrong_byte(path, number, start + error.start, error) from error
        except ValueError as error:
            raise DataError(f"{path}:{number} is not valid JSON: {error}. Each line must hold one object.") from error
        except RecursionError as error:
            raise DataError(
                f"{path}:{number} is nested too deeply to read: {error}", "Flatten the line, or remove it."
            ) from error
        text = value.get(field) if isinstance(value, dict) else None
        if not isinstance(text, str):
            held = ", ".join(value) if isinstance(value, dict) else type(value).__name__
            raise DataError(
                f"{path}:{number} has no text in field {field!r} (its fields: {held}). Name the text field with --field."
            )
        if text.strip():
            # JSON can hold half a surrogate pair, which is no character and cannot be encoded
            yield text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _split(lines: Iterable[str], how: str, minimum: int) -> Iterator[str]:
    """Yield the documents in a stream of lines. Line ends around a document are removed, except one final line end if documents are not
    single lines."""
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
    """Return three values: a function that tests if a line ends the document before it, True if such a line is itself part of a
    document, and the minimum length of a document."""
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


def _without_endings(name: str) -> str:
    for endings in (files.COMPRESSED, (*files.JSON_LINES, ".json", ".txt", files.PARQUET)):
        name = name[: len(name) - len(files.ending(Path(name), endings))]
    return name
