"""Digests of a checkpoint's files: sha256, or the sum of the file's 64-bit words, which is computed as fast as memory is read.
Needs no torch."""

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from io import FileIO

    import numpy as np

    Octets = np.ndarray[Any, Any]

WORDS = 1 << 64
READ = 4 << 20
"""Bytes of a file that are read at a time."""


@dataclass(frozen=True)
class FileDigest:
    """Size of a file, and its sha256; for a linked file, which the save does not read, the sum of its 64-bit words instead."""

    bytes: int
    sha256: str = ""
    words: str = ""

    def problem(self, file: "FileIO") -> str | None:
        """Read an open file to its end, and describe how its content differs from this digest; None if it does not. Raises OSError."""
        if self.words:
            found = text(_of_file(file))
            return None if found == self.words else f"sum of 64-bit words {found} instead of {self.words}"
        found = hashlib.file_digest(file, "sha256").hexdigest()
        return None if found == self.sha256 else f"sha256 {found[:12]}... instead of {self.sha256[:12]}..."


def words_of(octets: "Octets") -> int:
    """Return the sum of the bytes' 64-bit words modulo 2^64, with an incomplete last word padded with zeros."""
    import numpy as np  # takes long to import; it starts no threads, and lets others run

    whole = len(octets) // 8 * 8
    rest = int.from_bytes(octets[whole:].tobytes(), "little")
    return (int(octets[:whole].view(np.uint64).sum(dtype=np.uint64)) + rest) % WORDS


def text(total: int) -> str:
    """Return a sum of words in the form used in manifests: 16 hexadecimal digits."""
    return f"{total % WORDS:016x}"


def _of_file(file: "FileIO") -> int:
    import numpy as np  # takes long to import

    total, memory = 0, np.empty(READ, dtype=np.uint8)
    while taken := _fill(file, memory):
        total += words_of(memory[:taken])
    return total


def _fill(file: "FileIO", memory: "Octets") -> int:
    """Read until the buffer is full or the file ends, because only the file's last word may be incomplete."""
    taken = 0
    while taken < len(memory) and (more := file.readinto(memory[taken:].data)):
        taken += more
    return taken
