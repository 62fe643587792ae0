"""Copies of the ranks' state as files in a node's memory or on its disk: the format of a file, and a search for complete copies
in folders. A file is one rank's buffer: a header, a layout (the place of each tensor, as JSON), and a payload. A writer clears
the header, fills the payload, and writes the header last, so a partial copy of a process that died has no header. The digest is
the sum of the payload's 64-bit words, modulo 2^64, which changes if any one bit flips. The digest does not detect swapped words,
which memory errors do not cause. The digest is only for accidents: a private folder (`secure.private`), and a MAC over the header
with the run's key, protect copies from other users.
"""

import json
import mmap
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from megalith import disk
from megalith.fleet.commands import QuarantineCopy
from megalith.fleet.rank_info import node_folder, ranks_of, slot_of
from megalith.fleet.secure import private
from megalith.fleet.secure.key import MAC_BYTES, Key
from megalith.fleet.tiers import Copy, Tier

PAGE = 4096
ALIGNMENT = 64  # bytes; of each tensor, so that a processor's widest loads are whole and every tensor begins a word of the digest
_MAGIC = b"MGLCOPY3"  # 1 and 2 had a checksum in the place of the MAC
_FIELDS = struct.Struct("<8sqqqqQQQ32sq")
_PINNED = 512  # place of a pinned copy's marks: outside the label's MAC, since they are written later
VERIFIED, GOOD = 1, 2  # why a copy is pinned: its gradients were verified; a run may rewind to it
LABEL_BYTES = _FIELDS.size + MAC_BYTES

Whose = Literal["own", "buddy"]


@dataclass(frozen=True)
class Label:
    """Content of a file's header: it describes the state of `rank` after `step` steps and `samples` samples. `layout`, `payload`:
    sizes of these parts in bytes. `updates`: number of steps whose update was not skipped (default: all)."""

    step: int
    samples: int
    rank: int
    world: int
    digest: int
    layout: int
    payload: int
    generation: str = ""
    updates: int = -1

    def __post_init__(self) -> None:
        if self.updates < 0:
            object.__setattr__(self, "updates", self.step)

    def pack(self, key: Key) -> bytes:
        """Encode the label as LABEL_BYTES bytes: the fields, and a MAC over them with the run's key."""
        *numbers, generation, updates = astuple(self)
        fields = _FIELDS.pack(_MAGIC, *numbers, generation.encode()[:32], updates)
        return fields + key.mac("copy", fields)

    @classmethod
    def unpack(cls, data: bytes, key: Key) -> "Label | None":
        """Decode a label; None if it is missing, incomplete, or made with another key."""
        fields, mac = data[: _FIELDS.size], data[_FIELDS.size : LABEL_BYTES]
        if not fields.startswith(_MAGIC) or not key.proves(mac, "copy", fields):
            return None
        _, *numbers, generation, updates = _FIELDS.unpack(fields)
        step, samples, rank, world, digest, layout, payload = numbers
        name = generation.rstrip(b"\0").decode(errors="replace")
        return cls(step, samples, rank, world, digest, layout, payload, name, updates)


class Entry(NamedTuple):
    """A tensor's name, type, shape and place in a payload; `offset` and `size` are in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True)
class Layout:
    """The tensors of a payload, in order."""

    entries: tuple[Entry, ...]

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, str, Sequence[int], int]]) -> "Layout":
        """Lay out tensors given as (name, dtype, shape, bytes)."""
        entries, end = [], 0
        for name, dtype, shape, size in tensors:
            entries.append(Entry(name, dtype, tuple(shape), end, size))
            end += -(-size // ALIGNMENT) * ALIGNMENT
        return cls(tuple(entries))

    @property
    def payload(self) -> int:
        """Size of the payload in bytes, a multiple of PAGE."""
        end = max((entry.offset + entry.size for entry in self.entries), default=0)
        return max(PAGE, -(-end // PAGE) * PAGE)

    def dump(self) -> bytes:
        """Return the layout as JSON, padded to a multiple of PAGE."""
        text = json.dumps([list(entry) for entry in self.entries], separators=(",", ":")).encode()
        return text + b" " * (-len(text) % PAGE)

    @classmethod
    def load(cls, text: bytes) -> "Layout":
        return cls(tuple(Entry(name, dtype, tuple(shape), *place) for name, dtype, shape, *place in json.loads(text)))


def file_name(whose: Whose, rank: int, buffer: int) -> str:
    """Return a file's name. `rank`: the rank whose state is in the file. On a disk, `buffer` is the step."""
    return f"{whose}-{rank}.{buffer}"


def parse_name(name: str) -> tuple[str, int, int]:
    """The inverse of `file_name`."""
    whose, _, rest = name.partition("-")
    rank, _, number = rest.partition(".")
    return whose, int(rank), int(number)


