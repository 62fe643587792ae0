"""Rows in 8 bits as one tensor of bytes, so that they travel in one message: each row's codes, then its scales in fp32."""

from collections.abc import Iterator

import torch
from torch import Tensor

from megalith.kernels.quantise import Narrowed, Scaling, quantise

SLAB = 1 << 16
"""Numbers that are rounded at once: their copies in fp32 stay in a processor's cache."""
SCALE = 4
"""Bytes of a scale."""


def width_of(columns: int, scaling: Scaling) -> int:
    """Return the bytes of a row of so many numbers."""
    return columns + SCALE * -(-columns // (scaling.block[1] or columns))


def pack(rows: Tensor, scaling: Scaling) -> Tensor:
    """Return rows [rows, columns] in a format of 8 bits with scales of single rows: uint8 [rows, `width_of(columns)`]."""
    assert scaling.block[0] == 1, scaling
    columns = rows.shape[1]
    out = rows.new_empty(len(rows), width_of(columns, scaling), dtype=torch.uint8)
    for part in _slabs(rows.shape):
        narrow = quantise(rows[part], scaling)
        out[part, :columns] = narrow.codes
        out[part, columns:] = narrow.scales.contiguous().view(torch.uint8)
    return out


def unpack(packed: Tensor, columns: int, scaling: Scaling, dtype: torch.dtype) -> Tensor:
    """Return the numbers [rows, columns] of packed rows, exact in bf16 where scales are powers of two."""
    out = packed.new_empty(len(packed), columns, dtype=dtype)
    for part in _slabs(out.shape):
        scales = (
            packed[part, columns:].clone(memory_format=torch.contiguous_format).view(torch.float32)
        )  # of one row, too, at an aligned place
        codes = packed[part, :columns]
        out[part] = Narrowed(codes, scales, None, scaling).factors(dtype)
    return out


def _slabs(shape: torch.Size) -> Iterator[slice]:
    height = max(1, SLAB // max(1, shape[1]))
    return (slice(first, first + height) for first in range(0, shape[0], height))
