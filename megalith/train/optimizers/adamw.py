"""AdamW (Loshchilov & Hutter 2019): torch's own kernel on this rank's shares."""

from collections.abc import Sequence

import torch
from torch.optim.adamw import adamw

from megalith.spec.run import OptimizerSpec
from megalith.train.optimizers.global_tensors import GlobalTensors
from megalith.train.optimizers.rule import Part, alike, together


class AdamW:
    """AdamW with decoupled weight decay."""

    def __init__(self, spec: OptimizerSpec, whole: GlobalTensors) -> None:
        self.spec = spec

    def update(self, parts: Sequence[Part], *, number: int, lr: float) -> None:
        """Update the weights and both moments."""
        for group in alike(parts):
            for some in together(group):
                self._update(some, number=number, lr=lr)

    def _update(self, parts: Sequence[Part], *, number: int, lr: float) -> None:
        count = torch.tensor(float(number), device=parts[0].weight.device)
        adamw(
            [part.weight for part in parts],
            [part.gradient for part in parts],
            [part.slots["moments.first"] for part in parts],
            [part.slots["moments.second"] for part in parts],
            [],
            [count.clone() for _ in parts],
            fused=True,
            amsgrad=False,
            beta1=self.spec.beta1,
            beta2=self.spec.beta2,
            lr=lr * parts[0].lr,
            weight_decay=parts[0].weight_decay,
            eps=self.spec.eps * parts[0].eps,
            maximize=False,
        )
