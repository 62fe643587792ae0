"""Pack numbers in 8 bits, to send them between ranks. Rows become one tensor of bytes, which one message can carry: each row
consists of codes, followed by its scales in fp32. A weight in tiles becomes a tensor of codes and a tensor of scales, so that the
shards of both can be joined."""

from collections.abc import Callable, Hashable, Iterator, Mapping

import torch
from torch import Tensor

from megalith.kernels.quantise import QuantisedTensor, Scaling, quantise
from megalith.spec.numbers import SCALE_BYTES

SLABS: Mapping[str, int] = {"cpu": 1 << 16}
"""The number of elements that are rounded at once, by kind of device; on a processor so few that their fp32 copies stay in the
cache."""
SLAB = 1 << 24
"""The number of elements that are rounded at once on a GPU: many, because each launch of a kernel takes long."""


def width_of(columns: int, scaling: Scaling) -> int:
    """Return the bytes of a row with this many numbers."""
    return columns + SCALE_BYTES * -(-columns // (scaling.block[1] or columns))


def pack(rows: Tensor, scaling: Scaling) -> Tensor:
    """Pack rows [rows, columns] in a format of 8 bits, with separate scales for each row: uint8 [rows, `width_of(columns)`]."""
    assert scaling.block[0] == 1, scaling
    columns = rows.shape[1]
    out = rows.new_empty(len(rows), width_of(columns, scaling), dtype=torch.uint8)
    for part in _slabs(rows):
        narrow = quantise(rows[part], scaling)
        out[part, :columns] = narrow.codes
        out[part, columns:] = narrow.scales.contiguous().view(torch.uint8)
    return out


def unpack(packed: Tensor, columns: int, scaling: Scaling, dtype: torch.dtype) -> Tensor:
    """Return the numbers [rows, columns] of packed rows, which are exact in bf16 if scales are powers of two."""
    out = packed.new_empty(len(packed), columns, dtype=dtype)
    for part in _slabs(out):
        scales = (
            packed[part, columns:].clone(memory_format=torch.contiguous_format).view(torch.float32)
        )  # of one row, too, at an aligned place
        codes = packed[part, :columns]
        out[part] = QuantisedTensor(codes, scales, None, scaling).factors(dtype)
    return out


def once(x: Tensor, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
    """Return make(x). If several layers multiply the same x, the later ones get the tensor that was made for the first layer."""
    known = getattr(x, _MADE, None)
    if known is None or known[:2] != (x._version, key):
        known = x._version, key, make()
        setattr(x, _MADE, known)  # lives as long as x, or as a backward that keeps it
    return known[2]


_MADE = "_megalith_packed"


def scales_of(shape: torch.Size, scaling: Scaling) -> tuple[int, ...]:
    """Return the shape of the scales of a tensor [..., rows, columns] in tiles."""
    return (*shape[:-2], *(-(-size // tile) for size, tile in zip(shape[-2:], scaling.block, strict=True)))


def pack_tiles(x: Tensor, codes: Tensor, scales: Tensor, scaling: Scaling) -> None:
    """Write the codes (uint8, of the shape of x) and the scales (fp32, of the shape `scales_of`) of x [..., rows, columns]."""
    if x.dim() > 2:
        for each in zip(x, codes, scales, strict=True):
            pack_tiles(*each, scaling)
        return
    for part in _slabs(x, scaling.block[0]):
        narrow = quantise(x[part], scaling)
        codes[part], scales[_blocks(part, scaling)] = narrow.codes, narrow.scales


def unpack_tiles(codes: Tensor, scales: Tensor, out: Tensor, scaling: Scaling) -> None:
    """Write the numbers of packed tiles to `out`, in bf16: exactly if scales are powers of two, else rounded."""
    if out.dim() > 2:
        for each in zip(codes, scales, out, strict=True):
            unpack_tiles(*each, scaling)
        return
    for part in _slabs(out, scaling.block[0]):
        out[part] = QuantisedTensor(codes[part], scales[_blocks(part, scaling)], None, scaling).factors(out.dtype)


def _blocks(rows: slice, scaling: Scaling) -> slice:
    """Return the rows of a tensor of scales that belong to these rows of numbers. The rows of numbers begin with the first row of
    a block."""
    return slice(rows.start // scaling.block[0], -(-rows.stop // scaling.block[0]))


def _slabs(x: Tensor, block: int = 1) -> Iterator[slice]:
    height = max(1, SLABS.get(x.device.type, SLAB) // max(1, x.shape[1] * block)) * block
    return (slice(first, first + height) for first in range(0, x.shape[0], height))
