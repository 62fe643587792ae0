"""High-precision products that keep their inputs for backward in 8 bits.

Only the gradient of the weight needs the kept input, so 8 bits do not change forward. Among the gradients of activations, 8 bits
change only those through an activation function whose factors are kept in 8 bits too. A tile of a row shares a scale, the
smallest power of two at which nothing saturates.
"""

from typing import Any, Self

import torch
from torch import Tensor

from megalith.kernels.elements import E4M3
from megalith.kernels.grouped import Sizes
from megalith.kernels.multiply import Activation, Formed, Multiply
from megalith.kernels.packed import once, pack, unpack
from megalith.kernels.quantise import Scaling
from megalith.spec.numbers import BF16, PrecisionSpec, packed_tile


class Packed(Multiply):
    """Plain products whose inputs are kept in E4M3, with a scale in fp32 for each tile of a row. If several layers multiply the
    same tensor, it is kept once."""

    def __init__(self, tile: int, *, inputs: bool = True, activations: bool = True) -> None:
        """`inputs`: inputs that are not the result of an activation are kept in 8 bits; `activations`: an activation's factors,
        and its result as an input, are kept in 8 bits."""
        super().__init__()
        self.scaling, self.inputs, self.activations = Scaling(E4M3, (1, tile)), inputs, activations

    def for_layer(self, *, inputs: bool, activations: bool) -> Multiply:
        """Return this recipe for a layer in which only some of these tensors are kept in 8 bits."""
        return type(self)(self.scaling.block[1], inputs=inputs, activations=activations)

    @classmethod
    def of(cls, choices: PrecisionSpec) -> Self:
        return cls(packed_tile(choices, BF16.name))

    def packed(self, x: Tensor) -> Tensor:
        """Return the packed form of x [..., columns]."""
        return once(x, self.scaling, lambda: pack(x.reshape(-1, x.shape[-1]), self.scaling))

    def unpacked(self, kept: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
        """Return the numbers [rows, columns] of a packed form."""
        return unpack(kept, columns, self.scaling, dtype)

    def activated(self, activation: Activation, gate: Tensor | None, up: Tensor) -> Tensor:
        if self.activations and torch.is_grad_enabled():
            return self.mark(_Activated.apply(activation, gate, up, self))
        return self.mark(super().activated(activation, gate, up))

    @staticmethod
    def mark(out: Any) -> Tensor:
        """Mark the result of an activation, so that `keeping` recognises it, and return it."""
        setattr(out, _RESULT, True)
        return out

    def keeping(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, sizes: Sizes | None = None
    ) -> tuple[Tensor, Tensor]:
        short = self.activations if hasattr(x, _RESULT) else self.inputs
        return self.fprop(x, weight, bias, sizes=sizes), self.packed(x) if short else x

    def restored(self, kept: Tensor, inputs: int, dtype: torch.dtype) -> Tensor:
        return self.unpacked(kept, inputs, dtype) if kept.dtype == torch.uint8 else super().restored(kept, inputs, dtype)


_RESULT = "_megalith_result"
"""Attribute by which the result of an activation is recognised."""


class _Activated(torch.autograd.Function):
    """Compute activation(gate) * up, or activation(up), and keep the factors in 8 bits. Backward computes the activation again."""

    @staticmethod
    def forward(ctx: Any, activation: Activation, gate: Tensor | None, up: Tensor, recipe: Packed) -> Tensor:
        ctx.activation, ctx.recipe, ctx.shape = activation, recipe, up.shape
        factors = (up,) if gate is None else (gate, up)
        ctx.save_for_backward(*map(recipe.packed, factors))
        return Formed(activation, factors).form()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        factors = (ctx.recipe.unpacked(kept, ctx.shape[-1], grad.dtype).view(ctx.shape) for kept in ctx.saved_tensors)
        *of_gate, of_up = Formed(ctx.activation, tuple(factors)).gradients(grad)
        return None, of_gate[0] if of_gate else None, of_up, None
