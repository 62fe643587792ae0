"""What ranks send each other, seen call by call."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NAMES = {
    "c10d::_allgather_base_": "gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::allreduce_": "all_reduce",
    "c10d::send": "send",
    "c10d::recv_": "receive",
}


@dataclass(frozen=True)
class Call:
    """One collective or message; `elements` of its largest tensor, which is the whole one of a gather or reduce-scatter."""

    name: str
    elements: int
    dtype: torch.dtype


@dataclass(eq=False)
class Traffic(TorchDispatchMode):
    """Records the calls of this rank, whoever makes them."""

    calls: list[Call] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if func.namespace == "c10d":
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            largest = max(tensors, key=Tensor.numel)
            self.calls.append(Call(NAMES.get(name, name), largest.numel(), largest.dtype))
        return func(*args, **(kwargs or {}))

    def of(self, name: str, *dtypes: torch.dtype) -> list[Call]:
        """Calls of one name, of floats as weights and gradients are (step totals travel in fp64 and int64)."""
        return [call for call in self.calls if call.name == name and call.dtype in (dtypes or (torch.float32, torch.bfloat16))]
