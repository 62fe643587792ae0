"""LAMB (You et al. 2020, arXiv:1904.00962, Algorithm 2): Adam's update direction, scaled so that the step is proportional to the norm of
the updated matrix."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megalith.spec.run import OptimizerSpec
from megalith.train.optimizers.global_tensors import GlobalSum, GlobalTensors, squares
from megalith.train.optimizers.rule import Part, opened


class Lamb:
    """w <- w - lr |w| / |u| u, where u = m / (sqrt(v) + eps) + decay w, with both moments bias-corrected.

    Norms are taken over whole matrices; each expert is a matrix of its own. The paper's function phi is the identity. The ratio |w| / |u|
    is replaced by 1 for vectors, and for a matrix if one of its norms is 0.
    """

    def __init__(self, spec: OptimizerSpec, whole: GlobalTensors) -> None:
        self.spec, self.whole = spec, whole

    def update(self, parts: Sequence[Part], *, number: int, lr: float) -> None:
        """Update the weights and both moments."""
        weights, updates = dict[str, GlobalSum](), dict[str, GlobalSum]()
        for part in opened(parts):
            self._remember(part)
            if part.weight.dim() >= 2:
                cut = self.whole.cuts[part.name]
                weights[part.name] = squares(part.name, part.weight, cut)
                updates[part.name] = squares(part.name, self._direction(part, number), cut)
        ratios = self._ratios(weights, updates)
        for part in opened(parts):
            direction = self._direction(part, number)
            if (ratio := ratios.get(part.name)) is not None:
                direction.mul_(ratio.to(direction.dtype)[..., None, None])
            part.weight.add_(direction, alpha=-lr * part.lr)

    def _remember(self, part: Part) -> None:
        beta1, beta2 = self.spec.beta1, self.spec.beta2
        part.slots["moments.first"].mul_(beta1).add_(part.gradient, alpha=1 - beta1)
        part.slots["moments.second"].mul_(beta2).addcmul_(part.gradient, part.gradient, value=1 - beta2)

    def _direction(self, part: Part, number: int) -> Tensor:
        first, second = part.slots["moments.first"], part.slots["moments.second"]
        deviation = second.div(1 - self.spec.beta2 ** (number + 1)).sqrt_().add_(self.spec.eps)
        return first.div(1 - self.spec.beta1 ** (number + 1)).div_(deviation).add_(part.weight, alpha=part.weight_decay)

    def _ratios(self, weights: Mapping[str, GlobalSum], updates: Mapping[str, GlobalSum]) -> dict[str, Tensor]:
        norms = [total.sqrt() for total in self.whole.add_up([*weights.values(), *updates.values()])]
        pairs = zip(weights, norms[: len(weights)], norms[len(weights) :], strict=True)
        return {name: torch.where((weight > 0) & (update > 0), weight / update, 1.0) for name, weight, update in pairs}
