"""Records the allocations of a computation, operation by operation."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Largest(TorchDispatchMode):
    """Records the largest number of elements in any operation's result, by dtype, and the shapes of all results. Backward is
    included."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: dict[torch.dtype, int] = {}
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.elements[tensor.dtype] = max(self.elements.get(tensor.dtype, 0), tensor.numel())
                self.shapes.add(tuple(tensor.shape))
        return out

    @property
    def most(self) -> int:
        """Return the number of elements of the largest tensor of any dtype."""
        return max(self.elements.values())
