"""Deferred weight gradients: backward first computes the gradient for which the previous pipeline stage waits; weight gradients
are computed later, when the rank would otherwise be idle.

Zero-bubble schedules (Qi et al. 2024, arXiv:2401.10241) split a backward into I (gradient of the input) and W (of the weights). A
Function whose weight gradient needs a matrix product passes this product to `weight_gradient`. Inside `deferring` the product is
put into a queue, and W computes it. Unless `Queue.recomputed` is set, weight gradients of a function that backward runs again are
computed in I, because waiting would keep the tensors that recomputation frees.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Queue:
    """The weight gradients of one backward that are not computed yet. `recomputed`: weight gradients of functions that backward
    runs again wait too."""

    recomputed: bool = False
    waiting: list[tuple[Tensor, Callable[[], Tensor]]] = field(default_factory=list)

    def unless(self, recomputed: bool) -> "Queue | None":
        """Return this queue for a function's weight gradients, or None if they are computed at once. `recomputed`: backward runs the
        function again."""
        return None if recomputed and not self.recomputed else self

    def run_all(self) -> None:
        """Compute all gradients, in the order of the backward, and add each to its weight's `.grad`."""
        with torch.no_grad():
            for weight, gradient in self.waiting:
                weight.grad = gradient() if weight.grad is None else weight.grad.add_(gradient())
        self.waiting.clear()


_queue: Queue | None = None  # of the process, not of a thread: on CUDA, torch runs backward on a thread of its own
_recomputed = False


@contextmanager
def deferring(queue: Queue) -> Iterator[None]:
    """Inside this context, backwards put their weight gradients into `queue`."""
    global _queue
    before, _queue = _queue, queue
    try:
        yield
    finally:
        _queue = before


@contextmanager
def recomputing() -> Iterator[None]:
    """Inside this context, graphs are built of functions that run again in backward."""
    global _recomputed
    before, _recomputed = _recomputed, True
    try:
        yield
    finally:
        _recomputed = before


def is_recomputed() -> bool:
    """True inside `recomputing`: a Function's forward asks this for its backward."""
    return _recomputed


def weight_gradient(weight: Tensor, gradient: Callable[[], Tensor], *, recomputed: bool) -> Tensor | None:
    """Return the gradient of `weight` for a Function's backward, or None if it was deferred. `gradient` may be called later,
    without autograd, so it must not use anything that backward frees. The result of `gradient` is added to the `.grad` of the
    leaf `weight`. `recomputed`: the value of `is_recomputed` in the Function's forward.
    """
    queue = None if _queue is None else _queue.unless(recomputed)
    if queue is None or not weight.is_leaf:
        return gradient()
    queue.waiting.append((weight, gradient))
    return None
