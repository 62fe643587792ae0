"""One tensor's share in a file of chunks, as checkpoints read and fill it: never more than a few pieces of it in memory."""

from collections.abc import Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from megalith.train.offload.stream import Stream


class Stored:
    """The share of one slot of one parameter. It is the same segment of each of its chunks."""

    def __init__(
        self,
        stream: Stream,
        segment: int,
        pieces: Sequence[tuple[int, int, int]],
        starts: Sequence[int],
        shape: Sequence[int],
        dtype: torch.dtype,
    ) -> None:
        """`pieces`: chunk, first number, how many. `starts`: where the segment begins in each of these chunks, in bytes."""
        self._stream, self._segment, self._pieces, self._starts = stream, segment, tuple(pieces), tuple(starts)
        self.shape, self.dtype = tuple(shape), dtype
        if len(self._pieces) == 1:  # of a slot of another shape than the parameter's, too
            ((chunk, _, _),) = self._pieces
            self._pieces = ((chunk, 0, prod(self.shape)),)

    @property
    def in_memory(self) -> bool:
        """False: it is on disk."""
        return False

    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    def element_size(self) -> int:
        """Bytes of one element."""
        return self.dtype.itemsize

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the share from its first number on: the number that a piece begins with, and the piece, flat and valid until the next."""
        bodies = self._stream.over([chunk for chunk, _, _ in self._pieces], counts=None)
        for (_, first, count), start, (_, body) in zip(self._pieces, self._starts, bodies, strict=True):
            yield first, self._values(body, start, count)

    def fill(self, offset: Sequence[int], values: Tensor) -> None:
        """Write the box of the share that begins at `offset`. It counts at once."""
        if tuple(values.shape) != self.shape:
            box = whole = torch.cat([piece.clone() for _, piece in self.pieces()]).view(self.shape)
            for dim, (start, size) in enumerate(zip(offset, values.shape, strict=True)):
                box = box.narrow(dim, start, size)
            box.copy_(values)
            values = whole
        flat = values.reshape(-1)
        bodies = self._stream.over([chunk for chunk, _, _ in self._pieces], counts=True)
        for (_, first, count), start, (_, body) in zip(self._pieces, self._starts, bodies, strict=True):
            self._values(body, start, count).copy_(flat[first : first + count])

    def _values(self, body: Tensor, start: int, count: int) -> Tensor:
        return body[start : start + count * self.element_size()].view(self.dtype)
