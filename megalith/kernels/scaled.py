"""Products of 8-bit factors on GPUs that support them, by torch's `scaled_mm`.

`quantise` also defines the codes of the 8-bit factors; a compiler turns `quantise` into one pass over the numbers. The hardware
adds up the products and rounds the sum once. Hopper keeps about 14 bits in the sum of 128 products (DeepSeek-V3,
arXiv:2412.19437, section 3.3.2)."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, library
from torch.nn.functional import ScalingType

from megalith.kernels.quantise import ALL, Scaling, Share, largest, quantise
from megalith.spec.numbers import Granularity, aligned, multiplies_codes

TILE = 128
"""The only tile size that `scaled_mm` supports on Hopper."""
KINDS: dict[tuple[int, int], ScalingType] = {
    (ALL, ALL): ScalingType.TensorWise,
    (1, ALL): ScalingType.RowWise,
    (1, TILE): ScalingType.BlockWise1x128,
    (TILE, TILE): ScalingType.BlockWise128x128,
}
"""Map from the block of a factor, if the product sums over its columns, to torch's name for this scaling."""
GRANULARITY: dict[tuple[int, int], Granularity] = {(ALL, ALL): "tensor", (1, ALL): "row", (1, TILE): "tile"}
"""Map from the block of a product's first factor to Megalith's name for this granularity."""
PAIRS = {((ALL, ALL), (ALL, ALL)), ((1, ALL), (1, ALL)), ((1, TILE), (1, TILE)), ((1, TILE), (TILE, TILE))}
"""Pairs of blocks that torch can multiply, written as if the product summed over the columns of both factors."""
GRAPHS = 256
"""Number of combinations of formats, blocks and shapes that the compiler keeps. The compiler's default, 8, is too low for a
model."""


@dataclass(frozen=True)
class Factor:
    """A factor of a product."""

    numbers: Tensor
    """[rows, columns], in bf16 or fp32"""
    scaling: Scaling
    """How numbers share scales."""
    share: Share | None = None
    """Function that takes maxima over the ranks that hold a part of the factor's blocks; None: this rank has whole blocks."""
    down: bool = False
    """True if the product sums over the rows of `numbers`; False: over the columns."""

    @property
    def block(self) -> tuple[int, int]:
        """Size of a block; the dim over which the product sums is last."""
        rows, columns = self.scaling.block
        return (columns, rows) if self.down else (rows, columns)

    @property
    def sizes(self) -> torch.Size:
        """Size of the dim that the product keeps, and of the dim over which it sums."""
        return self.numbers.shape[::-1] if self.down else self.numbers.shape


def multiplies(a: Factor, b: Factor) -> bool:
    """True if the device has an 8-bit product for such factors."""
    formats = {factor.scaling.element.dtype for factor in (a, b)}
    if (
        not formats <= {torch.float8_e4m3fn, torch.float8_e5m2}
        or formats == {torch.float8_e5m2}
        or (a.block, b.block) not in PAIRS
    ):
        return False
    (rows, inner), (columns, _) = a.sizes, b.sizes
    if not aligned(rows, columns, inner, tile=a.block[1], square=b.block[0] > 1):
        return False
    return multiplies_codes(GRANULARITY[a.block], capability(a.numbers.device))


@cache
def capability(device: torch.device) -> float | None:
    """Return a GPU's compute capability, 9.0 for Hopper; None for a CPU."""
    if device.type != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return major + minor / 10


def scaled_product(a: Factor, b: Factor, dtype: torch.dtype) -> Tensor:
    """Return the product of two factors, [kept size of a, kept size of b], summed over the last dim of both. `multiplies` must be
    true."""
    (codes, scales), (others, their_scales) = coded(a), coded(b)
    return _product(codes, scales, others, their_scales, *a.block, *b.block, dtype)


def coded(factor: Factor) -> tuple[Tensor, Tensor]:
    """Return a factor's codes (torch's float8) and scales (fp32), with the same bits as from `quantise`. The dim over which the
    product sums is last."""
    known = None if factor.share is None else factor.share(largest(factor.numbers, factor.scaling))
    encode = _encode if torch.compiler.is_compiling() else _compiled()
    return encode(factor.numbers, known, factor.scaling, factor.down)


def _encode(x: Tensor, known: Tensor | None, scaling: Scaling, down: bool) -> tuple[Tensor, Tensor]:
    assert scaling.element.dtype is not None
    narrow = quantise(x, scaling, share=None if known is None else lambda _: known)
    codes = narrow.codes.view(scaling.element.dtype)
    if down:
        codes, narrow = codes.T, replace(narrow, scales=narrow.scales.T)
    return codes.contiguous(), narrow.scales  # the product takes rows alone, whatever the layout of x was


@cache
def _compiled() -> Callable[..., tuple[Tensor, Tensor]]:
    config = torch._dynamo.config  # pyright: ignore[reportAttributeAccessIssue]
    config.recompile_limit = max(config.recompile_limit, GRAPHS)
    return torch.compile(_encode, dynamic=False)  # else it takes a format's numbers of bits for unknown numbers, too


# A compiler must not see this product: it has transposed scales of blocks (pytorch/pytorch#161127).
@library.custom_op("megalith::scaled_product", mutates_args=())
def _product(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    a_rows: int,
    a_inner: int,
    b_rows: int,
    b_inner: int,
    dtype: torch.dtype,
) -> Tensor:
    kinds = KINDS[a_rows, a_inner], KINDS[b_rows, b_inner]
    of_a, of_b = _laid(a_scales, kinds[0], first=True), _laid(b_scales, kinds[1], first=False)
    return F.scaled_mm(a, b.T, of_a, kinds[0], of_b, kinds[1], output_dtype=dtype)


@_product.register_fake
def _shape(a: Tensor, a_scales: Tensor, b: Tensor, *rest: Any) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=rest[-1])


def _laid(scales: Tensor, kind: ScalingType, *, first: bool) -> Tensor:
    """Return the scales of the first or second factor in the layout that cuBLAS reads. cuBLAS does not detect another layout."""
    if kind == ScalingType.TensorWise:
        return scales.reshape(())
    if kind == ScalingType.RowWise:
        return scales.reshape(-1).view((-1, 1) if first else (1, -1))
    if kind == ScalingType.BlockWise1x128:
        return scales.T.contiguous().T
    return F.pad(scales, (0, -scales.shape[1] % 4)).contiguous().T
