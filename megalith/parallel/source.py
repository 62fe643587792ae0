"""Master weights outside the device, from which each gather computes the rank's share of the compute weights."""

from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

Put: TypeAlias = Callable[[Tensor], Callable[[], Tensor]]
"""Moves a tensor off the device, and returns the function that moves it back."""


@dataclass(frozen=True)
class Source:
    """The master weights of one share of a parameter."""

    pieces: Callable[[int, int], Iterator[tuple[int, Tensor]]]
    """Function of the index of a first element and a number of elements. It yields these master weights in flat pieces, in order, each with
    the index of its first element. A piece is valid until the next one is requested."""
    reader: Executor | None = None
    """The thread that reads the weights while the previous part computes; None: the weights are read when they are needed."""

    def read(self, into: Tensor, start: int = 0) -> None:
        """Write the share, rounded to the format of `into`: as many elements as `into` has, from element `start` on."""
        flat = into.view(-1) if into.is_contiguous() else into.new_empty(into.numel())
        for first, numbers in self.pieces(start, into.numel()):
            flat[first - start : first - start + numbers.numel()].copy_(numbers)
        if not into.is_contiguous():
            into.copy_(flat.view(into.shape))
