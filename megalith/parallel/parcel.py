"""Packs shares of a bucket's weights into one message: rows in chunks, or bytes if some weights are sent in 8 bits as codes and scales of
tiles.

Tiles lie inside shards, so a tile's codes are the same whether its weight is whole or cut. The numbers of a gathered weight are those to
which a product rounds it, so a second rounding does not change them. With scales in fp32 they are rounded to bf16 on arrival; a product
still gets the same codes and scales, because a tile's largest number is exact in bf16.
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
    """The bytes in each rank's message that hold a tensor's share [up to chunk, *row]."""

    dtype: torch.dtype
    chunk: int
    row: tuple[int, ...]
    first: int = 0

    @property
    def bytes(self) -> int:
        return self.chunk * prod(self.row) * self.dtype.itemsize

    def of(self, message: Tensor) -> Tensor:
        """Return the field of a message, [chunk, *row]."""
        return message[self.first : self.first + self.bytes].view(self.dtype).view(self.chunk, *self.row)


@dataclass(frozen=True)
class Item:
    """One weight of a parcel."""

    compute: Tensor
    """The whole weight; its memory may not be allocated yet."""
    dim: int
    """The dim along which it is sharded"""
    chunk: int
    """The number of slices of a share; the last ranks' shares may be shorter or empty."""
    scaling: Scaling | None
    """Its format in the message; None: its own."""

    def fields(self) -> tuple[Field, ...]:
        """Return the weight's field, or two fields for its scales and its codes."""
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
    """The places of some weights in a message."""

    def __init__(self, items: Iterable[Item]) -> None:
        self.items = tuple(items)
        self.fields = [item.fields() for item in self.items]
        end = 0
        # the widest elements first, so that each lies at a multiple of its size
        for field in sorted(chain(*self.fields), key=lambda field: -field.dtype.itemsize):
            field.first, end = end, end + field.bytes
        self.bytes = -(-end // SCALE_BYTES) * SCALE_BYTES
        """The length of a rank's message"""

    def message(self) -> Tensor:
        """Return an empty message."""
        return torch.zeros(self.bytes, dtype=torch.uint8, device=self.items[0].compute.device)

    def pack(self, message: Tensor, shares: Iterable[Tensor]) -> None:
        """Write this rank's message, from its share of each weight with the cut dim first."""
        for item, fields, share in zip(self.items, self.fields, shares, strict=True):
            parts, share = _parts(item, fields, message, len(share)), share.movedim(0, item.dim)
            if item.scaling is None:
                parts[0].copy_(share)
            else:
                scales, codes = parts
                pack_tiles(share.to(item.compute.dtype), codes, scales, item.scaling)

    def unpack(self, messages: Tensor) -> None:
        """Write the whole weights from the messages of all ranks, uint8 [ranks, bytes]."""
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
    """Copy rows [up to ranks * chunk, ...], in chunks, into flat [ranks, chunk * ...]; the rest of flat becomes 0."""
    table = flat.view(flat.shape[0], chunk, *rows.shape[1:])
    full, rest = divmod(rows.shape[0], chunk)
    table[:full].copy_(rows[: full * chunk].unflatten(0, (full, chunk)))
    if full < table.shape[0]:
        table[full, :rest].copy_(rows[full * chunk :])
        table[full, rest:].zero_()
        table[full + 1 :].zero_()


def chunks_to_rows(rows: Tensor, flat: Tensor, chunk: int) -> None:
    """Copy flat into rows: the inverse of `rows_to_chunks`."""
    table = flat.view(flat.shape[0], chunk, *rows.shape[1:])
    full, rest = divmod(rows.shape[0], chunk)
    rows[: full * chunk].unflatten(0, (full, chunk)).copy_(table[:full])
    if rest:
        rows[full * chunk :].copy_(table[full, :rest])


def _parts(item: Item, fields: Sequence[Field], message: Tensor, count: int) -> list[Tensor]:
    """Return the filled part of a message's fields, with the dims of the weight, for a share of `count` slices."""
    return [field.of(message)[: -(-count * field.chunk // item.chunk)].movedim(0, item.dim) for field in fields]


def _row(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    """Return the shape of a slice along `dim`."""
    return (*shape[:dim], *shape[dim + 1 :])
