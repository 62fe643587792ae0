"""The recipes of narrow products, which differ in the numbers of a factor that share a scale."""

from collections.abc import Mapping

from torch import Tensor

from megalith.kernels.elements import E2M1
from megalith.kernels.grouped import Sizes
from megalith.kernels.multiply import PLAIN, Multiply
from megalith.kernels.narrow import Blocks, Narrow
from megalith.kernels.quantise import ALL
from megalith.spec.numbers import PRODUCTS


class Blockwise(Narrow):
    """FP8 in tiles (DeepSeek-V3, arXiv:2412.19437, section 3.3.2): activations and gradients share a scale in tiles of 1 x 128 along the
    inner dim, weights in squares of 128 x 128, so that a weight has the same numbers in forward and backward. By default, scales are
    powers of two."""

    tile = 128

    @classmethod
    def blocks(cls, tile: int) -> Blocks:
        return Blocks((1, tile), (tile, 1), (tile, tile), (tile, tile))


class Microscaled(Narrow):
    """MXFP8 (OCP Microscaling Formats 1.0, section 6; Mishra et al. 2025, arXiv:2506.08027). Each 32 numbers along the inner dim
    of a product share a power of two as scale. In forward a weight is rounded along its inputs, in backward along its outputs.
    """

    tile = 32

    @classmethod
    def blocks(cls, tile: int) -> Blocks:
        return Blocks((1, tile), (tile, 1), (1, tile), (tile, 1))


class Rowwise(Narrow):
    """One scale for all numbers along the inner dim of a product: in activations a scale for each token, in weights for each
    output, and in weight gradients for each channel over all tokens of a microbatch (torchao's `rowwise`)."""

    @classmethod
    def blocks(cls, tile: int) -> Blocks:
        return Blocks((1, ALL), (ALL, 1), (1, ALL), (ALL, 1))


class Tensorwise(Narrow):
    """One scale for each tensor of a microbatch, from its current numbers (Micikevicius et al. 2022, arXiv:2209.05433; torchao's
    `tensorwise`) or from its numbers in earlier steps (`Narrow.remember`). In experts, each token has a scale of its own, as in
    torch's grouped products."""

    @classmethod
    def blocks(cls, tile: int) -> Blocks:
        return Blocks((ALL, ALL), (ALL, ALL), (ALL, ALL), (ALL, ALL))


class Microscaled4(Blockwise):
    """MXFP4 (OCP Microscaling Formats 1.0, section 6): E2M1 with a power of two as scale for each 32 numbers along the inner dim.
    In weights each 32 x 32 numbers share a scale, as NVIDIA 2025, arXiv:2509.25149, section 4.3 recommends for 4 bits."""

    tile = 32
    element = E2M1
    stochastic = True


class NvFp4(Narrow):
    """NVFP4 (NVIDIA 2025, arXiv:2509.25149): E2M1 with an E4M3 scale for each 16 numbers along the inner dim, or 16 x 16 numbers
    of a weight, and an fp32 scale for the whole tensor of a microbatch. In experts, each token has an fp32 scale instead of the
    whole tensor."""

    tile = 16
    element = E2M1
    scale = "e4m3"
    stochastic = True

    @classmethod
    def blocks(cls, tile: int) -> Blocks:
        return Blocks((1, tile), (tile, 1), (tile, tile), (tile, tile))


class Mixed(Multiply):
    """The products of a layer in several formats: a recipe computes each of them, and rounds both its factors. Backward keeps the
    layer's input as it is."""

    def __init__(self, recipes: Mapping[str, Narrow]) -> None:
        """`recipes`: the recipes of products with narrow factors, by their keys in `[precision]` (`spec.numbers.PRODUCTS`)."""
        super().__init__()
        self.of_outputs, self.of_inputs, self.of_weights, self.of_experts = (recipes.get(each, PLAIN) for each in PRODUCTS)
        self.draws = any(recipe.draws for recipe in recipes.values())

    def fprop(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, sizes: Sizes | None = None) -> Tensor:
        return self.of_outputs.fprop(x, weight, bias, sizes=sizes)

    def dgrad(self, grad: Tensor, weight: Tensor, *, sizes: Sizes | None = None, out: Tensor | None = None) -> Tensor:
        return self.of_inputs.dgrad(grad, weight, sizes=sizes, out=out)

    def wgrad(self, grad: Tensor, x: Tensor, *, sizes: Sizes | None = None) -> Tensor:
        return (self.of_weights if sizes is None else self.of_experts).wgrad(grad, x, sizes=sizes)
