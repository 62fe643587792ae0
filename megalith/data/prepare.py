"""Converts documents to a folder of shards: atomically, and with the same bytes for the same sources and options.

A hash of (seed, domain, document number) selects the documents that are held out for validation. A domain always keeps its first
document for training. Unless `validation` is 0, a domain of two or more documents holds out at least one document, and a domain
of one document holds out the end of this document.
"""

import errno
import fcntl
import hashlib
import os
import shutil
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from pydantic import ValidationError
from rich.progress import TaskID

from megalith import disk
from megalith.data.errors import DataError
from megalith.data.manifest import (
    DEFAULT_READING,
    FILE,
    Domain,
    Manifest,
    Options,
    Reading,
    SourceRecord,
    check_sizes,
    check_tokenizer,
    read_manifest,
)
from megalith.data.progress import Bars, bars
from megalith.data.shards import SplitWriter, Tokens, settle
from megalith.data.sources import Source, check_split, documents, parse_sources, record, size
from megalith.data.tokenizer import Tokenizer

Unread = dict[Source, Collection[Path]]
"""The files of each source that are not read. A file may be read for one source and be skipped as a copy in another."""


def prepare(
    sources: Sequence[str | Source],
    *,
    tokenizer: Tokenizer,
    out: Path | str,
    reading: Reading = DEFAULT_READING,
    shard_tokens: int = 100_000_000,
    validation: float = 0.01,
    seed: int = 0,
    overwrite: bool = False,
    progress: bool = False,
) -> Manifest:
    """Tokenize `sources` (`NAME=PATH`, `PATH`, `bundled:austen`) into the folder `out`, which appears only when it is complete.

    If `out` already holds exactly this data, nothing is written. Raises DataError for unreadable sources, options out of range, an `out`
    with other content (with `overwrite`, other prepared data is replaced), or if another `prepare` is writing to `out`.
    """
    options = _options(reading=reading, shard_tokens=shard_tokens, validation=validation, seed=seed)
    check_split(reading)
    found = sorted(parse_sources(sources), key=lambda source: source.domain)  # stable: a domain's sources keep their order
    out = Path(out)
    _check_out(out)
    with bars(progress) as shown:
        recorded, unread = _record(found, reading, shown)
        previous = read_manifest(out) if (out / FILE).is_file() else None
        if previous is not None:
            differences = _differences(previous, tokenizer, options, recorded)
            damage = _damage(out, previous)
            if not (differences or damage):
                shown.print_line(f"{out} is already prepared from the same sources, tokenizer and options: nothing to do.")
                return previous
            if damage:
                shown.print_line(damage)
            if differences and not overwrite:
                raise DataError(
                    f"{out} already holds data that was prepared from other inputs: {'; '.join(differences)}. Choose another "
                    "folder, or use --overwrite."
                )
        _refuse_mount_point(out)  # it may hold the same data, but not be replaced
        read = _Read(total=sum(size(source, reading) for source in found))
        with _folder_for(out) as folder, _no_room_told(folder, out, read):
            manifest = Manifest(
                tokenizer=tokenizer.record,
                options=options,
                sources=recorded,
                domains=_write_domains(folder, found, unread, tokenizer, options, shown, read),
            )
            tokenizer.save(folder)
            with (folder / FILE).open("xb") as file:
                file.write(manifest.text().encode())
                settle(file)
    return manifest


def _options(**values: object) -> Options:
    try:
        return Options.model_validate(values)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, one['loc']))}={one['input']!r}: {one['msg']}." for one in error.errors()]
        raise DataError.of(problems, title="The options cannot be used") from error


