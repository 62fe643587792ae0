"""SGD with momentum (Sutskever et al. 2013): torch's own operations on this rank's shares."""

from collections.abc import Sequence

from torch import Tensor
from torch.optim.sgd import sgd

from megalith.spec.run import OptimizerSpec
from megalith.train.optimizers.global_tensors import GlobalTensors
from megalith.train.optimizers.rule import Part, alike, together


class SGD:
    """g <- g + decay w; v <- momentum v + g; w <- w - lr v, or w - lr (g + momentum v) with Nesterov's look-ahead.

    As in torch.optim.SGD, weight decay is added to the gradient, so it enters the moment. All other optimizers of Megalith decouple weight
    decay.
    """

    def __init__(self, spec: OptimizerSpec, whole: GlobalTensors) -> None:
        self.spec = spec

    def update(self, parts: Sequence[Part], *, number: int, lr: float) -> None:
        """Update the weights and their moment."""
        for group in alike(parts):
            for some in together(group):
                self._update(some, lr=lr)

    def _update(self, parts: Sequence[Part], *, lr: float) -> None:
        moments: list[Tensor | None] = [part.slots["moments.first"] for part in parts]
        sgd(
            [part.weight for part in parts],
            [part.gradient for part in parts],
            moments,
            foreach=False,  # the fused kernel rounds the last elements of a share otherwise; `foreach` changes the gradients
            weight_decay=parts[0].weight_decay,
            momentum=self.spec.momentum,
            lr=lr * parts[0].lr,
            dampening=0.0,
            nesterov=self.spec.nesterov and self.spec.momentum > 0,
            maximize=False,
        )
