"""Manifest of a prepared folder: `manifest.json`, which is written last, and checks of the folder against it.

Equal sources, tokenizer and options give a manifest equal byte for byte: it contains no time, machine name or path. The manifest's digest
therefore identifies the data that a run saw.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)

from megalith import disk
from megalith.data.errors import AwayDataError, DataError
from megalith.spec.base import Spec

FILE = "manifest.json"
TOKENIZER_FILE = "tokenizer.json"
SPLITS = ("train", "validation")
SplitName = Literal["train", "validation"]
Dtype = Literal["uint16", "uint32"]


class Reading(Spec):
    """How files become documents."""

    field: str = Field(default="text", description="JSON lines: the field that holds the text")
    split: str | None = Field(
        default=None,
        description="plain text: blank | line | file | heading:REGEX (a line that starts a document) | "
        "delimiter:REGEX (a line between documents); default: blank, and chapters for the bundled novels",
    )
    minimum: NonNegativeInt = Field(
        default=2000, description="plain text, blank and heading: minimum length of a document in characters"
    )
    extensions: tuple[str, ...] | None = Field(
        default=None, description="folders: only files with these endings, such as .py; default: every file that holds UTF-8 text"
    )


DEFAULT_READING = Reading()


class Options(Spec):
    """How documents become shards. The same sources and options give the same bytes."""

    reading: Reading = DEFAULT_READING
    shard_tokens: PositiveInt = Field(
        default=100_000_000, description="largest number of tokens in a shard; a document that does not fit begins a new shard"
    )
    validation: NonNegativeFloat = Field(default=0.01, lt=1.0, description="share of each domain's documents that is held out")
    seed: NonNegativeInt = Field(default=0, description="chooses the held-out documents")


class SkippedFiles(Spec):
    """Files of a source's folder that were skipped for one reason: their number, the numbers by file name ending (the commonest ones), and
    the first names."""

    reason: str
    count: PositiveInt
    endings: dict[str, PositiveInt]
    names: tuple[str, ...]

    def __str__(self) -> str:
        """The files that were left out for one reason, such as "2 binary (1 .parquet, 1 .png): a.parquet, b.png"."""
        endings = ", ".join(f"{count} {ending}" for ending, count in self.endings.items())
        more = f" and {self.count - len(self.names)} more" if self.count > len(self.names) else ""
        return f"{self.count} {self.reason} ({endings}): {', '.join(self.names)}{more}"


class SourceRecord(Spec):
    """One source at the time of reading: its last path component, number of files, bytes on disk, a digest over all files (including
    unread ones), and the files left out. If no file was left out, the manifest has no key `left_out`, as in earlier versions."""

    domain: str
    name: str
    files: NonNegativeInt
    bytes: NonNegativeInt
    sha256: str
    left_out: tuple[SkippedFiles, ...] = ()

    @model_serializer(mode="wrap")
    def _without_nothing(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = serialize(self)
        return values if self.left_out else {key: value for key, value in values.items() if key != "left_out"}


class TokenizerRecord(Spec):
    """The tokenizer of the tokens; its `tokenizer.json` is in the folder."""

    fingerprint: str
    vocab_size: PositiveInt
    end_of_text: NonNegativeInt
    end_of_text_token: str


class Shard(Spec):
    """One shard. `file`: little-endian token ids. `index`: int64 offsets of the documents' first tokens, then the shard's number of
    tokens."""

    file: str
    index: str
    dtype: Dtype
    tokens: NonNegativeInt
    documents: NonNegativeInt
    sha256: str
    index_sha256: str


class Split(Spec):
    """One split of one domain; `bytes` is the size of its text as UTF-8; only `tokens` includes end-of-text tokens."""

    tokens: NonNegativeInt = 0
    documents: NonNegativeInt = 0
    bytes: NonNegativeInt = 0
    shards: tuple[Shard, ...] = ()


class Domain(Spec):
    """One domain's two splits."""

    train: Split
    validation: Split


