"""Files of a pyramid: their names, heads and records."""

import contextlib
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

FAN = 4
Kind = Literal["codes", "numbers"]
"""Kinds of values: "codes" are uint8, with 0 for a missing value; "numbers" are float32, with NaN for a missing value."""

TYPES: dict[str, np.dtype] = {"codes": np.dtype("<u1"), "numbers": np.dtype("<f4")}
FILE = struct.Struct("<8sIIQ")  # magic, kind, level, width
MAGIC = b"mgltpyr1"
HEAD = struct.Struct("<qqqddd")  # first step, last step, steps, time, and two numbers that values are measured by
SUM = struct.Struct("<I")
START = HEAD.size + SUM.size
NAME = re.compile(r"(\d{6})-(\d{2})-(\d{15})\.bin")


def arrays_of(kind: str, level: int) -> int:
    """Return the number of arrays in a record: one at level 0; at higher levels minimum and maximum, and for numbers also the
    mean."""
    return 1 if level == 0 else 2 if kind == "codes" else 3


def record_bytes(kind: str, width: int, level: int) -> int:
    """Return the bytes of a record of `width` values."""
    return START + arrays_of(kind, level) * width * TYPES[kind].itemsize


def name_of(piece: int, level: int, first: int) -> str:
    return f"{piece:06d}-{level:02d}-{first:015d}.bin"


@dataclass(frozen=True)
class Segment:
    """A file of the table, as its name and metadata describe it."""

    path: str
    piece: int
    level: int
    first: int
    size: int
    inode: int
    changed: int


def segments(folder: Path) -> list[Segment]:
    """The files of a table, by piece, level and first step."""
    found = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if match := NAME.fullmatch(entry.name):
                    with contextlib.suppress(FileNotFoundError):
                        piece, level, first = map(int, match.groups())
                        stat = entry.stat()
                        found.append(Segment(entry.path, piece, level, first, stat.st_size, stat.st_ino, stat.st_mtime_ns))
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(found, key=lambda one: (one.piece, one.level, one.first))
