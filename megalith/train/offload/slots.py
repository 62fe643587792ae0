"""Chunks of bytes on disk, each in two slots: a write goes to the unused slot, and becomes valid once everything is synced.

So if an update stops halfway or turns out to be wrong, the other slots still hold the complete state from before the update. One file holds
the first slot of every chunk, another file the second. A file belongs to one process and has no name, so it disappears when the process
ends, unless a checkpoint has given it a name. A file that a checkpoint holds is never written again; a new file replaces it.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from megalith.checkpoint.digests import WORDS
from megalith.spec.state import DISK_SLOTS
from megalith.train.offload.slot_file import FREE, Layout, SlotFile, StateFileError


class Slots:
    """The chunks of one rank. A chunk consists of segments, which are read one at a time or all at once. Construction reserves the room for
    two slots on the disk, so that the disk cannot be full in a later step. Raises StateFileError if the disk has too little room.
    """

    def __init__(self, path: Path, chunks: Sequence[tuple[str, Sequence[int]]], *, dry: bool = False) -> None:
        """`chunks`: for each chunk, its name and the size of each of its segments in bytes. `dry`: this is a dry run, so no file is written
        or read."""
        self.path, self.dry, self.layout = path, dry, Layout(chunks)
        self._pair: list[SlotFile] = [] if dry else [self._make(), self._make()]  # the files that may be written
        self._used = dict.fromkeys(range(len(chunks)), self._pair[0]) if self._pair else {}  # the file that counts, of each chunk
        self._fresh: dict[int, SlotFile] = {}  # written since: they count once they are settled
        self._before: dict[int, SlotFile] = {}
        self._full = False  # no room was found for a file since the newest update

    @property
    def bytes(self) -> int:
        """The maximum size in bytes of this process's files, not counting files of older checkpoints: two slots, and a third that replaces
        a slot in use by the newest checkpoint."""
        return DISK_SLOTS * self.layout.bytes

    @property
    def direct(self) -> bool:
        """True if I/O bypasses the page cache."""
        return all(file.direct for file in self._pair)

    def _make(self) -> SlotFile:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            return SlotFile(self.path, self.layout)
        except OSError as error:
            free = _free(self.path.parent)
            needs = f"plan.state: the optimizer's state needs another file of {self.layout.bytes:,} bytes in {self.path.parent}"
            text = f"{needs} ({error.strerror}; {free:,} bytes are free). {FREE}"
            raise StateFileError(error.errno, text) from error

    # --- what an update does ---

    def read(self, chunk: int, into: Tensor, segment: int | None = None) -> None:
        """Read a chunk, or one of its segments, into memory of its padded size. Bytes that were never written are zeros.

        Raises StateFileError if the content differs from what was written.
        """
        if not self.dry:
            self._fresh.get(chunk, self._used[chunk]).read(chunk, into, segment)

    def write(self, chunk: int, body: Tensor, *, counts: bool = False) -> None:
        """Write a chunk into its unused slot. `counts`: True if the slot is valid at once and the write cannot be undone."""
        if self.dry:
            return
        used, other = self.file_of(chunk), self.unused(chunk)
        if not counts:
            self._fresh[chunk] = self._fresh.get(chunk, other).write(chunk, body)
            return
        self._used[chunk] = (used if used in self._pair else other).write(chunk, body)
        self._before.pop(chunk, None)  # it may have been in the file that is written now

    def file_of(self, chunk: int) -> SlotFile:
        """Return the file that holds the valid slot of a chunk."""
        return self._used[chunk]

    def unused(self, chunk: int) -> SlotFile:
        """Return the file that holds the unused slot of a chunk, which the next update writes."""
        return next(file for file in self._pair if file is not self._used[chunk])

    def settle(self) -> None:
        """Sync the files to disk, then make the written slots valid."""
        for file in {*self._fresh.values()}:
            file.sync()
        self._before = {chunk: self._used[chunk] for chunk in self._fresh}
        self._used |= self._fresh
        self._fresh, self._full = {}, False

    def drop(self) -> None:
        """Discard the writes since the last `settle`."""
        self._fresh = {}

    def undo(self) -> None:
        """Undo the last `settle`: make the slots valid again that it replaced."""
        self._used |= self._before
        self._before, self._fresh = {}, {}

    @property
    def sum(self) -> int:
        """The sum of all 64-bit words in valid slots, modulo 2^64."""
        return sum(file.sum_of(chunk) for chunk, file in self._used.items()) % WORDS

    # --- what a checkpoint does ---

    def hold(self) -> SlotFile | None:
        """Return the file that holds all valid chunks. The returned file is never written again, and `undo` cannot restore an older state.
        Room for a new file is reserved at once, so that the disk cannot be full in a later step.

        Return None if the disk has no room for a new file, if an update is in progress, or if no single file holds all valid chunks.
        """
        files = {*self._used.values()}
        if self._fresh or len(files) != 1 or self._full:
            return None
        (held,) = files
        self._before = {}  # the previous file may be an older checkpoint's, and nothing else needs it
        if held in self._pair:  # else a checkpoint holds it already, and nothing was written since
            try:
                self._pair = [*(file for file in self._pair if file is not held), self._make()]
            except StateFileError:
                self._full = True  # a save asks once for each tensor
                return None
        return held

    def close(self) -> None:
        """Close the files. A file without a name disappears once no process has it open."""
        self._pair, self._used, self._fresh, self._before, self.dry = [], {}, {}, {}, True


def _free(folder: Path) -> int:
    try:
        found = os.statvfs(folder)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize
