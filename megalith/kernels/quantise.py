"""Tensors in narrow formats: codes, and scales that blocks of codes share. This module defines the codes and scales that a tensor
gets, in plain torch.

A block is a rectangle of a matrix [..., rows, columns]; it never spans several matrices. The last block of a row or column may be short. A
number is its code's value times its block's scale, times the whole tensor's scale if there is one (NVFP4: arXiv:2509.25149, appendix B). A
block with a NaN or an infinity has the scale NaN: all of its numbers, and all products with them, are NaN.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from megalith.kernels.elements import (
    E4M3,
    EXPONENTS,
    MANTISSA,
    NAN,
    Element,
    decode,
    encode,
    exponent_down,
    exponent_up,
    power,
    rounded,
    stochastic,
)

Scale = Literal["up", "down", "fp32", "e4m3"]
Share = Callable[[Tensor], Tensor]
"""Function that gets this rank's maxima of blocks (fp32), and returns the maxima over all ranks that hold a part of these blocks (or,
with delayed scaling, maxima of earlier steps)."""

ALL = 0
"""Block size that stands for the whole dimension."""


@dataclass(frozen=True)
class Scaling:
    """The format of a matrix's numbers, and how they share scales."""

    element: Element
    block: tuple[int, int]
    """Rows and columns of a block."""
    scale: Scale = "up"
    """`up`: the smallest power of two with which nothing saturates. `down`: OCP's power of two, with which the largest number may
    saturate. `fp32`: the scale that maps the block's largest number to the format's largest. `e4m3`: the scale of `fp32` rounded
    to E4M3, and in addition one fp32 scale for the whole matrix."""
    saturates: bool = False
    """True if `share` may return less than a block's largest number. Numbers that are too large for the resulting scale become
    the format's largest number."""

    @property
    def exact(self) -> bool:
        """True if bf16 represents every number exactly, because scales are powers of two."""
        return self.scale in ("up", "down")

    @property
    def whole(self) -> bool:
        """True if a scale depends on the largest number of a whole matrix."""
        return self.scale == "e4m3" or self.block == (ALL, ALL)


