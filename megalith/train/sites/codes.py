"""Encodes weight differences in few bits. A block of `spec.sites.BLOCK` successive values shares one fp32 scale. The values are
all elements of a whole tensor or, with `sites.top_k`, only the chosen ones.

With 8 or 4 bits, the scale is the block's largest magnitude divided by 127 or 7, and each element is rounded to the nearest multiple of the
scale. With 2 bits, the scale is the block's root mean square, and each element is rounded to -1.5, -0.5, 0.5 or 1.5 times the scale. For
normally distributed elements, this spacing is within 1 % of the optimal uniform spacing (Max 1960, table 2); if the scale were the largest
magnitude, most elements would be lost.

All machines compute the same bits, because the code uses only elementwise operations that IEEE 754 defines, and sums in a fixed order.
"""

import torch
from torch import Tensor

from megalith.spec.sites import BLOCK, FULL, encoded_bytes

LARGEST = {8: 127, 4: 7}
"""The largest magnitude of a code, by its number of bits."""


def encode(values: Tensor, bits: int) -> Tensor:
    """Encode fp32 `values` [n] on the CPU as uint8 [encoded_bytes(n, bits)]: fp32 scales, then codes. The first code of a byte is in
    its lowest bits. Values must be finite."""
    if bits == FULL:
        return values.contiguous().view(torch.uint8).clone()
    blocks = _blocks(values)
    scales = _scales(blocks, values.numel(), bits)
    divisors = torch.where(scales > 0, scales, 1.0)[:, None]
    if bits == 2:
        codes = (blocks / divisors).floor_().clamp_(-2, 1).add_(2)
    else:
        codes = (blocks / divisors).round_().clamp_(-LARGEST[bits], LARGEST[bits]).add_(LARGEST[bits])
    coded = packed(codes.to(torch.uint8).flatten()[: values.numel()], bits)
    return torch.cat((scales.view(torch.uint8), coded))


def decode(encoded: Tensor, numel: int, bits: int) -> Tensor:
    """Decode `encoded` (uint8, on the CPU) to fp32 values [numel]. Raises ValueError for a wrong number of bytes."""
    if encoded.numel() != encoded_bytes(numel, bits):
        raise ValueError(
            f"{encoded.numel()} bytes cannot be {numel} values of {bits} bits, which take {encoded_bytes(numel, bits)}"
        )
    if bits == FULL:
        return encoded.clone().view(torch.float32)
    count = -(-numel // BLOCK)
    scales = encoded[: 4 * count].clone().view(torch.float32)
    codes = torch.zeros(count * BLOCK)
    codes[:numel] = unpacked(encoded[4 * count :], bits)[:numel]
    offset = 1.5 if bits == 2 else float(LARGEST[bits])
    return (codes.view(count, BLOCK) - offset).mul_(scales[:, None]).flatten()[:numel]


def _blocks(values: Tensor) -> Tensor:
    blocks = torch.zeros(-(-values.numel() // BLOCK), BLOCK)
    blocks.view(-1)[: values.numel()] = values
    return blocks


def _scales(blocks: Tensor, numel: int, bits: int) -> Tensor:
    if bits != 2:
        return blocks.abs().amax(dim=1) / LARGEST[bits]
    sums = blocks * blocks
    while sums.shape[1] > 1:  # halves added to halves: the same order everywhere, which `sum` does not promise
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    counts = torch.full((len(blocks),), float(BLOCK))
    if len(blocks):
        counts[-1] = numel - BLOCK * (len(blocks) - 1)
    # In fp64 and then rounded, because a library's root of fp32 numbers may be off in the last bit (MKL's is).
    return (sums[:, 0] / counts).double().sqrt().float()


def packed(codes: Tensor, bits: int) -> Tensor:
    """Pack codes, uint8 [n], into bytes, uint8 [ceil(n * bits / 8)]."""
    each = 8 // bits
    table = torch.zeros(-(-codes.numel() // each), each, dtype=torch.uint8)
    table.view(-1)[: codes.numel()] = codes
    packed = torch.zeros(len(table), dtype=torch.uint8)
    for place in range(each):
        packed |= table[:, place] << (bits * place)
    return packed


def unpacked(packed: Tensor, bits: int) -> Tensor:
    """Unpack bytes, uint8 [n], into codes, uint8 [n * 8 / bits]: the inverse of `packed`."""
    each = 8 // bits
    return torch.stack([(packed >> (bits * place)) & (2**bits - 1) for place in range(each)], dim=1).flatten()