class Buffer:
    """One file of a copy, mapped into memory. `key`: the run's key, which authenticates the label."""

    def __init__(self, path: Path, memory: mmap.mmap, key: Key, *, inode: int) -> None:
        self.path, self.memory, self.key, self._inode = path, memory, key, inode
        self._read: tuple[bytes, Label | None] = b"", None  # a header and its parsed form: a writer looks at it again and again

    @classmethod
    def create(cls, path: Path, bytes_after_header: int, *, key: Key) -> "Buffer":
        """Create the buffer at `path`, or keep an existing one of the right size, and allocate all of its memory. Raises OSError
        if there is no room, and NotPrivate if its folders belong to another user, or other users may write to them."""
        size = PAGE + bytes_after_header
        with private.opened_below(path.parent, create=True) as folder:
            descriptor = private.open_file(folder, path, os.O_RDWR | os.O_CREAT)
        with os.fdopen(descriptor, "r+b") as file:
            if os.fstat(descriptor).st_size != size:
                file.truncate(0)
                os.posix_fallocate(descriptor, 0, size)
            return cls(path, mmap.mmap(descriptor, size), key, inode=os.fstat(descriptor).st_ino)

    @classmethod
    def open(cls, path: Path, *, key: Key) -> "Buffer":
        """Open the buffer at `path`. Raises OSError (including NotPrivate), or ValueError for an empty file."""
        with private.opened_below(path.parent) as folder:
            descriptor = private.open_file(folder, path, os.O_RDWR)
        with os.fdopen(descriptor, "r+b") as file:
            return cls(path, mmap.mmap(file.fileno(), 0), key, inode=os.fstat(file.fileno()).st_ino)

    def is_removed(self) -> bool:
        """True if this file was removed from its folder or replaced. A removed file stays mapped in this process, but other
        processes cannot find it."""
        return not disk.leads_to(self.path, self._inode)

    @property
    def label(self) -> Label | None:
        """Label of the copy in the file; None if the file has no complete copy."""
        header = self.memory[:LABEL_BYTES]
        if header != self._read[0]:
            self._read = header, Label.unpack(header, self.key)
        label = self._read[1]
        whole = label is not None and PAGE + label.layout + label.payload <= len(self.memory)
        return label if whole else None

    @property
    def marks(self) -> int:
        """The marks that protect the copy from being overwritten until another copy is pinned; these are VERIFIED, GOOD, both or
        0."""
        return self.memory[_PINNED]

    @property
    def pinned(self) -> bool:
        """True if the copy must not be overwritten until another copy is pinned."""
        return self.marks != 0

    def strike_out(self) -> None:
        """Invalidate the copy in this file."""
        self.memory[: _PINNED + 1] = bytes(_PINNED + 1)

    def commit(self, label: Label) -> None:
        """Write the header, which marks the payload as complete."""
        self.memory[:LABEL_BYTES] = label.pack(self.key)

    def pin(self, pinned: bool, *, mark: int = VERIFIED) -> None:
        """Set or clear one of the copy's marks."""
        self.memory[_PINNED] = self.marks | mark if pinned else self.marks & ~mark

    def layout(self, label: Label) -> Layout:
        """Return the layout of the payload's tensors. Raises ValueError if the file has no valid layout."""
        return Layout.load(self.memory[PAGE : PAGE + label.layout])

    def digest(self, label: Label) -> int:
        """Return the digest of the payload in the file."""
        words = np.frombuffer(self.memory, np.uint64, count=label.payload // 8, offset=PAGE + label.layout)
        return int(words.sum(dtype=np.uint64))

    def close(self) -> None:
        self.memory.close()


# What a node holds


@dataclass(frozen=True)
class Piece:
    """One rank's part of a copy. `intact`: whether the piece in memory has the right digest, or its file on disk the right
    length, because the rank that loads it checks the digest."""

    tier: Tier
    rank: int
    step: int
    samples: int
    world: int
    generation: str
    intact: bool
    path: Path


def pieces(folder: Path, *, key: Key, own: Tier = Tier.MEMORY) -> list[Piece]:
    """Return the copies in a node's folder that were made with the run's `key`. `own`: the tier (memory or disk) to which copies
    of the node's own ranks belong; copies of other nodes' ranks belong to the tier BUDDY. Digests of copies on disk are not
    verified, because this would cost more time than another restart after a damaged piece.
    """
    found = []
    for path, buffer, label in _labelled(folder, key):
        tier = own if path.name.startswith("own-") else Tier.BUDDY
        intact = tier is Tier.DISK or buffer.digest(label) == label.digest
        found.append(Piece(tier, label.rank, label.step, label.samples, label.world, label.generation, intact, path))
        buffer.close()
    return found


def steps(folder: Path, *, key: Key) -> set[int]:
    """Return the steps of which a node's folder contains a copy of at least one rank, without verifying digests."""
    found = set()
    for _, buffer, label in _labelled(folder, key):
        found.add(label.step)
        buffer.close()
    return found


def held(node: str, *, memory: Path | None, disk: Path | None, key: Key) -> list[Piece]:
    """Return the copies of a node in these folders."""
    in_memory = pieces(node_folder(memory, node), key=key) if memory is not None else []
    return in_memory + (pieces(node_folder(disk, node), key=key, own=Tier.DISK) if disk is not None else [])


def _labelled(folder: Path, key: Key) -> Iterator[tuple[Path, Buffer, Label]]:
    paths = list[Path]()
    with disk.if_available():  # a disk that fails holds nothing
        paths = sorted((*folder.glob("own-*"), *folder.glob("buddy-*"))) if folder.is_dir() else []
    for path in paths:
        try:
            buffer = Buffer.open(path, key=key)
        except (OSError, ValueError):
            continue
        label = buffer.label
        if label is None:
            buffer.close()
        else:
            yield path, buffer, label


def together(found: Iterable[Piece], *, world: int, slots: int) -> tuple[Copy, ...]:
    """Combine the pieces of all nodes to copies: one for each tier and step, with the slots in which a rank's piece is missing or
    damaged. Pieces of a run with another number of ranks are left out, because they belong to another plan.
    """
    usable = sorted((p for p in found if p.world == world), key=lambda piece: (piece.tier.depth, -piece.step))
    copies = []
    for (tier, step), group in groupby(usable, key=lambda piece: (piece.tier, piece.step)):
        whole = {piece.rank for piece in group if piece.intact}
        missing = {slot_of(rank, world=world, slots=slots) for rank in range(world) if rank not in whole}
        if len(missing) < slots:
            copies.append(Copy(tier, step, frozenset(missing)))
    return tuple(copies)


def survey(
    root: Path, *, placement: Sequence[str], world: int, key: Key, distance: int | None = None, own: Tier = Tier.MEMORY
) -> tuple[Copy, ...]:
    """Find the copies on the nodes whose folders are in `root`. A piece counts only if it is on its slot's own node or on the
    buddy node, which is `distance` slots further, because ranks read it only there (None: any node may be the buddy)."""
    found = []
    for slot, node in enumerate(placement):
        here = pieces(node_folder(root, node), key=key, own=own)
        found += in_place(here, slot, world=world, slots=len(placement), distance=distance)
    return together(found, world=world, slots=len(placement))


def in_place(found: Iterable[Piece], slot: int, *, world: int, slots: int, distance: int | None = None) -> list[Piece]:
    """Return those pieces on a node which ranks read while the node has `slot`. Other pieces may remain from a slot that the node
    had before."""
    own = ranks_of(slot, world=world, slots=slots)
    kept = range(world) if distance is None else ranks_of((slot - distance) % slots, world=world, slots=slots)
    return [piece for piece in found if piece.rank in (kept if piece.tier is Tier.BUDDY else own)]


def forget(folder: Path, *, key: Key, above: int | None = None, step: int | None = None, whose: Whose | None = None) -> int:
    """Invalidate a node's copies of steps after `above`, or of step `step`, or, if neither is given, of all steps. Return their
    number."""
    count = 0
    for path, buffer, label in _labelled(folder, key):
        meant = (above is None or label.step > above) and (step is None or label.step == step)
        if meant and (whose is None or path.name.startswith(f"{whose}-")):
            buffer.strike_out()
            count += 1
        buffer.close()
    return count


def set_aside(root: Path, order: QuarantineCopy, *, placement: Sequence[str], world: int, key: Key) -> int:
    """Rename the pieces of a copy to `aside-...`, so that ranks ignore them and a user can inspect them. Return their number."""
    slots, count = len(placement), 0
    for node in placement:
        for piece in pieces(node_folder(root, node), key=key, own=Tier.MEMORY if order.tier is Tier.BUDDY else order.tier):
            here = order.slot is None or slot_of(piece.rank, world=world, slots=slots) == order.slot
            if piece.tier is order.tier and piece.step == order.step and piece.world == world and here:
                piece.path.rename(piece.path.with_name(f"aside-{piece.path.name}"))
                count += 1
    return count


def corrupt_piece(folder: Path, *, key: Key, rank: int, step: int | None = None, whose: Whose = "own", bit: int = 12345) -> bool:
    """Flip one bit in the payload of a rank's copy (`step` None: the newest one), to test whether the damage is detected. Return
    False if there is no such copy."""
    held = [(label, path) for path, _, label in _labelled(folder, key) if path.name.startswith(f"{whose}-{rank}.")]
    meant = [(label, path) for label, path in held if step is None or label.step == step]
    if not meant:
        return False
    label, path = max(meant, key=lambda pair: pair[0].step)
    buffer = Buffer.open(path, key=key)
    at = PAGE + label.layout + (bit // 8) % label.payload
    buffer.memory[at] ^= 1 << bit % 8
    buffer.close()
    return True
