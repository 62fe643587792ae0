"""Adafactor (Shazeer & Stern 2018, arXiv:1804.04235): a matrix's second moments are approximated by the product of row and column
moments."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megalith.spec.run import OptimizerSpec
from megalith.train.optimizers.global_tensors import GlobalSum, GlobalTensors, squares
from megalith.train.optimizers.rule import Part, opened

DECAY = 0.8
"""In update t (counted from 1), second moments are multiplied by 1 - t^-DECAY (section 7.2)."""
MIN_SQUARE = 1e-30
"""Added to squares of gradients: epsilon 1 of Algorithms 4 and 5."""
MIN_SIZE = 1e-3
"""Lower bound of a matrix's root mean square in relative steps: epsilon 2."""
MAXIMUM = 1.0
"""The root mean square of a matrix's update is clipped to this: d of Algorithm 4."""


class _Seen(NamedTuple):
    """Statistics of a parameter's matrices, over all ranks, for this rank's share."""

    rows: Tensor
    """The mean of the squared gradient for each row of the share."""
    columns: Tensor
    """The mean of the squared gradient for each column of the share."""
    mean: Tensor
    """The mean of the updated row moments for each matrix."""
    size: Tensor | None
    """The root mean square of the weights of each matrix, for `relative_step`."""


class Adafactor:
    """Adafactor without a first moment (Algorithms 4 and 5): second moments are factored, and updates are clipped by their root mean
    square.

    Each expert is a matrix of its own. The run's schedule gives the learning rate. `relative_step` bounds the rate by 1 / sqrt(update) and
    multiplies it by the root mean square of each matrix (Algorithm 5, line 5). Weight decay is decoupled.
    """

    def __init__(self, spec: OptimizerSpec, whole: GlobalTensors) -> None:
        self.spec, self.whole = spec, whole

    def update(self, parts: Sequence[Part], *, number: int, lr: float) -> None:
        """Update the weights and the moments of rows and columns.

        Update directions are computed twice, once for their norms and once for the update, so that only one direction is in memory at a
        time.
        """
        fresh = float(number + 1) ** -DECAY
        seen = self._seen(parts, fresh)
        found = list[GlobalSum]()
        for part in opened(parts):
            _remember(part, seen[part.name], fresh)
            found.append(squares(part.name, _direction(part, seen[part.name]), self.whole.cuts[part.name]))
        sizes = self.whole.add_up(found)
        for part, squared in zip(opened(parts), sizes, strict=True):
            rate, size = lr * part.lr, seen[part.name].size
            part.weight.mul_(1 - rate * part.weight_decay)
            factor = 1 / ((squared / self._numel(part)).sqrt() / MAXIMUM).clamp(min=1.0)
            if size is not None:
                rate, factor = min(rate, (number + 1) ** -0.5), factor * size.clamp(min=MIN_SIZE)
            direction = _direction(part, seen[part.name])
            factor = factor.to(direction.dtype)
            part.weight.add_(direction.mul_(factor[..., None, None] if direction.dim() >= 2 else factor), alpha=-rate)

    def _seen(self, parts: Sequence[Part], fresh: float) -> dict[str, _Seen]:
        sums = [each for part in opened(parts) for each in self._partial(part)]
        totals = iter(self.whole.add_up(sums))
        found = {}
        for part in parts:
            shape = self.whole.cuts[part.name].shape
            size = (next(totals) / self._numel(part)).sqrt() if self.spec.relative_step else None
            if part.weight.dim() < 2:
                nothing = torch.empty(0)
                found[part.name] = _Seen(nothing, nothing, nothing, size)
                continue
            rows, columns, all_squares, before = (next(totals) for _ in range(4))
            mean = ((1 - fresh) * before + fresh * all_squares / shape[-1]) / shape[-2]
            found[part.name] = _Seen(rows / shape[-1], columns / shape[-2], mean, size)
        return found

    def _partial(self, part: Part) -> list[GlobalSum]:
        """Return this rank's terms of the sums over a parameter, in the order in which `_seen` reads the sums."""
        cut = self.whole.cuts[part.name]
        found = [squares(part.name, part.weight, cut)] if self.spec.relative_step else []
        if part.weight.dim() < 2:
            return found
        square = part.gradient.double().square_().add_(MIN_SQUARE)
        rows, columns = square.sum(-1), square.sum(-2)
        lead, offset = cut.shape[:-2], cut.offset[:-2]
        before = part.slots["moments.row"].double().sum(-1)
        return [
            *found,
            GlobalSum(part.name, rows, (*lead, cut.shape[-2]), (*offset, cut.offset[-2]), cut.counted),
            GlobalSum(part.name, columns, (*lead, cut.shape[-1]), (*offset, cut.offset[-1]), cut.counted),
            GlobalSum(part.name, rows.sum(-1), lead, offset, cut.counted),
            GlobalSum(part.name, before, lead, offset, cut.counted and cut.first_column),
        ]

    def _numel(self, part: Part) -> int:
        return torch.Size(self.whole.cuts[part.name].shape[-2:]).numel()


def _remember(part: Part, seen: _Seen, fresh: float) -> None:
    row, column = part.slots["moments.row"], part.slots["moments.column"]
    if part.weight.dim() < 2:  # not factored: the row is the whole second moment
        row.mul_(1 - fresh).add_(part.gradient.square().add_(MIN_SQUARE), alpha=fresh)
        return
    row.mul_(1 - fresh).add_(seen.rows.to(row.dtype), alpha=fresh)
    column.mul_(1 - fresh).add_(seen.columns.to(column.dtype), alpha=fresh)


def _direction(part: Part, seen: _Seen) -> Tensor:
    row, column = part.slots["moments.row"], part.slots["moments.column"]
    if part.weight.dim() < 2:
        return part.gradient * row.rsqrt()
    share = row / seen.mean.to(row.dtype)[..., None]
    return part.gradient * share.rsqrt_()[..., :, None] * column.rsqrt()[..., None, :]
