"""A linear layer."""

from jaxtyping import Float
from torch import Tensor, nn

from megalith.kernels.multiply import Multiply


class Linear(nn.Linear):
    """torch's linear layer, but without a bias by default, and with a child module `multiply` that computes the products. Recipes and
    overlap replace `multiply`.

    Under tensor parallelism, a rank may compute only the outputs `rows`, or leave out the bias, which is then added after the sum over the
    ranks.
    """

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.multiply: nn.Module = Multiply()
        self.rows: slice | None = None  # of the weight and the bias; None: all
        self.adds_bias = True

    def forward(self, input: Float[Tensor, "... inputs"]) -> Float[Tensor, "... outputs"]:
        return self.multiply(input, *self.factors())

    def factors(self) -> tuple[Tensor, Tensor | None]:
        """Return the weight and the bias of the outputs that this rank computes."""
        weight, bias = self.weight, self.bias if self.adds_bias else None
        return (weight, bias) if self.rows is None else (weight[self.rows], None if bias is None else bias[self.rows])
