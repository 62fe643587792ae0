"""Rotation of query and key channels by their position."""

import torch
from torch import Tensor


def rotate_plain(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [batch, seq, heads, head_dim] rotated pairwise (channel i with i + head_dim / 2); cos, sin fp32 [..., seq, 1, head_dim / 2]."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class _Rotate(torch.autograd.Function):
    """The same in half the passes over memory; the gradient is the rotation by the opposite angle."""

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, -sin), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    (a, b), (first, second) = x.chunk(2, dim=-1), out.chunk(2, dim=-1)
    first.copy_((a * cos).addcmul_(b, sin, value=-1))
    second.copy_((b * cos).addcmul_(a, sin))
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rotate_plain`, faster in eager mode; a compiler fuses the plain one better than this."""
    return rotate_plain(x, cos, sin) if torch.compiler.is_compiling() else _Rotate.apply(x, cos, sin)  # pyright: ignore[reportReturnType]
