"""Recipes whose products have factors in 8-bit formats, with a power of two as the scale of a tile.

Every such number is one of bf16's. So a product here is one bf16 product of rounded factors. The definition adds up fp32 partial sums, one
for each tile of the inner dim: the same numbers in another order of sums. Each factor is rounded along the dim that its product sums over.
Nothing here is faster than bf16: only the numbers are those of hardware that multiplies in 8 bits.
"""

from typing import ClassVar, Self

import torch
from torch import Tensor

from megalith.kernels.elements import E4M3, ELEMENTS
from megalith.kernels.grouped import Sizes
from megalith.kernels.multiply import Multiply
from megalith.kernels.quantise import Scale, Scaling, narrowed
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


class Blockwise(Multiply):
    """FP8 in tiles (DeepSeek-V3, arXiv:2412.19437, section 3.3.2): activations and gradients share a scale along the inner dim, 1 x 128;
    weights in squares, 128 x 128, so that a weight has the same numbers in forward and backward. Scales are powers of two."""

    tile: ClassVar[int] = 128
    square: ClassVar[bool] = True

    def __init__(self, choices: PrecisionSpec | None = None) -> None:
        super().__init__()
        self.choices = choices = choices or PrecisionSpec()
        tile, scale = choices.tile or self.tile, _SCALES[choices.scale]
        self.along = Scaling(E4M3, (1, tile), scale)
        self.down = Scaling(E4M3, (tile, 1), scale)
        gradients = ELEMENTS[choices.gradients]
        self.gradient_along = Scaling(gradients, (1, tile), scale)
        self.gradient_down = Scaling(gradients, (tile, 1), scale)
        both = Scaling(E4M3, (tile, tile), scale)
        self.weight_along, self.weight_down = (both, both) if self.square else (self.along, self.down)

    @classmethod
    def of(cls, choices: PrecisionSpec) -> Self:
        return cls(choices)

    def fprop(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, sizes: Sizes | None = None) -> Tensor:
        return super().fprop(in_slabs(x, self.along), in_slabs(weight, self.weight_along), bias, sizes=sizes)

    def dgrad(self, grad: Tensor, weight: Tensor, *, sizes: Sizes | None = None, out: Tensor | None = None) -> Tensor:
        if self.choices.input_gradient == "narrow":
            grad, weight = in_slabs(grad, self.gradient_along), in_slabs(weight, self.weight_down)
        return super().dgrad(grad, weight, sizes=sizes, out=out)

    def wgrad(self, grad: Tensor, x: Tensor, *, sizes: Sizes | None = None) -> Tensor:
        """Tiles of tokens; those of experts stay wide, since which tokens meet in one depends on the plan."""
        if sizes is None and self.choices.weight_gradient == "narrow":
            grad, x = in_slabs(grad, self.gradient_down), in_slabs(x, self.down)
        return super().wgrad(grad, x, sizes=sizes)


class Microscaled(Blockwise):
    """MXFP8 (OCP Microscaling Formats 1.0, section 6; Mishra et al. 2025, arXiv:2506.08027): 32 numbers along the inner dim of a product
    share a power of two; a weight is rounded along its inputs in forward, and along its outputs in backward."""

    tile = 32
    square = False


_SCALES: dict[str, Scale] = {"up": "up", "ocp": "down"}
