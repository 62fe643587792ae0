"""Packs a rank's shares of several weights into one message of bytes. A weight is sent in its own format, or in 8 bits as the codes and
scales of tiles.

A tile never spans two shards, so its codes are the same whether the weight is whole or sharded. A weight that was sent in 8 bits is already
rounded as a product rounds it, so the product's own rounding does not change it again. If scales are in fp32, the gathered weight is
rounded to bf16; the product still gets the same codes and scales, because the largest number of each tile is exact in bf16.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod

import torch
from torch import Tensor

from megalith.kernels.packed import pack_tiles, scales_of, unpack_tiles
from megalith.kernels.quantise import Scaling
from megalith.spec.numbers import SCALE_BYTES


@dataclass
class Field:
    """Location, in each rank's message, of the rank's share of one tensor [up to chunk, *row]."""

    dtype: torch.dtype
    chunk: int
    row: tuple[int, ...]
    first: int = 0

    @property
    def bytes(self) -> int:
        return self.chunk * prod(self.row) * self.dtype.itemsize

    def of(self, message: Tensor) -> Tensor:
        """Return this field of a message, as a tensor [chunk, *row]."""
        return message[self.first : self.first + self.bytes].view(self.dtype).view(self.chunk, *self.row)


@dataclass(frozen=True)
class Item:
    """One weight that is sent in a parcel."""

    compute: Tensor
    """The whole weight; its memory may not be allocated yet."""
    dim: int
    """The dim along which the weight is sharded."""
    chunk: int
    """The number of slices along `dim` in a share; the shares of the last ranks may be shorter or empty."""
    scaling: Scaling | None
    """The weight's format in the message; None: the weight's own format."""

    def fields(self) -> tuple[Field, ...]:
        """Return the fields of the weight: one field, or one for its scales and one for its codes."""
        if self.scaling is None:
            return (Field(self.compute.dtype, self.chunk, _row(self.compute.shape, self.dim)),)
        shape = list(self.compute.shape)
        shape[self.dim] = self.chunk
        scales = scales_of(torch.Size(shape), self.scaling)
        return (
            Field(torch.float32, scales[self.dim], _row(scales, self.dim)),
            Field(torch.uint8, self.chunk, _row(self.compute.shape, self.dim)),
        )


class Parcel:
    """The layout of a message with the shares of several weights."""

    def __init__(self, items: Iterable[Item]) -> None:
        self.items = tuple(items)
        self.fields = [item.fields() for item in self.items]
        end = 0
        # the widest elements first, so that each lies at a multiple of its size
        for field in sorted(chain(*self.fields), key=lambda field: -field.dtype.itemsize):
            field.first, end = end, end + field.bytes
        self.bytes = -(-end // SCALE_BYTES) * SCALE_BYTES
        """The length of a rank's message in bytes."""

    def message(self) -> Tensor:
        """Return an empty message."""
        return torch.zeros(self.bytes, dtype=torch.uint8, device=self.items[0].compute.device)

    def pack(self, message: Tensor, shares: Iterable[Tensor]) -> None:
        """Write this rank's `message` from its share of each weight, given with the sharded dim first."""
        for item, fields, share in zip(self.items, self.fields, shares, strict=True):
            parts, share = _parts(item, fields, message, len(share)), share.movedim(0, item.dim)
            if item.scaling is None:
                parts[0].copy_(share)
            else:
                scales, codes = parts
                pack_tiles(share.to(item.compute.dtype), codes, scales, item.scaling)

    def unpack(self, messages: Tensor) -> None:
        """Write the whole weights from `messages`, those of all ranks: uint8 [ranks, bytes]."""
        for item, fields in zip(self.items, self.fields, strict=True):
            shares = item.compute.data.split(item.chunk, item.dim)  # .data: saved views stay valid
            for message, share in zip(messages, shares, strict=False):  # the last ranks may have none
                parts = _parts(item, fields, message, share.shape[item.dim])
                if item.scaling is None:
                    share.copy_(parts[0])
                else:
                    scales, codes = parts
                    unpack_tiles(codes, scales, share, item.scaling)


def rows_to_chunks(flat: Tensor, rows: Tensor, chunk: int) -> None:
    """Copy `rows` [up to ranks * chunk, ...] in chunks into `flat` [ranks, chunk * ...], and set the rest of `flat` to 0."""
    table = flat.view(flat.shape[0], chunk, *rows.shape[1:])
    full, rest = divmod(rows.shape[0], chunk)
    table[:full].copy_(rows[: full * chunk].unflatten(0, (full, chunk)))
    if full < table.shape[0]:
        table[full, :rest].copy_(rows[full * chunk :])
        table[full, rest:].zero_()
        table[full + 1 :].zero_()


def chunks_to_rows(rows: Tensor, flat: Tensor, chunk: int) -> None:
    """Copy `flat` into `rows`: the inverse of `rows_to_chunks`."""
    table = flat.view(flat.shape[0], chunk, *rows.shape[1:])
    full, rest = divmod(rows.shape[0], chunk)
    rows[: full * chunk].unflatten(0, (full, chunk)).copy_(table[:full])
    if rest:
        rows[full * chunk :].copy_(table[full, :rest])


def _parts(item: Item, fields: Sequence[Field], message: Tensor, count: int) -> list[Tensor]:
    """Return the filled part of each of a weight's fields in `message`, with dims in the order of the weight, for a share of `count`
    slices."""
    return [field.of(message)[: -(-count * field.chunk // item.chunk)].movedim(0, item.dim) for field in fields]


def _row(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    return (*shape[:dim], *shape[dim + 1 :])
