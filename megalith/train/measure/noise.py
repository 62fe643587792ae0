"""Measures squared norms of gradients before they are summed over data ranks, to estimate the gradient noise scale. The measurement costs
one pass over the gradients."""

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate

from megalith.parallel.data import Bucket, Weight, local
from megalith.parallel.gradients import ROW, SharedParameters
from megalith.parallel.groups import Groups
from megalith.spec.noise import Noise, estimate, parts
from megalith.spec.run import RunSpec


class NoiseMeter:
    """Measures gradients of those weights for which each data rank has a complete gradient of its own. Experts, which get tokens of all
    ranks, are excluded, and also weights whose gradients are later summed over tensor ranks or over the pipeline's two ends."""

    def __init__(
        self, weights: dict[str, Weight], buckets: Iterable[Bucket], shared: SharedParameters, groups: Groups, spec: RunSpec
    ) -> None:
        later = {*shared.partial, *shared.tied}
        self.names = frozenset(
            name for name, weight in weights.items() if weight.mesh == groups.state and name not in later and not weight.shared
        )
        self.all = len(self.names) == len(weights)
        self._squares: list[Tensor] = []
        if parts(spec.plan, 2) == 1:
            self.all = True  # it is not needed
            return
        mine = {weights[name] for name in self.names}
        for bucket in buckets:
            counted = [weight in mine and _counts(weight, groups) for weight in bucket.weights]
            if any(counted):
                bucket.observe = partial(self._see, counted)

    def _see(self, counted: Sequence[bool], grads: Sequence[Tensor | None]) -> None:
        for wanted, grad in zip(counted, grads, strict=True):
            if wanted and grad is not None:
                self._squares.append(_square(grad))

    def take(self, device: torch.device) -> Tensor:
        """Return the sum of the gradients' squares since the last call, an fp64 scalar."""
        squares, self._squares = self._squares, []
        return torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=device)


def noise_of(spec: RunSpec, *, small: float, large: float) -> Noise | None:
    """Return a step's noise estimates from the sum of squared gradient norms before the reduction (`small`) and the squared norm after it
    (`large`); None if the plan allows no estimate. `small` is summed over the parts of the batch. The gradient of a part is the gradient of
    its share of the step's loss; multiplied by the number of parts, it is the mean gradient over the part's own sequences."""
    count, batch = parts(spec.plan, spec.microbatches), spec.train.global_batch
    return None if count == 1 else estimate(small=count * small, large=large, part=batch / count, batch=batch)


def _counts(weight: Weight, groups: Groups) -> bool:
    (split,) = weight.master.placements[2:]  # pyright: ignore[reportAttributeAccessIssue]
    return not isinstance(split, Replicate) or groups.coordinates["tensor"] == 0


def _square(grad: Tensor) -> Tensor:
    """Return the sum of a gradient's squares in fp64. The sums of rows are added in fp64; `gradients.norms_of` gives the reason."""
    flat = local(grad).reshape(-1)
    whole, rest = flat.split([flat.numel() // ROW * ROW, flat.numel() % ROW])
    norms = [
        torch.linalg.vector_norm(part.view(shape), dim=1, dtype=torch.float32)
        for part, shape in ((whole, (-1, ROW)), (rest, (1, -1)))
        if part.numel()
    ]
    return torch.cat(norms).double().square().sum() if norms else flat.new_zeros((), dtype=torch.float64)
