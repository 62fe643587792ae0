"""y = x Wᵀ + b, with a weight gradient that can be put off."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megalith.kernels.deferred import weight_gradient
from megalith.kernels.product import product, widened


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight  # itself, since its `.grad` may be added to later
        ctx.has_bias = bias is not None
        if not widened(x):
            return F.linear(x, weight, bias)
        out = product(x, weight.T)
        return out if bias is None else out.add_(bias)

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,), weight = ctx.saved_tensors, ctx.weight
        rows = grad.reshape(-1, grad.shape[-1])
        of_x = product(grad, weight) if ctx.needs_input_grad[0] else None
        of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = weight_gradient(weight, lambda: product(rows.T, x.reshape(-1, x.shape[-1])))
        return of_x, of_weight, rows.sum(0) if ctx.has_bias else None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in], weight [out, in], bias [out] -> [..., out]. A compiler gets torch's own: it schedules the backward itself."""
    return F.linear(x, weight, bias) if torch.compiler.is_compiling() else _Linear.apply(x, weight, bias)  # pyright: ignore[reportReturnType]
