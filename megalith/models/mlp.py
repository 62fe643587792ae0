"""The feed-forward half of a block."""

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from megalith.models.batch import Batch
from megalith.models.linear import Linear
from megalith.spec.model import MlpSpec

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
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
        """`batch` is there for blocks, which call every kind of MLP alike; this one does not read it."""
        if self.gate is None:
            return self.down(self.activation(self.up(x)))
        return self.down(self.activation(self.gate(x)) * self.up(x))
