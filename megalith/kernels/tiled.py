"""The embedding and the loss on a table [vocab, dim] that is cut into tiles of rows, so that table, gradient and logits need not be whole
in memory.

The loss has the same value and gradients as `kernels.cross_entropy`, but adds them up in another order: over tiles, and each tile over
chunks of tokens. Forward reads all tiles once for each token's sum of exponentials, and backward reads them again for the gradients. So the
products with the vocabulary are four instead of three. A look-up adds up nothing over tiles, and gives the same bits as one in a whole
table.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megalith.kernels.chunks import chunk_rows, tiles_of
from megalith.kernels.cross_entropy import IGNORE, Loss, Terms, gradient_of_products, logits_of


class Table(Protocol):
    """A table whose rows are read, and whose gradient is handed over, tile by tile."""

    gradient: Tensor | None
    """The gradient that backward returns for the whole table; None if the tiles' gradients went elsewhere."""

    @property
    def tiles(self) -> Sequence[range]:
        """The rows of each tile, in order."""
        ...

    def read(self) -> Iterator[Tensor]:
        """Yield the weights of each tile, in order. They are valid until the next tile is requested."""
        ...

    def give(self, rows: range, gradient: Tensor) -> None:
        """Take the gradient of one tile."""
        ...


class ResidentTable:
    """A table that is in memory as a whole."""

    def __init__(self, weight: Tensor, rows: int) -> None:
        self.weight, self.tiles = weight.detach(), tiles_of(weight.shape[0], rows)
        self.gradient: Tensor | None = None

    def read(self) -> Iterator[Tensor]:
        return (self.weight[rows.start : rows.stop] for rows in self.tiles)

    def give(self, rows: range, gradient: Tensor) -> None:
        if self.gradient is None:
            self.gradient = torch.empty_like(self.weight)
        self.gradient[rows.start : rows.stop] = gradient


def look_up(tokens: Tensor, weight: Tensor, table: Table) -> Tensor:
    """Return the rows of the table for these tokens; zeros for tokens outside the table. `weight`: the parameter whose rows the table
    has."""
    return _Looked.apply(weight, tokens, table)  # pyright: ignore[reportReturnType]


class _Looked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight: Tensor, tokens: Tensor, table: Table) -> Tensor:
        ctx.table = table
        ctx.save_for_backward(tokens)
        out = weight.new_zeros(*tokens.shape, weight.shape[1])
        for rows, tile in zip(table.tiles, table.read(), strict=True):
            at, mine = _place(tokens, rows)
            out = torch.where(mine.unsqueeze(-1), F.embedding(at, tile), out)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        (tokens,), table = ctx.saved_tensors, ctx.table
        grad = grad.contiguous()
        for rows in table.tiles:
            at, mine = _place(tokens, rows)
            at, outside = torch.where(mine, at, len(rows)), len(rows)  # one more row, to which nothing is added
            found = torch.ops.aten.embedding_dense_backward(grad, at, outside + 1, outside, False)
            table.give(rows, found[:outside])
        return _handed_over(table), None, None


def _handed_over(table: Table) -> Tensor | None:
    """Return the table's whole gradient, and drop it in the table: autograd copies a gradient that something else still holds."""
    gradient, table.gradient = table.gradient, None
    return gradient


def _place(tokens: Tensor, rows: range) -> tuple[Tensor, Tensor]:
    """Return the index of each token within these rows, and True for the tokens that are among them; other tokens have a wrong index."""
    here = tokens - rows.start
    return here.clamp(0, len(rows) - 1), (here >= 0) & (here < len(rows))


def tiled_cross_entropy(hidden: Tensor, weight: Tensor, table: Table, targets: Tensor, terms: Terms) -> Loss:
    """Compute `cross_entropy_plain` with `table` in place of its whole weight. `weight`: the parameter whose rows the table has; its values
    are not read. `terms`: without `of_token`, which needs whole rows of logits."""
    objective, nll = _Tiled.apply(hidden, weight, targets, terms, table)  # pyright: ignore[reportGeneralTypeIssues]
    return Loss(objective, nll)


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, terms: Terms, table: Table):
        total, hit = hidden.new_zeros(2, hidden.shape[0], dtype=torch.float32)
        top, local = torch.full_like(total, -torch.inf), targets - terms.offset
        for rows, tile in zip(table.tiles, table.read(), strict=True):
            at, mine = _place(local, rows)
            for part in _chunks(hidden, table, terms):
                logits, _ = logits_of(hidden[part], tile, terms, wants_slope=False)
                highest = torch.maximum(top[part], logits.amax(-1))
                hit[part] += logits.gather(-1, at[part].unsqueeze(-1)).squeeze(-1) * mine[part]
                sums = logits.sub_(highest.unsqueeze(-1)).exp_().sum(-1)
                total[part] = total[part] * (top[part] - highest).exp() + sums
                top[part] = highest
        if terms.reduce is not None:
            highest = terms.reduce(top.clone(), "max")
            total, hit = terms.reduce(torch.stack((total * (top - highest).exp(), hit)), "sum").unbind()
            top = highest
        logsumexp, valid = top + total.log(), (targets != IGNORE).float()
        nll = ((logsumexp - hit) * valid).sum() * terms.scale
        objective = nll + (logsumexp.square() * valid).sum() * (terms.scale * terms.z_loss)
        ctx.terms, ctx.table = terms, table
        ctx.save_for_backward(hidden, targets, logsumexp)
        ctx.mark_non_differentiable(nll)
        return objective, nll

    @staticmethod
    def backward(ctx, grad_objective: Tensor, _grad_nll: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        (hidden, targets, logsumexp), terms, table = ctx.saved_tensors, ctx.terms, ctx.table
        local, scale = targets - terms.offset, terms.scale * terms.gradient_scale
        each = (targets != IGNORE).float() * scale
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        for rows, tile in zip(table.tiles, table.read(), strict=True):
            at, mine = _place(local, rows)
            of_tile = torch.zeros_like(tile, dtype=torch.float32)
            for part in _chunks(hidden, table, terms):
                logits, slope = logits_of(hidden[part], tile, terms, wants_slope=True)
                grad = logits.sub_(logsumexp[part].unsqueeze(-1)).exp_()
                grad *= (each[part] * (1 + 2 * terms.z_loss * logsumexp[part])).unsqueeze(-1)
                grad.scatter_add_(-1, at[part].unsqueeze(-1), (-each[part] * mine[part]).unsqueeze(-1))
                grad = gradient_of_products(grad, slope, terms).to(hidden.dtype)
                grad_hidden[part] += terms.multiply.dgrad(grad, tile)
                of_tile += terms.multiply.wgrad(grad, hidden[part])
                del logits, slope, grad
            table.give(rows, of_tile.to(tile.dtype) * grad_objective.to(tile.dtype))
            del of_tile
        return grad_hidden.to(hidden.dtype) * grad_objective.to(hidden.dtype), _handed_over(table), None, None, None


def _chunks(hidden: Tensor, table: Table, terms: Terms) -> Iterator[slice]:
    """Yield the tokens whose logits for one tile are in memory at once."""
    rows = chunk_rows(len(table.tiles[0]), capped=terms.softcap is not None)
    return (slice(start, start + rows) for start in range(0, hidden.shape[0], rows))
