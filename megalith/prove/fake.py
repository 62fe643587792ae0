"""One rank of a world without the other ranks: tensors without data, process groups that send nothing, and fixed values wherever
the code reads data.

Tensors are torch's fake tensors, which know shapes, types and storages; groups are torch's fake process groups, which finish at once.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

ANSWER = 4.0
"""Value of every number that is read from a fake tensor. The value is finite, as a loss must be, and above the usual limit of a
gradient norm, so that the step includes clipping."""


@contextmanager
def groups_of(world: int, *, rank: int) -> Iterator[None]:
    """Inside this context, this process is rank `rank` of `world`, and collectives finish at once without sending anything.

    Raises RuntimeError if this process is already a rank of a process group.
    """
    if dist.is_initialized():
        raise RuntimeError("this process is already a rank of a process group; run the fake world in another process")
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


class Fakes(FakeTensorMode):
    """A mode in which tensors have no data. Modules on the meta device do not change, because torch cannot move a fake module's
    parameters to another device. Every value that the code reads from a tensor is the same constant. The class extends torch's
    mode instead of adding a second mode, because every operation and every query of a device would pass through both.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and its guard would double the cost of each operation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "prim" and _on_meta(args, kwargs or {}):
            return func(*args, **(kwargs or {}))
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except DataDependentOutputException:
            if func is not torch.ops.aten._local_scalar_dense.default:
                raise
            return _answer(args[0].dtype)
        except DynamicOutputShapeException:
            if func is not torch.ops.aten.index.Tensor or [index.dtype for index in args[1]] != [torch.bool]:
                raise
            return args[0].flatten(0, args[1][0].dim() - 1).clone()  # as if the mask were true everywhere


def _on_meta(args: Any, kwargs: dict[str, Any]) -> bool:
    """True if an operation runs on the meta device: the device of its first tensor argument or, if it has none, of its result."""
    device = kwargs.get("device")
    if device is not None and torch.device(device).type != "meta":
        return False
    first = next((arg for arg in args if isinstance(arg, Tensor)), None)
    if first is None:
        return device is not None
    return not isinstance(first, FakeTensor) and first.is_meta


def _answer(dtype: torch.dtype) -> float | int | bool:
    if dtype == torch.bool:
        return False
    return ANSWER if dtype.is_floating_point else int(ANSWER)