class Manifest(Spec):
    """The content of `manifest.json`, which describes a prepared folder."""

    version: Literal[1] = 1
    tokenizer: TokenizerRecord
    options: Options
    sources: tuple[SourceRecord, ...]
    domains: dict[str, Domain]

    def splits(self) -> Iterator[tuple[str, SplitName, Split]]:
        """Every domain's splits, in the manifest's order."""
        for name, domain in self.domains.items():
            yield name, "train", domain.train
            yield name, "validation", domain.validation

    def shards(self) -> Iterator[Shard]:
        """Every shard."""
        for _, _, split in self.splits():
            yield from split.shards

    def text(self) -> str:
        """The text of `manifest.json`."""
        return json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=False) + "\n"

    @property
    def sha256(self) -> str:
        """Digest of the manifest. The sha256 covers all data, because the manifest contains the shards' digests."""
        return hashlib.sha256(self.text().encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a prepared folder. Raises AwayDataError if the manifest is missing, and DataError if this version cannot read
    it."""
    path = folder / FILE
    again = "Prepare the data with `megalith data prepare`."
    if not disk.is_file(path):
        what = (
            "has no manifest.json: it is not prepared data, or its files were copied incompletely"
            if disk.is_folder(folder)
            else "does not exist"
        )
        raise AwayDataError(path, f"{folder} {what}", again)
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise DataError(f"{path} is not a manifest that this version can read: {where}: {first['msg']}", again) from error


def check_sizes(folder: Path, manifest: Manifest, *, copies: Sequence[Path] = ()) -> None:
    """Check that every shard exists with the size in the manifest, in the folder or in a copy; contents are not read. Raises DataError that
    names each missing or wrong file."""
    elsewhere = [_wrong_sizes(copy, manifest) for copy in copies]
    way_out = "Restore the file from a copy, or prepare the data again."
    problems = [
        DataError(text, way_out)
        for name, text in _wrong_sizes(folder, manifest).items()
        if all(name in wrong for wrong in elsewhere)
    ]
    if problems:
        raise DataError.of(problems, title=f"{folder} has changed since it was prepared")


def _wrong_sizes(folder: Path, manifest: Manifest) -> dict[str, str]:
    """Describe each file of a shard that is missing or has the wrong size."""
    problems: dict[str, str] = {}
    for shard in manifest.shards():
        sizes = {shard.file: shard.tokens * int(shard.dtype[4:]) // 8, shard.index: 8 * (shard.documents + 1)}
        for name, size in sizes.items():
            path = folder / name
            found = disk.look(path)
            if found is None:
                problems[name] = f"{path} is missing (expected size: {size} bytes)"
            elif found.st_size != size:
                problems[name] = f"{path} has {found.st_size} bytes, but {size} according to the manifest"
    return problems


def check_copies(folder: Path, manifest: Manifest | None, copies: Sequence[Path]) -> None:
    """Check by their manifests that all copies hold the data of `manifest` (None: any prepared data). Raises DataError that names each
    copy that cannot be used; AwayDataError if all of these copies are unreachable."""
    way_out = "Copy the whole folder, or remove the copy from data.copies."
    problems: list[DataError] = []
    for copy in copies:
        try:
            same = read_manifest(copy) == manifest or manifest is None
        except DataError as error:
            reason = error.parts[0][0]
            if isinstance(error, AwayDataError):
                problems.append(AwayDataError(error.path, reason, way_out))
            else:
                problems.append(DataError(reason, way_out))
            continue
        if not same:
            problems.append(DataError(f"{copy} holds different data from {folder}", way_out))
    if not problems:
        return
    fault = DataError.of(problems, title="data.copies cannot be used")
    paths = [problem.path for problem in problems if isinstance(problem, AwayDataError)]
    if len(paths) < len(problems):
        raise fault
    absent = AwayDataError(paths[0], str(fault))  # the copies may be intact, so a run waits for them
    absent.parts = fault.parts
    raise absent


def tokenizer_fingerprint(definition: dict[str, Any], end_of_text: int) -> str:
    """sha256 over both a tokenizer.json in canonical form (keys sorted, without padding and truncation) and its end-of-text id."""
    counted = {key: value for key, value in definition.items() if key not in ("padding", "truncation")}
    canonical = json.dumps({"tokenizer": counted, "end_of_text": end_of_text}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def check_tokenizer(folder: Path, manifest: Manifest) -> None:
    """Check that the folder's tokenizer.json is the one that encoded its tokens. Raises DataError if tokenizer.json is missing or
    differs."""
    path = folder / TOKENIZER_FILE
    mend = "Restore the right tokenizer.json, or prepare the data again."
    try:
        found = tokenizer_fingerprint(json.loads(path.read_bytes()), manifest.tokenizer.end_of_text)
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing", mend) from error
    except (ValueError, AttributeError) as error:
        raise DataError(f"{path} is not a tokenizer.json: {error}", mend) from error
    if found != manifest.tokenizer.fingerprint:
        reason = f"{path} has fingerprint {found}, but the tokenizer of the shards has {manifest.tokenizer.fingerprint}"
        raise DataError(reason, mend)


def file_digest(path: Path, advance: Callable[[int], None] = lambda _: None) -> str:
    """sha256 of a file's content. `advance` is called with the number of bytes of each piece that is read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
            advance(len(piece))
    return digest.hexdigest()
