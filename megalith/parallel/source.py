"""Master weights that are not on the device, from which a share is made each time it is gathered."""

from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

Put: TypeAlias = Callable[[Tensor], Callable[[], Tensor]]
"""Takes a tensor elsewhere, and returns the function that brings it back."""


@dataclass(frozen=True)
class Source:
    """The master weights of one share."""

    pieces: Callable[[], Iterator[tuple[int, Tensor]]]
    """Yields them from the share's first number on: the number that a piece begins with, and the piece, flat and valid until the next."""
    reader: Executor | None = None
    """Reads while the part before computes; None: they are read when they are asked for."""

    def read(self, into: Tensor) -> None:
        """Write the share, rounded to the format of `into`."""
        flat = into.view(-1) if into.is_contiguous() else into.new_empty(into.numel())
        for first, numbers in self.pieces():
            flat[first : first + numbers.numel()].copy_(numbers)
        if not into.is_contiguous():
            into.copy_(flat.view(into.shape))
