"""Checkpoints of state that is already in a file: the checkpoint holds a hard link to the file instead of a copy."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from megalith.checkpoint.folder import FileDigest, Piece
from megalith.checkpoint.shares import ImmutableFile, StreamedShare

MINIMUM = 0.75
"""The smallest fraction of a file that a checkpoint must use to link the file instead of copying from it. If several data ranks
hold the same state, each rank saves only a part of its own file, and a copy of that part takes less room than a link to the whole
file."""


class ShareLocation(NamedTuple):
    """The location of a share in a checkpoint: a file with its digest and, for a linked file, the pieces of the file that are the
    share."""

    file: str
    digest: FileDigest
    pieces: tuple[Piece, ...] = ()


def link(folder: Path, rank: int, shares: Mapping[str, Tensor | StreamedShare]) -> dict[str, ShareLocation]:
    """Link the files of shares into `folder`, and return the locations of these shares. Shares without a file, or with a file that
    cannot be linked, are left out, and the caller must copy them."""
    files: dict[ImmutableFile, dict[str, tuple[Piece, ...]]] = {}
    for key, data in shares.items():
        if not isinstance(data, Tensor) and (extents := data.extents) is not None:
            files.setdefault(extents.file, {})[key] = extents.pieces
    found = dict[str, ShareLocation]()
    for number, (file, keys) in enumerate(files.items()):
        if sum(piece.bytes for pieces in keys.values() for piece in pieces) < MINIMUM * file.payload:
            continue
        name = f"rank-{rank:05d}.state-{number}.safetensors"
        with contextlib.suppress(OSError):  # on another file system, or on one without links
            digest = file.link(folder / name)
            found |= {key: ShareLocation(name, digest, pieces) for key, pieces in keys.items()}
    return found
