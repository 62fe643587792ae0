"""Rotation of query and key channels by their position."""

import torch
from torch import Tensor


def rotate_plain(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The last channels of x [batch, seq, heads, channels] rotated pairwise, with cos and sin fp32 [..., seq, 1, pairs].

    Of the last 2 * pairs channels, channel i rotates with i + pairs; the channels before them are unchanged (DeepSeek-V2 rotates some
    channels only).
    """
    kept, turned = _split(x, cos)
    first, second = turned.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    return turned if kept.shape[-1] == 0 else torch.cat((kept, turned), dim=-1)


class _Rotate(torch.autograd.Function):
    """`rotate_plain` with half the passes over memory; the gradient is the rotation by the opposite angle."""

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, -sin), None, None


def _split(x: Tensor, cos: Tensor) -> tuple[Tensor, Tensor]:
    turned = 2 * cos.shape[-1]
    assert x.shape[-1] >= turned, (x.shape, cos.shape)
    return x[..., : x.shape[-1] - turned], x[..., x.shape[-1] - turned :]


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    (kept, turned), (kept_out, turned_out) = _split(x, cos), _split(out, cos)
    kept_out.copy_(kept)
    if x.device.type == "cpu":
        _turn_rows(turned, turned_out, cos, sin)
        return out
    (a, b), (first, second) = turned.chunk(2, dim=-1), turned_out.chunk(2, dim=-1)
    first.copy_((a * cos).addcmul_(b, sin, value=-1))
    second.copy_((b * cos).addcmul_(a, sin))
    return out


def _turn_rows(x: Tensor, out: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate one sequence at a time, so that intermediate numbers stay in the cache."""
    both = torch.cat((cos, cos), dim=-1)
    tables = [t.expand(x.shape[0], *t.shape[-3:]) for t in (both, sin)]
    for row, row_out, row_both, row_sin in zip(x, out, *tables, strict=True):
        wide = row.to(cos.dtype)
        (a, b), turned = wide.chunk(2, dim=-1), wide * row_both
        first, second = turned.chunk(2, dim=-1)
        first.addcmul_(b, row_sin, value=-1)
        second.addcmul_(a, row_sin)
        row_out.copy_(turned)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Do what `rotate_plain` does, faster in eager mode; a compiler fuses `rotate_plain` better than this function."""
    return rotate_plain(x, cos, sin) if torch.compiler.is_compiling() else _Rotate.apply(x, cos, sin)  # pyright: ignore[reportReturnType]
