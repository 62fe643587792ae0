"""Graphs of parts or of pieces of parts, and computations that pause during communication.

A graph holds what autograd saved for it. It holds neither its inputs nor its outputs for their own sake, as leaves and roots would: of
many microbatches in flight, these would be much of the memory.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megalith.kernels.deferred import Queue, deferring
from megalith.models.moe import Pending

T = TypeVar("T")
Steps: TypeAlias = Generator[Pending, Tensor, T]
"""A computation in steps: it yields rows in flight, and resumes with the received rows."""


def finish(steps: Steps[T]) -> T:
    """Run all steps, waiting wherever they wait."""
    try:
        pending = next(steps)
        while True:
            pending = steps.send(pending.wait())
    except StopIteration as end:
        return end.value


class Graph(Protocol):
    """The autograd graph that one part's forward left for its backward."""

    @property
    def differentiable(self) -> bool:
        """True if its input has a gradient; tokens have none."""
        ...

    def backward(self, grad: Tensor | None, queue: Queue | None) -> Steps[Tensor | None]:
        """The gradient of the input. Weight gradients are accumulated; with a `queue`, only those that cannot be deferred."""
        ...


class Inlet:
    """Entry of a tensor into a graph, and exit of its gradient."""

    def __init__(self) -> None:
        self._grad: Tensor | None = None

    def enter(self, x: Tensor) -> Tensor:
        """x, as the graph's own."""
        anchor = torch.empty(0, requires_grad=True)  # what makes autograd follow; x itself is no leaf of the graph
        return _Enter.apply(anchor, x.detach(), self)  # pyright: ignore[reportReturnType]

    def give(self, grad: Tensor) -> None:
        """Called by the graph's backward."""
        self._grad = grad

    def take(self) -> Tensor | None:
        """Return the gradient, if there is one, without keeping it."""
        grad, self._grad = self._grad, None
        return grad


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, inlet: Inlet) -> Tensor:
        ctx.inlet = inlet
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.inlet.give(grad)
        return None, None, None


@dataclass(frozen=True)
class Piece:
    """Part of a forward, as a graph of its own."""

    inlets: tuple[Inlet, ...]
    outs: tuple[GradientEdge, ...]

    @property
    def differentiable(self) -> bool:
        return bool(self.inlets)

    def gradients(self, grads: Sequence[Tensor | None], queue: Queue | None) -> list[Tensor | None]:
        """Return the gradients of the inputs from those of the outputs. None: the output was not used; for a single scalar
        output, its gradient is 1."""
        asked = [(out, grad) for out, grad in zip(self.outs, grads, strict=True) if grad is not None or len(grads) == 1]
        with deferring(queue) if queue is not None else nullcontext():
            torch.autograd.backward([out for out, _ in asked], [grad for _, grad in asked])
        return [inlet.take() for inlet in self.inlets]

    def backward(self, grad: Tensor | None, queue: Queue | None) -> Steps[Tensor | None]:
        """Run the backward of a piece that is a whole part: see `Graph`."""
        found = self.gradients([grad], queue)
        yield from ()
        return found[0] if found else None


def record(lines: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> tuple[tuple[Tensor, ...], Piece]:
    """Run the function `lines` on inputs (floating-point ones have gradients), and return the detached outputs and the graph."""
    inlets = [Inlet() if x.is_floating_point() else None for x in inputs]
    outs = lines(*(x if inlet is None else inlet.enter(x) for x, inlet in zip(inputs, inlets, strict=True)))
    entered = tuple(inlet for inlet in inlets if inlet is not None)
    return tuple(out.detach() for out in outs), Piece(entered, tuple(get_gradient_edge(out) for out in outs))


class Replay:
    """A function whose graph is built in forward, or, with `again` (recomputation), rebuilt from its inputs shortly before
    backward."""

    def __init__(self, lines: Callable[..., tuple[Tensor, ...]], *, again: bool) -> None:
        self.lines, self.again = lines, again
        self._piece: Piece | None = None
        self._inputs: tuple[Tensor, ...] = ()

    def run(self, *inputs: Tensor, keep: bool = True) -> tuple[Tensor, ...]:
        """Run the forward. Without `keep`, `rerun` must be given the inputs again."""
        if not self.again:
            return self._make(inputs)
        self._inputs = inputs if keep else ()
        with torch.no_grad():
            return self.lines(*inputs)

    def rerun(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run the forward again, with its graph."""
        inputs, self._inputs = inputs or self._inputs, ()
        return self._make(inputs)

    def _make(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        outs, self._piece = record(self.lines, *inputs)
        return outs

    def gradients(self, grads: Sequence[Tensor | None], queue: Queue | None) -> list[Tensor | None]:
        """Return the gradients of the inputs: see the method of a piece."""
        assert self._piece is not None
        return self._piece.gradients(grads, queue)
