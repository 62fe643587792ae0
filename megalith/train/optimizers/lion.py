"""Lion (Chen et al. 2023, arXiv:2302.06675): each update changes every weight by plus or minus the learning rate, besides weight decay."""

from collections.abc import Sequence

from megalith.spec.run import OptimizerSpec
from megalith.train.optimizers.global_tensors import GlobalTensors
from megalith.train.optimizers.rule import Part, opened


class Lion:
    """w <- w - lr (sign(beta1 m + (1 - beta1) g) + decay w), and then m <- beta2 m + (1 - beta2) g."""

    def __init__(self, spec: OptimizerSpec, whole: GlobalTensors) -> None:
        self.spec = spec

    def update(self, parts: Sequence[Part], *, number: int, lr: float) -> None:
        """Update the weights and their moment."""
        for part in opened(parts):
            moment, rate = part.slots["moments.first"], lr * part.lr
            direction = moment.mul(self.spec.beta1).add_(part.gradient, alpha=1 - self.spec.beta1).sign_()
            part.weight.mul_(1 - rate * part.weight_decay).add_(direction, alpha=-rate)
            moment.mul_(self.spec.beta2).add_(part.gradient, alpha=1 - self.spec.beta2)
