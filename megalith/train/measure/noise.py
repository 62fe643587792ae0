"""Squared norms of gradients before their sum over data ranks, for the gradient noise scale. The norms cost one pass over the
gradients."""

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
    """Measures gradients of the weights for which each data rank has a whole gradient. Left out are experts, which get tokens of all
    ranks, and weights whose gradients tensor ranks or a pipeline's ends add up later."""

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
        """Return the sum of the squares since the last call, an fp64 scalar."""
        squares, self._squares = self._squares, []
        return torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=device)


def noise_of(spec: RunSpec, *, small: float, large: float) -> Noise | None:
    """Return a step's noise estimates from the sum of squared gradient norms before the reduction (`small`) and the squared norm after
    it (`large`); None if the plan allows no estimate. Each part's gradient is of its share of the step's loss. Times the number of
    parts, it is the mean over the part's own sequences."""
    count, batch = parts(spec.plan, spec.microbatches), spec.train.global_batch
    return None if count == 1 else estimate(small=count * small, large=large, part=batch / count, batch=batch)


def _counts(weight: Weight, groups: Groups) -> bool:
    """True on the first of the tensor ranks that hold the same gradient: only that rank counts it."""
    (split,) = weight.master.placements[2:]  # pyright: ignore[reportAttributeAccessIssue]
    return not isinstance(split, Replicate) or groups.coordinates["tensor"] == 0


def _square(grad: Tensor) -> Tensor:
    """Return the sum of a gradient's squares, fp64; rows are added up in fp64 (for the reason, see
    `gradients.sum_of_squares`)."""
    flat = local(grad).reshape(-1)
    whole, rest = flat.split([flat.numel() // ROW * ROW, flat.numel() % ROW])
    norms = [
        torch.linalg.vector_norm(part.view(shape), dim=1, dtype=torch.float32)
        for part, shape in ((whole, (-1, ROW)), (rest, (1, -1)))
        if part.numel()
    ]
    return torch.cat(norms).double().square().sum() if norms else flat.new_zeros((), dtype=torch.float64)
