"""Muon (Jordan 2024; Liu et al. 2025, arXiv:2502.16982): each matrix is updated by the orthogonal polar factor of its momentum."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megalith.kernels.numbers import DTYPE
from megalith.spec.run import OptimizerSpec
from megalith.spec.treatment import Runs, true_matrices
from megalith.train.optimizers.global_tensors import GlobalTensors
from megalith.train.optimizers.homes import MatrixExchange, homes_of
from megalith.train.optimizers.orthogonal import orthogonal, steps_of
from megalith.train.optimizers.rule import Part, opened

ROOT_MEAN_SQUARE = 0.2
"""The update of a matrix [m, n] is its orthogonal factor times 0.2 sqrt(max(m, n)), which has a root mean square of about 0.2, like
AdamW's (Liu et al. 2025, section 2.2). So AdamW's learning rate and weight decay can be reused for Muon."""


class Muon:
    """m <- momentum m + (1 - momentum) g; w <- (1 - lr decay) w - lr 0.2 sqrt(max(rows, columns)) U V^T, where U V^T is the orthogonal
    factor of m, or of Nesterov's look-ahead.

    The home rank of each matrix orthogonalises the whole matrix, so the result has the same bits under every plan.
    """

    def __init__(self, spec: OptimizerSpec, whole: GlobalTensors) -> None:
        self.spec, self.whole = spec, whole
        self.steps, self.dtype = steps_of(spec.coefficients, spec.iterations), DTYPE[spec.iteration]
        self._exchange: MatrixExchange | None = None

    def update(self, parts: Sequence[Part], *, number: int, lr: float) -> Callable[[], None]:
        """Update the moments, and start to send update directions to the homes of their matrices. Return a function that waits for these
        messages and updates the weights."""
        exchange = self._exchange = self._exchange or MatrixExchange(
            self.whole, homes_of(self.whole, [part.name for part in parts])
        )
        arrive = exchange.gather({part.name: self._direction(part) for part in opened(parts)})

        def finish() -> None:
            matrices = arrive()
            for item in list(matrices):
                matrices[item] = self._orthogonal(matrices[item], self._matrices(item.name))
            shares = {part.name: torch.empty_like(part.gradient, dtype=self.dtype) for part in parts}
            exchange.scatter(matrices, shares)
            for part in opened(parts, weights_alone=True):
                self._step(part, shares[part.name], lr * part.lr)

        return finish

    def _direction(self, part: Part) -> Tensor:
        moment, momentum = part.slots["moments.first"], self.spec.momentum
        moment.lerp_(part.gradient, 1 - momentum)
        direction = part.gradient.lerp(moment, momentum) if self.spec.nesterov else moment
        return direction.to(self.dtype, copy=direction is moment)  # a part that is `opened` lends this memory until it is closed

    def _matrices(self, name: str) -> tuple[Runs, ...]:
        return true_matrices(self.whole.described[name], split_heads=self.spec.split_heads)

    def _orthogonal(self, matrix: Tensor, matrices: tuple[Runs, ...]) -> Tensor:
        """Orthogonalise each of the `matrices` that a tensor consists of. Each matrix is copied to memory of its own, because alignment may
        change the bits of the result."""
        if len(matrices) == 1:
            return orthogonal(matrix, self.steps)
        for runs in matrices:
            found = orthogonal(torch.cat([matrix[first : first + size] for first, size in runs]), self.steps)
            for (first, size), rows in zip(runs, found.split([size for _, size in runs]), strict=True):
                matrix[first : first + size] = rows
        return matrix

    def _step(self, part: Part, direction: Tensor, lr: float) -> None:
        part.weight.mul_(1 - lr * part.weight_decay)
        cut, matrices = self.whole.cuts[part.name], self._matrices(part.name)
        columns = cut.shape[-1]
        scales = [ROOT_MEAN_SQUARE * math.sqrt(max(sum(size for _, size in runs), columns)) for runs in matrices]
        if len(set(scales)) == 1:
            part.weight.add_(direction, alpha=-(lr * scales[0]))
            return
        rows = torch.empty(cut.shape[-2], device=part.weight.device)
        for runs, scale in zip(matrices, scales, strict=True):
            for first, size in runs:
                rows[first : first + size] = -(lr * scale)
        part.weight.addcmul_(direction.to(part.weight.dtype), rows.narrow(0, cut.offset[-2], cut.sizes[-2])[:, None])
