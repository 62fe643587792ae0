"""The feed-forward half of a block."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from megalith.models.batch import Batch
from megalith.models.linear import Linear
from megalith.spec.model import MlpSpec


class _SquaredRelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.relu().square_()

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        return x.relu().mul_(2).mul_(grad)


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0)² (So et al. 2021, arXiv:2109.08668)."""
    return F.relu(x).square() if torch.compiler.is_compiling() else _SquaredRelu.apply(x)  # pyright: ignore[reportReturnType]


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": squared_relu,
}


class Mlp(nn.Module):
    """down(activation(gate(x)) * up(x)) (Shazeer 2020), or without a gate down(activation(up(x)))."""

    def __init__(self, dim: int, spec: MlpSpec) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[spec.activation]
        self.gate = Linear(dim, spec.hidden, spec.bias) if spec.gated else None
        self.up = Linear(dim, spec.hidden, spec.bias)
        self.down = Linear(spec.hidden, dim, spec.bias)

    def forward(self, x: Float[Tensor, "batch seq dim"], batch: Batch | None = None) -> Float[Tensor, "batch seq dim"]:
        """`batch` is unused; blocks pass it to every kind of MLP."""
        made = self.down.multiply.activated  # it takes its factors over, and frees them as soon as it can
        return self.down(made(self.activation, None if self.gate is None else self.gate(x), self.up(x)))  # pyright: ignore[reportCallIssue]
