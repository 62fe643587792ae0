"""AdamW (Loshchilov & Hutter 2019): torch's own kernel on this rank's shares."""

from collections.abc import Sequence

import torch
from torch.optim.adamw import adamw

from megalith.spec.run import OptimizerSpec
from megalith.train.optimizers.rule import Part, alike
from megalith.train.optimizers.whole import Whole


class AdamW:
    """Decoupled weight decay."""

    def __init__(self, spec: OptimizerSpec, whole: Whole) -> None:
        self.spec = spec

    def update(self, parts: Sequence[Part], *, number: int, lr: float) -> None:
        """Update the weights and both moments."""
        for factor, weight_decay, group in alike(parts):
            self._update(group, number=number, lr=lr * factor, decay=weight_decay)

    def _update(self, parts: Sequence[Part], *, number: int, lr: float, decay: float) -> None:
        count = torch.tensor(float(number), device=parts[0].weight.device) if parts else None
        adamw(
            [part.weight for part in parts],
            [part.gradient for part in parts],
            [part.slots["moments.first"] for part in parts],
            [part.slots["moments.second"] for part in parts],
            [],
            [count.clone() for _ in parts] if count is not None else [],
            fused=True,
            amsgrad=False,
            beta1=self.spec.beta1,
            beta2=self.spec.beta2,
            lr=lr,
            weight_decay=decay,
            eps=self.spec.eps,
            maximize=False,
        )
