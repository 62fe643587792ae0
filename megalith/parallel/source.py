"""Master weights that are not on the device, from which a share is made each time it is gathered."""

from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

Put: TypeAlias = Callable[[Tensor], Callable[[], Tensor]]
"""Moves a tensor off the device, and returns the function that brings it back."""


@dataclass(frozen=True)
class Source:
    """The master weights of one share."""

    pieces: Callable[[], Iterator[tuple[int, Tensor]]]
    """Yields the master weights in order, as pieces: the number of a piece's first element, and the flat piece, which is valid until the
    next one."""
    reader: Executor | None = None
    """Reads the weights while the previous part computes; None: they are read when they are needed."""

    def read(self, into: Tensor) -> None:
        """Write the share, rounded to the format of `into`."""
        flat = into.view(-1) if into.is_contiguous() else into.new_empty(into.numel())
        for first, numbers in self.pieces():
            flat[first : first + numbers.numel()].copy_(numbers)
        if not into.is_contiguous():
            into.copy_(flat.view(into.shape))
