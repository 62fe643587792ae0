"""Low-bit moments: the exact form in which an optimizer's tensors are kept between two updates.

In 8 bits a row [..., n] is cut into blocks. A block consists of its codes in E4M3 and one byte of E8M0. The byte is the power of
two by which the codes are multiplied, the smallest with which no number saturates. For a mean of squares, its root is stored.
Ranks that split a tensor at the borders of blocks hold together the same bytes as a rank that holds the whole tensor.

Rounding is stochastic: a moment moves by a tenth or a hundredth of its distance from a gradient, so rounding to the nearest of few numbers
would leave most moments unchanged (Gupta et al. 2015, arXiv:1502.02551, section 3). Draws are a function of the update and of an element's
place in the whole tensor, so every plan makes the same draws.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megalith.kernels.elements import E4M3, decode, decode_exponent, encode_exponent, exponent_up, power, rounded

MINIMUM = 2.0 ** (E4M3.lowest - E4M3.mantissa)
"""The smallest number above 0 in E4M3. A root that is not 0 is stored as at least this number times its block's scale,
because an update with a denominator of 0 would be unbounded."""
_ODD = (0x7FEB352D, 0x846CA68B)
_GOLDEN = 0x9E3779B9
_WORD = 0xFFFFFFFF


def seed_of_draws(name: str, slot: str, number: int) -> int:
    """Return the seed (32 bits) of the draws for one tensor in one update."""
    found = number & _WORD
    for octet in f"{slot}.{name}".encode():
        found = mixed(found ^ octet)
    return found


def mixed(word: int) -> int:
    """Mix 32 bits: a bijection in which each input bit flips half of the output bits on average (Wellons 2018, nullprogram.com,
    "lowbias32")."""
    word = (word ^ word >> 16) * _ODD[0] & _WORD
    word = (word ^ word >> 15) * _ODD[1] & _WORD
    return word ^ word >> 16


def words(seed: int, rows: Tensor, first: int, columns: int) -> Tensor:
    """Return random words (int32) [rows, columns] for the elements in these rows of a matrix (int64 [rows]), from its column `first` on."""
    by_row = _mixed_in_place((rows ^ rows >> 32).to(torch.int32).mul_(_signed(_GOLDEN)).bitwise_xor_(_signed(seed)))
    by_column = torch.arange(first, first + columns, dtype=torch.int32, device=rows.device).mul_(_signed(_GOLDEN))
    return _mixed_in_place(by_row[:, None] + by_column)


def _mixed_in_place(word: Tensor) -> Tensor:
    for shift, odd in ((16, _ODD[0]), (15, _ODD[1])):
        word.bitwise_xor_((word >> shift).bitwise_and_((1 << 32 - shift) - 1)).mul_(_signed(odd))
    return word.bitwise_xor_((word >> 16).bitwise_and_(0xFFFF))


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def pack(numbers: Tensor, into: Tensor, block: int, drawn: Tensor, *, root: bool) -> None:
    """Write numbers (fp32 [rows, n]) in 8 bits to `into`, uint8 [rows, n + blocks]. `drawn`: a random word for each number."""
    values = numbers.sqrt() if root else numbers
    draws = (drawn >> 8).bitwise_and_(0xFFFFFF).float().mul_(2.0**-24)
    for columns, where in _spans(values.shape[-1], block):
        blocks = _cut(values[:, columns], block)
        k = exponent_up(blocks.abs().amax(-1), E4M3)
        scaled = (blocks * power(-k.clamp(max=127))[..., None]).nan_to_num_(0.0)
        kept = rounded(scaled, E4M3, _cut(draws[:, columns], block))
        if root:
            kept = torch.where(scaled > 0, kept.clamp(min=MINIMUM), kept)
        target = _cut(into[:, where], block + 1)
        width = blocks.shape[-1]
        target[..., :width].copy_(kept.to(torch.float8_e4m3fn).view(torch.uint8))
        target[..., width].copy_(encode_exponent(k))


def unpack(packed: Tensor, block: int, columns: int, *, root: bool) -> Tensor:
    """Invert `pack`: uint8 [rows, columns + blocks] -> fp32 [rows, columns]."""
    found = torch.empty(packed.shape[0], columns, dtype=torch.float32, device=packed.device)
    for here, where in _spans(columns, block):
        pieces = _cut(packed[:, where], block + 1)
        numbers = decode(pieces[..., :-1], E4M3) * decode_exponent(pieces[..., -1])[..., None]
        _cut(found[:, here], block).copy_(numbers.square_() if root else numbers)
    return found


def narrow(numbers: Tensor, into: Tensor, drawn: Tensor) -> None:
    """Write numbers (fp32) in bf16 to `into`, of the same shape. `drawn`: a random word for each number."""
    bits = numbers.view(torch.int32) + (drawn & 0xFFFF)
    wide = bits.bitwise_and_(-0x10000).view(torch.float32)
    into.copy_(torch.where(numbers.isfinite(), wide, numbers))


def rows_of(shape: Sequence[int], offset: Sequence[int], sizes: Sequence[int], device: torch.device) -> Tensor:
    """Return the row number in the whole tensor [..., rows, columns] of each row of a box, in order (int64)."""
    found = torch.zeros((), dtype=torch.int64, device=device)
    for size, start, here in zip(shape[:-1], offset[:-1], sizes[:-1], strict=True):
        found = found[..., None] * size + torch.arange(start, start + here, device=device)
    return found.reshape(-1)


def _spans(columns: int, block: int) -> list[tuple[slice, slice]]:
    """Return the columns of a row's whole blocks, and the columns of a short last block, each with the bytes that hold them."""
    whole = columns // block * block
    edge = whole // block * (block + 1)
    found = [(slice(0, whole), slice(0, edge))] if whole else []
    return [*found, (slice(whole, columns), slice(edge, None))] if whole < columns else found


def _cut(rows: Tensor, size: int) -> Tensor:
    """View [rows, n] as [rows, n / size, size], or as one shorter block per row."""
    return rows.unflatten(-1, (-1, min(size, rows.shape[-1])))
