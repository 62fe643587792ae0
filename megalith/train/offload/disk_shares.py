"""Gives checkpoints access to a share that is stored on disk, in chunks. Reading a share, or writing all of it, needs memory for only a few
of its pieces."""

from collections.abc import Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from megalith.checkpoint.folder import Piece
from megalith.checkpoint.shares import Extents
from megalith.train.offload.slot_file import SlotFile, memory_of, padded, tensor_name
from megalith.train.offload.stream import Stream


class Segment:
    """The share of one slot of one parameter. The share's pieces lie in several chunks, in each of them as segment number `segment`."""

    def __init__(self, segment: int, pieces: Sequence[tuple[int, int, int]], shape: Sequence[int], dtype: torch.dtype) -> None:
        """`pieces`: for each piece, its chunk, the index of its first element, and its number of elements."""
        self.number, self.shape, self.dtype = segment, tuple(shape), dtype
        self.cut = tuple(pieces)
        if len(self.cut) == 1:  # of a slot of another shape than the parameter's, too
            ((chunk, _, _),) = self.cut
            self.cut = ((chunk, 0, prod(self.shape)),)

    @property
    def in_memory(self) -> bool:
        """False: the share is on disk."""
        return False

    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    def element_size(self) -> int:
        """Bytes of one element."""
        return self.dtype.itemsize

    def values(self, body: Tensor, start: int, count: int) -> Tensor:
        """Return the `count` elements that begin at byte `start` of a chunk's content `body`."""
        return body[start : start + count * self.element_size()].view(self.dtype)


class LiveShare(Segment):
    """A share that updates change, read from the valid slot of each of its chunks."""

    def __init__(
        self,
        stream: Stream,
        segment: int,
        pieces: Sequence[tuple[int, int, int]],
        starts: Sequence[int],
        shape: Sequence[int],
        dtype: torch.dtype,
    ) -> None:
        """`starts`: the byte at which the segment begins, for each chunk."""
        super().__init__(segment, pieces, shape, dtype)
        self._stream, self._starts = stream, tuple(starts)

    @property
    def extents(self) -> None:
        """None, because updates change the share."""

    def snapshot(self) -> "ShareSnapshot | None":
        """Return a snapshot of the share; None if its file cannot be protected from updates."""
        file = self._stream.slots.hold()
        return None if file is None else ShareSnapshot(file, self)

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the share in flat pieces, in order, each with the index of its first element. A piece is valid until the next one is
        requested."""
        bodies = self._stream.over([chunk for chunk, _, _ in self.cut], counts=None)
        for (_, first, count), start, (_, body) in zip(self.cut, self._starts, bodies, strict=True):
            yield first, self.values(body, start, count)

    def fill(self, offset: Sequence[int], values: Tensor) -> None:
        """Write `values` to the box of the share that begins at `offset`. The written values are valid at once."""
        if tuple(values.shape) != self.shape:
            box = whole = torch.cat([piece.clone() for _, piece in self.pieces()]).view(self.shape)
            for dim, (start, size) in enumerate(zip(offset, values.shape, strict=True)):
                box = box.narrow(dim, start, size)
            box.copy_(values)
            values = whole
        flat = values.reshape(-1)
        bodies = self._stream.over([chunk for chunk, _, _ in self.cut], counts=True)
        for (_, first, count), start, (_, body) in zip(self.cut, self._starts, bodies, strict=True):
            self.values(body, start, count).copy_(flat[first : first + count])


class ShareSnapshot(Segment):
    """A snapshot of a share, in a file that a checkpoint protects from updates. Any thread may read it."""

    def __init__(self, file: SlotFile, share: Segment) -> None:
        super().__init__(share.number, share.cut, share.shape, share.dtype)
        self._file = file

    @property
    def extents(self) -> Extents:
        """The location of the share's pieces in its file."""
        pieces = (Piece(tensor_name(chunk, self.number), count * self.element_size()) for chunk, _, count in self.cut)
        return Extents(self._file, tuple(pieces))

    def snapshot(self) -> "ShareSnapshot":
        """Return this snapshot itself."""
        return self

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the share in flat pieces, in order, each with the index of its first element."""
        for chunk, first, count in self.cut:
            body = memory_of(padded(count * self.element_size()))
            self._file.read(chunk, body, self.number)
            yield first, self.values(body, 0, count)

    def fill(self, offset: Sequence[int], values: Tensor) -> None:
        """Refuse to write, because a checkpoint uses these values."""
        raise ValueError(
            f"{self._file.path} belongs to a checkpoint, so no values can be written to it at {tuple(offset)}. Fill the live share"
        )
