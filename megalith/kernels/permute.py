"""Permute copies of tokens into another order and back, by gathers along a permutation and its inverse. Scattered additions would
be several times slower and, on a GPU, would add in no fixed order."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Order:
    """A permutation of the `tokens * copies` copies of a batch of tokens, of which the first `rows` are used.

    `order` [tokens * copies]: the copy at each place (copy c of token t is number t * copies + c); `places` [tokens, copies]: the
    place of each copy.
    """

    order: Tensor
    places: Tensor
    rows: int

    @classmethod
    def sorted_by(cls, keys: Tensor, rows: int) -> "Order":
        """Return the order of copies sorted by their keys [tokens, copies]; copies with equal keys stay in the order of tokens."""
        order = keys.flatten().argsort(stable=True)
        places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return cls(order, places.view_as(keys), rows)

    @property
    def copies(self) -> int:
        return self.places.shape[1]


def permute_plain(x: Tensor, order: Order) -> Tensor:
    """The plain definition: x [tokens, dim] -> [rows, dim], the tokens' copies in `order`."""
    return x.repeat_interleave(order.copies, 0)[order.order[: order.rows]]


def unpermute_plain(rows: Tensor, weights: Tensor, order: Order) -> Tensor:
    """The plain definition: rows [rows, dim], weights [tokens, copies] -> [tokens, dim]. Each token is the weighted sum of its
    copies; a copy without a row counts as zero."""
    copies = _padded(rows, order)[order.places]
    return (copies * weights.unsqueeze(-1)).sum(1).to(rows.dtype)


def permute(x: Tensor, order: Order) -> Tensor:
    """Do what `permute_plain` does, with a backward that is a gather too."""
    return _Permute.apply(x, order)  # pyright: ignore[reportReturnType]


def unpermute(rows: Tensor, weights: Tensor, order: Order) -> Tensor:
    """Do what `unpermute_plain` does, one copy at a time, so that no fp32 tensor of all copies exists. Sums are fp32, in the
    order of the copies."""
    return _Unpermute.apply(rows, weights, order)  # pyright: ignore[reportReturnType]


# --- without autograd, for who makes the way back himself ---


def rows_of(x: Tensor, order: Order) -> Tensor:
    """`permute`: x [tokens, dim] -> [rows, dim]."""
    return x.index_select(0, _tokens(order))


def factors_of(weights: Tensor, order: Order) -> Tensor:
    """The weight [rows] of each row, from the weights of the tokens' copies [tokens, copies]."""
    return weights.flatten().index_select(0, order.order[: order.rows])


def by_token(values: Tensor, order: Order) -> Tensor:
    """The inverse of `factors_of`: Bring values [rows] into the form [tokens, copies], with 0 for copies without a row."""
    return _padded(values.unsqueeze(-1), order).squeeze(-1)[order.places]


def sums_of(rows: Tensor, weights: Tensor | None, order: Order) -> Tensor:
    """`unpermute`: rows [rows, dim] -> [tokens, dim]; without weights, each copy has the weight 1."""
    padded = _padded(rows, order)
    total: Tensor | None = None
    for copy, places in enumerate(order.places.unbind(1)):
        part = padded.index_select(0, places)
        if weights is not None:
            part = part * weights[:, copy : copy + 1]  # fp32 by the weights' type
        elif order.copies > 1:
            part = part.float()
        total = part if total is None else total.add_(part)
    assert total is not None, order
    return total.to(rows.dtype)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, order: Order) -> Tensor:
        ctx.save_for_backward(order.order, order.places)  # by autograd, so that recomputation may drop them
        ctx.rows = order.rows
        return rows_of(x, order)

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        numbers, places = ctx.saved_tensors
        return sums_of(grad, None, Order(numbers, places, ctx.rows)), None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, weights: Tensor, order: Order) -> Tensor:
        ctx.save_for_backward(rows, weights, order.order, order.places)
        ctx.rows = order.rows
        return sums_of(rows, weights, order)

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        rows, weights, numbers, places = ctx.saved_tensors
        order = Order(numbers, places, ctx.rows)
        of_rows = of_weights = None
        if ctx.needs_input_grad[0]:
            of_rows = (rows_of(grad, order) * factors_of(weights, order).unsqueeze(-1)).to(rows.dtype)
        if ctx.needs_input_grad[1]:
            padded = _padded(rows, order)
            dots = [(padded.index_select(0, places) * grad).sum(-1, dtype=torch.float32) for places in order.places.unbind(1)]
            of_weights = torch.stack(dots, 1).to(weights.dtype)
        return of_rows, of_weights, None


def _tokens(order: Order) -> Tensor:
    return order.order[: order.rows] // order.copies


def _padded(rows: Tensor, order: Order) -> Tensor:
    missing = order.order.shape[0] - order.rows
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows
