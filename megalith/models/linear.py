"""A linear layer."""

from jaxtyping import Float
from torch import Tensor, nn

from megalith.kernels.linear import linear


class Linear(nn.Linear):
    """torch's, except that its weight gradient can be put off (zero-bubble schedules); no bias unless asked for."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__(inputs, outputs, bias=bias)

    def forward(self, input: Float[Tensor, "... inputs"]) -> Float[Tensor, "... outputs"]:
        return linear(input, self.weight, self.bias)
