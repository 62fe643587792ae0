"""Differentiable communication: pairs of functions, each of which is the backward of the other."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Move = Callable[..., Tensor]
"""Takes a tensor and the details of an exchange, such as the process group; returns the received tensor."""


def conjugates(there: Move, back: Move) -> tuple[Move, Move]:
    """Wrap `there` and `back` as differentiable functions: the backward of each one applies the other to the gradient."""
    return _differentiable(there, back), _differentiable(back, there)


def _differentiable(forth: Move, home: Move) -> Move:
    class Conjugate(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, *how: Any) -> Tensor:
            ctx.how = how
            return forth(x, *how)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
            return home(grad, *ctx.how), *(None for _ in ctx.how)

    return Conjugate.apply  # pyright: ignore[reportReturnType]
