"""Gives checkpoints access to master weights that are stored in two halves: checkpoints read and write them as fp32 numbers."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megalith.checkpoint.shares import StreamedShare
from megalith.kernels.halves import join, split
from megalith.parallel.data import Weight, local

PIECE = 1 << 20
"""Number of elements that are joined from their halves to fp32 at once."""


class JoinedMasters:
    """The fp32 master weights of one parameter's share, joined from the upper half, which is the compute share, and the lower half, which
    may be on the device, on the host or on disk."""

    dtype = torch.float32

    def __init__(self, weight: Weight, lower: Tensor | StreamedShare, bits: int) -> None:
        """`bits`: the number of bits in a lower half."""
        self.weight, self.lower, self.bits = weight, lower, bits
        self.shape = tuple(local(weight.master).shape)

    @property
    def upper(self) -> Tensor:
        """The upper half: this rank's compute share, bf16 in the share's shape."""
        assert self.weight.moved is not None
        return self.weight.moved

    @property
    def in_memory(self) -> bool:
        """True if neither half is on disk."""
        return isinstance(self.lower, Tensor) or self.lower.in_memory

    @property
    def extents(self) -> None:
        """None, because no file holds the joined numbers."""

    def snapshot(self) -> None:
        """None, because updates change the upper half in memory, so no snapshot exists."""

    def numel(self) -> int:
        """The number of elements."""
        return self.upper.numel()

    def element_size(self) -> int:
        """Bytes of one fp32 element."""
        return self.dtype.itemsize

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the share as flat pieces in the host's memory, in order, each with the index of its first element."""
        upper = self.upper.view(-1)
        for first, lower in self._lower_pieces():
            yield first, join(upper[first : first + lower.numel()].to(lower.device), lower).cpu()

    def _lower_pieces(self) -> Iterator[tuple[int, Tensor]]:
        if isinstance(self.lower, Tensor):
            flat = self.lower.view(-1)
            yield from ((first, flat[first : first + PIECE]) for first in range(0, flat.numel(), PIECE))
        else:
            yield from self.lower.pieces()

    @torch.no_grad()
    def fill(self, offset: Sequence[int], values: Tensor) -> None:
        """Write `values` to the box of the share that begins at `offset`. If a lower half has only eight bits, the values are rounded to
        24 bits."""
        upper, lower = split(values.float(), self.bits)
        _box(self.upper, offset, values).copy_(upper)
        if isinstance(self.lower, Tensor):
            _box(self.lower, offset, values).copy_(lower)
        else:
            self.lower.fill(offset, lower.cpu())


def _box(whole: Tensor, offset: Sequence[int], values: Tensor) -> Tensor:
    for dim, (start, size) in enumerate(zip(offset, values.shape, strict=True)):
        whole = whole.narrow(dim, start, size)
    return whole
