"""Inspection of a prepared folder: its contents, and changes since it was prepared."""

import errno
from pathlib import Path
from typing import Any

import numpy as np

from megalith import disk
from megalith.data.errors import DataError
from megalith.data.manifest import (
    FILE,
    TOKENIZER_FILE,
    Manifest,
    Shard,
    Split,
    check_sizes,
    check_tokenizer,
    file_digest,
    read_manifest,
)
from megalith.data.progress import bars
from megalith.data.shards import SplitReader
from megalith.data.tokenizer import Tokenizer
from megalith.data.verified_files import BlockChecksums, sums_file

_QUANTILES = {"min": 0.0, "p10": 0.1, "median": 0.5, "p90": 0.9, "max": 1.0}
_COUNTED_DOCUMENTS = 1_000_000
_SAMPLE_TOKENS = 60


def inspect(folder: Path | str, *, samples: int = 3) -> dict[str, Any]:
    """Return, for each domain and split, counts, document lengths, UTF-8 bytes a token, and the beginnings of `samples` documents.

    `{"folder", "manifest_sha256", "tokenizer": {...}, "sources": [...], "options": {...}, "domains": {name: {"share", "train",
    "validation"}}}`, and a split is `{"tokens", "documents", "shards", "bytes", "bytes_per_token", "document_tokens": {"min", "p10",
    "median", "p90", "max"}, "samples": [text]}`; "share" is the domain's part of all training tokens. Quantiles are over at most a million
    evenly spaced documents. Raises DataError if the folder is not prepared data, or a file has the wrong size.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    check_sizes(folder, manifest)
    check_tokenizer(folder, manifest)
    text = (folder / TOKENIZER_FILE).read_text(encoding="utf-8")
    tokenizer = Tokenizer(text, end_of_text=manifest.tokenizer.end_of_text_token)
    total = sum(domain.train.tokens for domain in manifest.domains.values())
    domains: dict[str, dict[str, Any]] = {
        name: {"share": domain.train.tokens / total} for name, domain in manifest.domains.items()
    }
    for name, which, split in manifest.splits():
        domains[name][which] = _describe(SplitReader(folder, split), split, tokenizer, samples)
    return {
        "folder": str(folder),
        "manifest_sha256": manifest.sha256,
        "tokenizer": {"kind": tokenizer.kind} | manifest.tokenizer.model_dump(),
        "sources": [source.model_dump() for source in manifest.sources],
        "options": manifest.options.model_dump(mode="json"),
        "domains": domains,
    }


def _describe(reader: SplitReader, split: Split, tokenizer: Tokenizer, samples: int) -> dict[str, Any]:
    lengths = reader.document_lengths(_COUNTED_DOCUMENTS)
    quantiles = {name: float(np.quantile(lengths, at)) for name, at in _QUANTILES.items()} if len(lengths) else {}
    chosen = sorted({round(n * (split.documents - 1) / max(samples - 1, 1)) for n in range(samples)}) if split.documents else []
    text_tokens = split.tokens - split.documents
    return {
        "tokens": split.tokens,
        "documents": split.documents,
        "shards": len(split.shards),
        "bytes": split.bytes,
        "bytes_per_token": split.bytes / text_tokens if text_tokens else None,
        "document_tokens": quantiles,
        "samples": [tokenizer.decode(reader.document(number)[:_SAMPLE_TOKENS]) for number in chosen],
    }


def verify(folder: Path | str, *, progress: bool = False) -> Manifest:
    """Read every shard again and compare its sha256 with the manifest's. Raises DataError that names every file that differs.

    Then the checksum files (.sum) are compared with the verified shards; missing checksum files are written.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    check_sizes(folder, manifest)
    check_tokenizer(folder, manifest)
    expected = {shard.file: shard.sha256 for shard in manifest.shards()}
    expected |= {shard.index: shard.index_sha256 for shard in manifest.shards()}
    problems: dict[str, str] = {}
    with bars(progress) as shown:
        bar = shown.start("verifying", total=sum((folder / name).stat().st_size for name in expected))
        for name, digest in expected.items():
            found = file_digest(folder / name, lambda count: shown.advance(bar, count))
            if found != digest:
                problems[name] = (
                    f"{folder / name} has sha256 {found}, but {FILE} has {digest}. Restore the file from a copy, or prepare the data again."
                )
        shown.finish(bar)
    for shard in manifest.shards():
        if shard.file not in problems and not _has_right_sums(folder, shard):
            name = sums_file(shard)
            problems[name] = (
                f"The checksum file {folder / name} does not match its shard. Remove the checksum file; the next "
                "`megalith data verify` writes it again."
            )
    if problems:
        raise DataError.of(list(problems.values()), title=f"{folder} has changed since it was prepared")
    return manifest


def _has_right_sums(folder: Path, shard: Shard) -> bool:
    """True if a shard's stored checksums match its blocks. Missing checksums are written if the folder is writable."""
    sums, path = BlockChecksums(), folder / sums_file(shard)
    with (folder / shard.file).open("rb") as file:
        while piece := file.read(1 << 22):
            sums.update(piece)
    if path.exists():
        return path.read_bytes() == sums.file_content()
    try:
        disk.write_whole(path, sums.file_content())
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise
    return True