@dataclass(frozen=True)
class QuantisedTensor:
    """A tensor in a narrow format."""

    codes: Tensor
    """uint8 [..., rows, columns]"""
    scales: Tensor
    """fp32 [..., blocks of rows, blocks of columns]: the factor of the codes in a block"""
    whole: Tensor | None
    """fp32 [..., 1, 1]: a further factor of all numbers of a matrix"""
    scaling: Scaling

    def factors(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return every number without the whole tensor's scale: its code's value times its block's scale. The result is exact in
        fp32 unless scales are fp32."""
        numbers = decode(self.codes, self.scaling.element)
        return _unblocked(_blocked(numbers, self.scaling.block) * self.scales[..., :, None, :, None], self.codes.shape).to(dtype)

    def decoded(self) -> Tensor:
        """Every number, fp32."""
        factors = self.factors()
        return factors if self.whole is None else factors * self.whole


def quantise(x: Tensor, scaling: Scaling, *, share: Share | None = None, draws: Tensor | None = None) -> QuantisedTensor:
    """Return x [..., rows, columns] in a narrow format. `share` is required if other ranks hold a part of this rank's blocks, or
    of a matrix that has a scale of its own. `draws` (of the shape of x, uniform in [0, 1)): round stochastically."""
    scaled, scales, whole = _scaled(x, scaling, share)
    return QuantisedTensor(encode(scaled.nan_to_num_(0.0), scaling.element, draws), scales, whole, scaling)


def narrowed(
    x: Tensor, scaling: Scaling, *, share: Share | None = None, draws: Tensor | None = None, lost: Tensor | None = None
) -> Tensor:
    """Return the numbers of `quantise(x, scaling)` without their codes, in a few passes. The numbers have the dtype of x if
    scales are powers of two, else fp32, because bf16 cannot represent them. `lost`, int64 [3], is increased by three numbers:
    that of all elements, of elements that saturate, and of nonzero elements that become 0.

    If scales are powers of two, the numbers equal those of `quantise` in each block whose largest number is at least 2^-90; in smaller
    blocks, they are rounded to multiples of 2^-126 at the finest.
    """
    if not scaling.exact:
        scaled, scales, whole = _scaled(x, scaling, share)
        if lost is not None:  # a scale in fp32 is rounded, so the largest number may lie a little above the format's
            lost[1] += (scaled.abs() > scaling.element.largest * (1 + 2.0**-20)).sum()
        blocks = _blocked(rounded(scaled, scaling.element, draws), scaling.block).mul_(scales[..., :, None, :, None])
        numbers = _unblocked(blocks, x.shape)
        _count_zeros(numbers, x, lost)
        return numbers if whole is None else numbers * whole
    element, blocks = scaling.element, _blocked(x.float(), scaling.block)
    amax, _ = _maxima(blocks, scaling, share)
    k = (exponent_up if scaling.scale == "up" else exponent_down)(amax, element)[..., :, None, :, None]
    fraction = element.mantissa << MANTISSA
    least = ((k + (127 + element.lowest)).clamp_(min=element.mantissa + 1) << MANTISSA) - fraction
    least = least.masked_fill_(k > 127, NAN)  # the largest of all, so that the whole block becomes NaN without a pass of its own
    step = blocks.view(torch.int32).bitwise_and(EXPONENTS).sub_(fraction)
    step = torch.maximum(step, least, out=step).view(torch.float32)
    numbers = blocks.div(step)
    numbers = numbers.round_() if draws is None else stochastic(numbers, _blocked(draws, scaling.block))
    numbers = numbers.mul_(step)
    if scaling.scale == "down" or scaling.saturates:
        most = power(k) * element.largest
        if lost is not None:
            lost[1] += (numbers.abs() > most).sum()
        numbers = numbers.clamp_(-most, most)
    numbers = _unblocked(numbers, x.shape)
    _count_zeros(numbers, x, lost)
    return numbers.to(x.dtype)


def _count_zeros(numbers: Tensor, x: Tensor, lost: Tensor | None) -> None:
    if lost is not None:
        lost[0] += x.numel()
        lost[2] += ((numbers == 0) & (x != 0)).sum()


def _scaled(x: Tensor, scaling: Scaling, share: Share | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the scaled numbers before rounding (fp32, of the shape of x), the scales of the blocks, and the scale of the whole matrix if
    it has one."""
    element, blocks = scaling.element, _blocked(x.float(), scaling.block)
    amax, of_all = _maxima(blocks, scaling, share)
    whole = None
    if scaling.scale == "e4m3":
        assert of_all is not None
        by, scales, whole = _two_levels(amax, of_all, element)
    elif scaling.scale == "fp32":
        by, scales = _fp32(amax, element.largest)
    else:
        k = (exponent_up if scaling.scale == "up" else exponent_down)(amax, element)
        by, scales = power(-k.clamp(max=127)), power(k)
    return _unblocked(blocks * by[..., :, None, :, None], x.shape), scales, whole


def largest(x: Tensor, scaling: Scaling) -> Tensor:
    """The largest absolute value in each block of x [..., rows, columns]: fp32 [..., blocks of rows, blocks of columns]."""
    return _blocked(x, scaling.block).abs().amax((-3, -1)).float()


def _maxima(blocks: Tensor, scaling: Scaling, share: Share | None) -> tuple[Tensor, Tensor | None]:
    """Return the largest absolute value in each block and, if a matrix has a scale of its own, in each matrix, over all ranks
    that hold a part of it."""
    amax = blocks.abs().amax((-3, -1))
    if scaling.scale != "e4m3":
        return (amax if share is None else share(amax)), None
    of_all = (
        amax.amax((-2, -1), keepdim=True) if amax.numel() else amax.new_zeros(*amax.shape[:-2], 1, 1)
    )  # a block of such a format is whole on one rank: `check` sees to it
    return amax, (of_all if share is None else share(of_all))


def _fp32(amax: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """Return the factor that turns `amax` into `largest`, and its inverse, both rounded to fp32 (Transformer Engine 2.20,
    tests/pytorch/references/quantize_scale_calc.py)."""
    by = _quotient(torch.full_like(amax, largest), amax).clamp_(max=torch.finfo(torch.float32).max)
    by = torch.where(amax == 0, 1.0, by).masked_fill_(~amax.isfinite(), torch.nan)
    return by, _quotient(torch.ones_like(by), by)


def _quotient(a: Tensor, b: Tensor) -> Tensor:
    """Divide fp32 numbers with a single rounding. The division is in fp64, because compiled fp32 division is not exact on GPUs (Triton's
    `div.full`). fp64 has more than twice the bits, so that the second rounding changes nothing."""
    return a.double().div_(b.double()).float()


def _two_levels(amax: Tensor, of_all: Tensor, element: Element) -> tuple[Tensor, Tensor, Tensor]:
    """Return the factor by which numbers are multiplied before rounding, the scale of their block (an E4M3 number), and the scale
    of the matrix."""
    by_all, whole = _fp32(of_all, element.largest * E4M3.largest)
    scales = rounded(amax.div(torch.full_like(amax, element.largest)) * by_all, E4M3)
    return torch.where(scales == 0, 0.0, by_all / scales), scales, whole


def _blocked(x: Tensor, block: tuple[int, int]) -> Tensor:
    """[..., rows, columns] -> [..., blocks of rows, rows of a block, blocks of columns, columns of a block]; short blocks are padded with
    0."""
    rows, columns = block[0] or x.shape[-2] or 1, block[1] or x.shape[-1] or 1
    missing = -x.shape[-2] % rows, -x.shape[-1] % columns
    if any(missing):
        x = F.pad(x, (0, missing[1], 0, missing[0]))
    return x.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))


def _unblocked(blocks: Tensor, shape: torch.Size) -> Tensor:
    """Invert `_blocked`, to the original shape."""
    return blocks.flatten(-2).flatten(-3, -2)[..., : shape[-2], : shape[-1]]
