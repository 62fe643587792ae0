"""Sends activations between tensor ranks in pieces, so that one piece is in flight while another is multiplied (Wang et al. 2023, "Overlap
communication with dependent computation via decomposition", ASPLOS).

The activations at the boundary of a split module are exchanged in pieces, during the module's first and last products. During the first
products, pieces of the sequence are gathered, and each piece is multiplied when it arrives, while later pieces are in flight. During the
last product, each piece is reduced as soon as it is computed. Backward does the reverse, and computes the weight gradient while the last
piece of the input's gradient is in flight. The same number of bytes is sent, in more calls.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalith.kernels.deferred import is_recomputed
from megalith.kernels.multiply import Multiply
from megalith.models.linear import Linear


@dataclass(frozen=True)
class PendingPiece:
    """A piece in flight."""

    piece: Tensor
    sent: Tensor  # must live until it has left
    work: Any

    def wait(self) -> Tensor:
        """Wait until the piece has arrived, and return it."""
        self.work.wait()
        return self.piece


@dataclass(frozen=True)
class Pieces:
    """Exchanges activations among the ranks of `group`, in `count` pieces. With `sequence`, each rank has only a share of the sequence
    outside split modules; without it, every rank has the whole sequence there."""

    group: dist.ProcessGroup
    sequence: bool
    count: int

    @property
    def shares(self) -> int:
        return self.group.size() if self.sequence else 1

    def slices(self, length: int) -> list[slice]:
        """Cut a share of `length` tokens into pieces that are as equal as possible and not empty."""
        ends = [length * number // self.count for number in range(self.count + 1)]
        return [slice(start, end) for start, end in pairwise(ends) if end > start]

    def of(self, whole: Tensor) -> Tensor:
        """View [batch, seq, ...] as [shares, batch, length, ...]."""
        return whole.unflatten(1, (self.shares, -1)).movedim(1, 0)

    def gather(self, share: Tensor) -> PendingPiece:
        """Gather the shares of all ranks: [batch, length, ...] -> [shares, batch, length, ...]."""
        share = share.contiguous()
        out = share.new_empty(self.shares, *share.shape)
        work = dist.all_gather_into_tensor(out.flatten(0, 1), share, group=self.group, async_op=True)
        return PendingPiece(out, share, work)

    def add_up(self, part: Tensor) -> PendingPiece:
        """Reduce partial sums [shares, batch, length, ...] to this rank's share [batch, length, ...] of the total."""
        part = part.contiguous()
        if not self.sequence:
            return PendingPiece(part[0], part, dist.all_reduce(part, group=self.group, async_op=True))
        out = part.new_empty(part.shape[1:])
        return PendingPiece(out, part, dist.reduce_scatter_tensor(out, part.flatten(0, 1), group=self.group, async_op=True))

    def gathered(self, x: Tensor, use: Callable[[slice, Tensor], None]) -> Tensor:
        """Gather x [batch, length, ...] to [batch, seq, ...], in pieces; call `use` with each piece [shares, batch, piece's length, ...]
        when it arrives."""
        if not self.sequence:
            use(slice(0, x.shape[1]), x[None])
            return x
        whole = x.new_empty(x.shape[0], self.shares * x.shape[1], *x.shape[2:])
        moving = [(where, self.gather(x[:, where])) for where in self.slices(x.shape[1])]
        for where, pending in moving:
            piece = pending.wait()
            self.of(whole)[:, :, where] = piece
            use(where, piece)
        return whole

    def added_up(self, length: int, make: Callable[[slice], Tensor], meanwhile: Callable[[], None] = lambda: None) -> Tensor:
        """Reduce partial sums that `make` computes piece by piece, and return this rank's share [batch, length, ...] of the total. Each
        piece is reduced while `make` computes the next piece; `meanwhile` runs while the last piece is being reduced."""
        moving = [self.add_up(make(where)) for where in self.slices(length)]
        meanwhile()
        return torch.cat([pending.wait() for pending in moving], dim=1)


