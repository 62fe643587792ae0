"""Recipes whose products have factors in 8-bit formats, with a power of two as the scale of a tile.

Every such number is one of bf16's. So a product here is one bf16 product of rounded factors. The definition adds up fp32 partial sums, one
for each tile of the inner dim: the same numbers in another order of sums. Each factor is rounded along the dim that its product sums over.
Nothing here is faster than bf16: only the numbers are those of hardware that multiplies in 8 bits.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from megalith.kernels.elements import E4M3, ELEMENTS
from megalith.kernels.grouped import Sizes
from megalith.kernels.multiply import Multiply
from megalith.kernels.quantise import ALL, Scale, Scaling, Share, narrowed
from megalith.spec.numbers import PrecisionSpec

SLAB = 1 << 16
"""Numbers that are rounded at once: their copies in fp32 stay in a processor's cache."""


def in_slabs(x: Tensor, scaling: Scaling) -> Tensor:
    """Return the numbers of `narrowed(x, scaling)`, x [..., rows, columns], worked out some rows at a time."""
    height, columns = scaling.block[0], x.shape[-1]
    matrices = x.flatten(0, -2)[None] if height == 1 else x[None].flatten(0, -3)
    out = torch.empty_like(matrices, memory_format=torch.contiguous_format)
    rows = max(1, SLAB // (max(columns, 1) * height)) * height
    for matrix, rounded in zip(matrices, out, strict=True):
        for first in range(0, matrix.shape[0], rows):
            rounded[first : first + rows] = narrowed(matrix[first : first + rows], scaling)
    return out.view(x.shape)


TOKENS, INPUTS, OUTPUTS = "tokens", "inputs", "outputs"
"""Dims of a product's factors."""


class Blocks(NamedTuple):
    """Rows and columns of each factor that share a scale."""

    along: tuple[int, int]
    """Activations and gradients, in products that sum over their columns"""
    down: tuple[int, int]
    """The same, in products that sum over their rows: tokens"""
    weight_along: tuple[int, int]
    weight_down: tuple[int, int]


class Narrow(Multiply):
    """A product whose factors are rounded to 8 bits. A subclass says which of their numbers share a scale."""

    tile: ClassVar[int] = 0

    def __init__(self, choices: PrecisionSpec | None = None) -> None:
        super().__init__()
        self.choices = choices = choices or PrecisionSpec()
        scale, gradients, blocks = _SCALES[choices.scale], ELEMENTS[choices.gradients], self.blocks(choices.tile or self.tile)
        self.along, self.down = Scaling(E4M3, blocks.along, scale), Scaling(E4M3, blocks.down, scale)
        self.gradient_along, self.gradient_down = replace(self.along, element=gradients), replace(self.down, element=gradients)
        self.weight_along, self.weight_down = (Scaling(E4M3, block, scale) for block in (blocks.weight_along, blocks.weight_down))
        self.shares: dict[str, Share] = {}
        """For each dim of which other ranks hold a part: the largest of their numbers."""
        self.layer = ""
        """Its name in the model."""
        self.partial = False
        """True if this rank's gradient of the outputs is only its part of a sum."""
        self.microbatch = ALL
        """Tokens among which a maximum is taken, where several microbatches are multiplied at once."""

    @classmethod
    def of(cls, choices: PrecisionSpec) -> Self:
        return cls(choices)

    @classmethod
    def blocks(cls, tile: int) -> Blocks:
        """Return which numbers share a scale."""
        raise NotImplementedError

    def fprop(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, sizes: Sizes | None = None) -> Tensor:
        x = self._tokens(x, self.along, INPUTS, grouped=sizes is not None)
        return super().fprop(x, self._weight(weight, self.weight_along), bias, sizes=sizes)

    def dgrad(self, grad: Tensor, weight: Tensor, *, sizes: Sizes | None = None, out: Tensor | None = None) -> Tensor:
        if self.choices.input_gradient == "narrow":
            grad = self._tokens(grad, self.gradient_along, OUTPUTS, grouped=sizes is not None)
            weight = self._weight(weight, self.weight_down)
        return super().dgrad(grad, weight, sizes=sizes, out=out)

    def wgrad(self, grad: Tensor, x: Tensor, *, sizes: Sizes | None = None) -> Tensor:
        """gradᵀ x, the gradient of the weight, as in `Multiply`. That of experts stays wide: which tokens meet in a block depends on the
        plan."""
        if sizes is None and self.choices.weight_gradient == "narrow":
            grad, x = self._tokens(grad, self.gradient_down, OUTPUTS), self._tokens(x, self.down, INPUTS)
        return super().wgrad(grad, x, sizes=sizes)

    def _tokens(self, x: Tensor, scaling: Scaling, channels: str, *, grouped: bool = False) -> Tensor:
        """Round activations or gradients x [..., channels]. Tokens of experts (`grouped`) share no scale."""
        if grouped and scaling.block[0] == ALL:
            scaling = replace(scaling, block=(1, scaling.block[1]))
        if ALL not in scaling.block:
            return in_slabs(x, scaling)
        rows = x.reshape(-1, x.shape[-1])
        if scaling.block[0] == ALL and self.microbatch != ALL:
            rows = rows.unflatten(0, (-1, self.microbatch))
        return narrowed(rows, scaling, share=self._share(scaling, TOKENS, channels)).view(x.shape)

    def _weight(self, weight: Tensor, scaling: Scaling) -> Tensor:
        """Round a weight [out, in], or those of experts [experts, out, in]."""
        if ALL not in scaling.block:
            return in_slabs(weight, scaling)
        return narrowed(weight, scaling, share=self._share(scaling, OUTPUTS, INPUTS))

    def _share(self, scaling: Scaling, rows: str, columns: str) -> Share | None:
        """Return how maxima are taken over the ranks that hold a part of a block."""
        dims = [dim for dim, size in zip((rows, columns), scaling.block, strict=True) if size == ALL and dim in self.shares]
        if not dims and _seen is None:
            return None

        def share(amax: Tensor) -> Tensor:
            for dim in dims:
                amax = self.shares[dim](amax)
            if _seen is not None and amax.numel() and not (self.partial and (rows, columns) == (TOKENS, OUTPUTS)):
                name = f"{self.layer}, {rows} x {columns}, {scaling.block}"
                _seen[name] = Noted.of(amax, scaling).joined(_seen.get(name))
            return amax

        return share


class Noted(NamedTuple):
    """The maxima that the scales of one factor followed, over several products and ranks."""

    least: float
    total: float
    blocks: int
    whole: bool
    """True if a maximum is that of a whole tensor."""

    @classmethod
    def of(cls, amax: Tensor, scaling: Scaling) -> Self:
        return cls(float(amax.min()), float(amax.double().sum()), amax.numel(), scaling.block == (ALL, ALL))

    def joined(self, other: "Noted | None") -> "Noted":
        """Return both together."""
        if other is None:
            return self
        return Noted(min(self.least, other.least), self.total + other.total, self.blocks + other.blocks, self.whole)

    @property
    def value(self) -> float:
        """The least of tensors, and the mean of rows. A rank that takes its part for the whole lowers it."""
        return self.least if self.whole else self.total / self.blocks


_seen: dict[str, Noted] | None = None


@contextmanager
def maxima() -> Iterator[dict[str, Noted]]:
    """Inside, note by layer and factor which maxima scales follow, but for gradients that are only a rank's part of a sum."""
    global _seen
    before, _seen = _seen, {}
    try:
        yield _seen
    finally:
        _seen = before


class Blockwise(Narrow):
    """FP8 in tiles (DeepSeek-V3, arXiv:2412.19437, section 3.3.2): activations and gradients share a scale along the inner dim, 1 x 128;
    weights in squares, 128 x 128, so that a weight has the same numbers in forward and backward. Scales are powers of two."""

    tile = 128

    @classmethod
    def blocks(cls, tile: int) -> Blocks:
        return Blocks((1, tile), (tile, 1), (tile, tile), (tile, tile))


class Microscaled(Narrow):
    """MXFP8 (OCP Microscaling Formats 1.0, section 6; Mishra et al. 2025, arXiv:2506.08027): 32 numbers along the inner dim of a product
    share a power of two; a weight is rounded along its inputs in forward, and along its outputs in backward."""

    tile = 32

    @classmethod
    def blocks(cls, tile: int) -> Blocks:
        return Blocks((1, tile), (tile, 1), (1, tile), (tile, 1))


class Rowwise(Narrow):
    """A scale for all numbers along the inner dim of a product: of a token, of an output of the weight, of a channel over all tokens of a
    microbatch (torchao's `rowwise`)."""

    @classmethod
    def blocks(cls, tile: int) -> Blocks:
        return Blocks((1, ALL), (ALL, 1), (1, ALL), (ALL, 1))


class Tensorwise(Narrow):
    """A scale for each tensor of a microbatch, from the numbers that it has now (Micikevicius et al. 2022, arXiv:2209.05433; torchao's
    `tensorwise`). Tokens of experts have one each, as in torch's grouped products."""

    @classmethod
    def blocks(cls, tile: int) -> Blocks:
        return Blocks((ALL, ALL), (ALL, ALL), (ALL, ALL), (ALL, ALL))


_SCALES: dict[str, Scale] = {"up": "up", "ocp": "down"}