def _check_out(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise DataError(f"{out} is a file; prepared data is a folder. Choose another name.")
    if (out / FILE).is_file():
        return
    _refuse_mount_point(out)
    if out.is_dir() and any(out.iterdir()):
        raise DataError(
            f"{out} holds files that are not prepared data, so nothing is written to it. Choose a new or empty folder."
        )


def _refuse_mount_point(out: Path) -> None:
    if os.path.ismount(out.resolve()):
        raise DataError(f"{out} is a mount point, which a complete folder cannot replace. Choose a folder in it.")


def _record(sources: Sequence[Source], reading: Reading, shown: Bars) -> tuple[tuple[SourceRecord, ...], Unread]:
    """Return a record of each source's content, and each source's unread files. To make the records, all sources are read once before
    tokenization, which is cheap compared with tokenization.

    Raises DataError for a source that holds only text of other sources.
    """
    bar = shown.start("checking sources", total=sum(size(source, reading) for source in sources))
    recorded: list[SourceRecord] = []
    unread: Unread = {}
    seen: dict[str, Path] = {}
    for source in sources:
        one, found = record(source, reading, lambda count: shown.advance(bar, count), seen)
        shown.print_left_out(source.path, one.left_out)
        recorded.append(one)
        unread[source] = found.unread if found else ()
    shown.finish(bar)
    return tuple(recorded), unread


def _differences(previous: Manifest, tokenizer: Tokenizer, options: Options, sources: tuple[SourceRecord, ...]) -> list[str]:
    found: list[str] = []
    if previous.tokenizer != tokenizer.record:
        found.append(f"tokenizer {previous.tokenizer.fingerprint[:12]}, now {tokenizer.fingerprint[:12]}")
    then, now = (value.model_dump() | value.reading.model_dump(exclude_unset=False) for value in (previous.options, options))
    found += [f"{key} {then[key]!r}, now {now[key]!r}" for key in then if key != "reading" and then[key] != now[key]]
    if _contents(previous.sources) != _contents(sources):
        before, after = ([f"{one.domain}={one.name} ({one.sha256[:12]})" for one in some] for some in (previous.sources, sources))
        found.append(f"sources {', '.join(before)}, now {', '.join(after)}")
    return found


def _contents(sources: Sequence[SourceRecord]) -> list[SourceRecord]:
    """Return the sources' records with an empty `left_out`, because older manifests do not have this field."""
    return [source.model_copy(update={"left_out": ()}) for source in sources]


def _damage(out: Path, manifest: Manifest) -> str | None:
    try:
        check_sizes(out, manifest)
        check_tokenizer(out, manifest)
    except DataError as error:
        return str(error)
    return None


@contextmanager
def _folder_for(out: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `out`, which replaces `out` if the block succeeds, and is removed if the block fails."""
    out = out.resolve()
    disk.make_folder(out.parent)
    folder = out.with_name(f".{out.name}.partial")
    disk.make_folder(folder, asked=out)
    lock = os.open(folder, os.O_RDONLY)
    try:
        _lock(lock, out)
        for leftover in folder.iterdir():  # of a process that was killed: nobody holds its lock
            leftover.unlink()
        try:
            yield folder
            os.fsync(lock)
            _put_in_place(folder, out)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    finally:
        os.close(lock)


def _lock(folder: int, out: Path) -> None:
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise DataError(
            f"{out} is being prepared by another process. Wait until the other process has ended, or choose another folder."
        ) from error
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EBADF):  # network file systems may have no locks
            raise


def _put_in_place(folder: Path, out: Path) -> None:
    replaced = out.with_name(f".{out.name}.replaced")
    if replaced.exists():
        shutil.rmtree(replaced)
    if out.exists():
        out.rename(replaced)
    folder.rename(out)
    parent = os.open(out.parent, os.O_RDONLY)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)
    if replaced.exists():
        shutil.rmtree(replaced)


@dataclass
class _Read:
    """Progress: bytes of the sources on disk, in all and read; bytes of text read and of text encoded, which differ because the encoder
    reads ahead; bytes of tokens.
    """

    total: int
    done: int = 0
    text: int = 0
    encoded: int = 0
    tokens: int = 0

    def wanted(self) -> int:
        """Estimate the bytes of all tokens from the text encoded so far; 0 if no text is encoded yet."""
        return round(self.tokens * (self.text / self.encoded) * (self.total / self.done)) if self.encoded and self.done else 0


@contextmanager
def _no_room_told(folder: Path, out: Path, read: _Read) -> Iterator[None]:
    """If the disk is full, raise DataError with the folder and an estimate of the needed bytes."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        written = sum(path.stat().st_size for path in folder.iterdir())
        estimate = f"; all of the data will take about {wanted:,} bytes" if (wanted := read.wanted()) else ""
        raise DataError(
            f"the disk of {out} has no room ({error.strerror}) after {written:,} bytes{estimate}",
            f"Make room in {out.resolve().parent}, or choose another folder.",
        ) from error


def _write_domains(
    folder: Path,
    sources: Sequence[Source],
    unread: Unread,
    tokenizer: Tokenizer,
    options: Options,
    shown: Bars,
    read: _Read,
) -> dict[str, Domain]:
    domains: dict[str, Domain] = {}
    for name, group in groupby(sources, key=lambda source: source.domain):
        members = list(group)
        bar = shown.start(f"preparing {name}", total=sum(size(source, options.reading) for source in members))
        sizes: deque[int] = deque()

        def advance(count: int, bar: TaskID = bar) -> None:
            read.done += count
            shown.advance(bar, count)

        texts = _texts(members, options.reading, unread, sizes, read, advance)
        encoded = (
            _encoded(tokens.astype(tokenizer.dtype, copy=False), sizes, read) for tokens in tokenizer.encode_documents(texts)
        )
        domains[name] = _write_domain(folder, name, encoded, tokenizer=tokenizer, options=options)
        shown.finish(bar)
        if domains[name].train.documents == 0:
            where = ", ".join(source.path for source in members)
            raise DataError(
                f"The domain {name} has no documents: {where} holds only white space. Give text, or leave the source out."
            )
    return domains


def _encoded(tokens: Tokens, sizes: deque[int], read: _Read) -> "_Document":
    """Return a document of these tokens, with the next text size in the queue `sizes`, and count it in the progress `read`."""
    document = _Document(tokens, sizes.popleft())
    read.encoded += document.bytes
    read.tokens += tokens.nbytes + tokens.itemsize  # one for the end of the text
    return document


def _texts(
    sources: Sequence[Source],
    reading: Reading,
    unread: Unread,
    sizes: deque[int],
    read: _Read,
    advance: Callable[[int], None],
) -> Iterator[str]:
    """Yield the documents of one domain. Sizes are queued in `sizes`, because the encoder reads ahead of its output."""
    for source in sources:
        for text in documents(source, reading, advance, unread[source]):
            sizes.append(len(text.encode()))
            read.text += sizes[-1]
            yield text


@dataclass(frozen=True)
class _Document:
    tokens: Tokens
    bytes: int


def _write_domain(folder: Path, name: str, found: Iterator[_Document], *, tokenizer: Tokenizer, options: Options) -> Domain:
    """Divide the documents among the two splits. A document is written only after the next one has been read, because the last
    document is treated differently."""
    train, validation = (
        SplitWriter(
            folder,
            f"{name}-{split}",
            dtype=tokenizer.dtype,
            shard_tokens=options.shard_tokens,
            end_of_text=tokenizer.end_of_text,
        )
        for split in ("train", "validation")
    )
    try:
        held: _Document | None = None
        number = -1
        for number, document in enumerate(found):
            if held is not None:
                chosen = _held_out(options, name, number - 1)
                (validation if chosen else train).write(held.tokens, text_bytes=held.bytes)
            held = document
        if held is not None:
            _write_last(held, train, validation, options, chosen=_held_out(options, name, number))
        return Domain(train=train.close(), validation=validation.close())
    except BaseException:
        train.abandon()
        validation.abandon()
        raise


def _write_last(last: _Document, train: SplitWriter, validation: SplitWriter, options: Options, *, chosen: bool) -> None:
    """Write the last document. If the hash has selected no document of the domain (and `validation` is not 0), the last document
    goes to validation; if it is the only document, only its end goes to validation."""
    if train.documents and (chosen or (options.validation > 0 and validation.documents == 0)):
        validation.write(last.tokens, text_bytes=last.bytes)
    elif train.documents or options.validation == 0 or len(last.tokens) < 2:
        train.write(last.tokens, text_bytes=last.bytes)
    else:
        tail = min(len(last.tokens) - 1, max(1, round(options.validation * len(last.tokens))))
        tail_bytes = round(last.bytes * tail / len(last.tokens))  # in proportion: a token need not be whole characters
        train.write(last.tokens[:-tail], text_bytes=last.bytes - tail_bytes)
        validation.write(last.tokens[-tail:], text_bytes=tail_bytes)


def _held_out(options: Options, domain: str, number: int) -> bool:
    """True if the hash selects this document for validation. The first document is never selected, so that a domain always has training
    data."""
    digest = hashlib.blake2b(f"{options.seed}/{domain}/{number}".encode(), digest_size=8).digest()
    return number > 0 and int.from_bytes(digest, "little") < options.validation * 2**64