class _Enter(torch.autograd.Function):
    """Gathers x [batch, length, in]; returns the whole sequence's products [batch, seq, out] with each of several weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pieces: Pieces, recipes: Sequence[Multiply], *factors: Tensor | None) -> tuple[Tensor, ...]:
        weights, biases = factors[::2], factors[1::2]
        seq = pieces.shares * x.shape[1]
        outs = tuple(x.new_empty(x.shape[0], seq, weight.shape[0]) for weight in weights if weight is not None)

        def multiply(where: slice, piece: Tensor) -> None:
            for out, recipe, weight, bias in zip(outs, recipes, weights, biases, strict=True):
                assert weight is not None
                pieces.of(out)[:, :, where] = recipe.fprop(piece, weight, bias)

        ctx.save_for_backward(pieces.gathered(x, multiply))
        ctx.weights, ctx.biased = weights, [bias is not None for bias in biases]
        ctx.recipes, ctx.pieces, ctx.recomputed = recipes, pieces, is_recomputed()
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (whole,), weights, recipes, pieces = ctx.saved_tensors, ctx.weights, ctx.recipes, ctx.pieces
        found: list[Tensor | None] = []

        def multiply(where: slice) -> Tensor:
            terms = zip(recipes, grads, weights, strict=True)
            parts = (recipe.dgrad(pieces.of(grad)[:, :, where], weight) for recipe, grad, weight in terms)
            total = next(parts)
            for part in parts:
                total.add_(part)
            return total

        def of_weights() -> None:
            wanted = ctx.needs_input_grad[3::2]
            for recipe, grad, weight, biased, wants in zip(recipes, grads, weights, ctx.biased, wanted, strict=True):
                rows = grad.flatten(0, -2)
                found.append(recipe.gradient_of(weight, rows, whole, recomputed=ctx.recomputed) if wants else None)
                found.append(rows.sum(0) if biased else None)

        if not ctx.needs_input_grad[0]:
            of_weights()
            return None, None, None, *found
        of_x = pieces.added_up(whole.shape[1] // pieces.shares, multiply, of_weights)
        return of_x, None, None, *found


class _Leave(torch.autograd.Function):
    """Multiplies x [batch, seq, in] by this rank's part of a weight; returns this rank's share [batch, length, out] of the sum over the
    ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, pieces: Pieces, recipe: Multiply) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.pieces, ctx.recipe, ctx.recomputed = weight, pieces, recipe, is_recomputed()
        return pieces.added_up(x.shape[1] // pieces.shares, lambda where: recipe.fprop(pieces.of(x)[:, :, where], weight))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,), weight, pieces, recipe = ctx.saved_tensors, ctx.weight, ctx.pieces, ctx.recipe
        of_x = torch.empty_like(x, memory_format=torch.contiguous_format)

        def multiply(where: slice, piece: Tensor) -> None:
            pieces.of(of_x)[:, :, where] = recipe.dgrad(piece, weight)

        whole = pieces.gathered(grad, multiply)
        of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = recipe.gradient_of(weight, whole.flatten(0, -2), x, recomputed=ctx.recomputed)
        return of_x, of_weight, None, None


class _Given(nn.Module):
    def __init__(self, recipe: Multiply, made: dict[int, Tensor], number: int) -> None:
        super().__init__()
        self.recipe, self.made, self.number = recipe, made, number

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.made.pop(self.number)


class _InPieces(nn.Module):
    def __init__(self, recipe: Multiply, pieces: Pieces) -> None:
        super().__init__()
        self.recipe, self.pieces = recipe, pieces

    @property
    def activated(self) -> Callable[..., Tensor]:
        return self.recipe.activated

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        assert bias is None, "a bias must be added once, to the sum over the ranks, and not to each rank's partial sum"
        return _Leave.apply(x, weight, self.pieces, self.recipe)  # pyright: ignore[reportReturnType]


class OverlappedForward:
    """The forward of a split module in which the exchanges at the module's boundary overlap its first and last products.

    The module's own code does not change. The outputs of the module's first layers are computed before the module's own code runs, and
    the last layer returns this rank's share of the sum over the ranks.
    """

    def __init__(
        self, module: nn.Module, pieces: Pieces, *, first: Sequence[Linear], last: Linear, after: Callable[[Tensor], Tensor]
    ) -> None:
        """`first`: the layers that read the module's input; `last`: the layer that computes its output; `after`: a function that is applied
        to the module's summed output."""
        self._lines, self._pieces, self._first, self._after = module.forward, pieces, first, after
        self._recipes = [_recipe(layer) for layer in first]
        self._made: dict[int, Tensor] = {}
        for number, (layer, recipe) in enumerate(zip(first, self._recipes, strict=True)):
            layer.multiply = _Given(recipe, self._made, number)
        last.multiply = _InPieces(_recipe(last), pieces)

    def __call__(self, x: Tensor, *args: Any) -> Tensor:
        factors = [factor for layer in self._first for factor in layer.factors()]
        outs: Any = _Enter.apply(x, self._pieces, self._recipes, *factors)
        self._made.update(enumerate(outs))
        return self._after(self._lines(x, *args))


def _recipe(layer: Linear) -> Multiply:
    assert isinstance(layer.multiply, Multiply), f"the products of {layer} are already computed in pieces"
    return layer.multiply
