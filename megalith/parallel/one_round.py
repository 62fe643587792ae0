"""Small collectives of CPU tensors in one round of messages. In gloo, an all-gather over N ranks takes N - 1 steps around a ring, and an
all-reduce takes twice as many; in each step every rank needs a CPU core. If ranks share a few cores, small collectives spend nearly all of
their time waiting for a core (benchmarks/collectives.py). In this module, every rank sends its part to all others in one all-to-all. In
one round, an all-gather or reduce-scatter moves as many bytes as around the ring; an all-reduce moves N / 2 times as many. Terms are added
in rank order, so that all ranks get the same bits.

The module replaces the CPU kernels of torch's own operations, so code that calls or counts these operations does not change. For larger
tensors, other reduction operators and other backends, torch's own code runs.
"""

import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch import Tensor, library
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    ProcessGroup,
    ReduceOp,
    ReduceScatterOptions,
    Work,
)

MAXIMUM = {"gather": 4 << 20, "scatter": 16 << 20, "reduce": 512 << 10}
"""The size of the whole tensor, in bytes, up to which one round of messages is faster than the ring (benchmarks/collectives.py). For a
reduce-scatter, one round was faster at every measured size, because gloo's reduce-scatter sums the whole tensor on every rank."""

ADDS: dict[Any, Callable[[Tensor], Tensor]] = {
    ReduceOp.SUM: lambda parts: parts.sum(0, dtype=parts.dtype),
    ReduceOp.MAX: lambda parts: parts.amax(0),
    ReduceOp.MIN: lambda parts: parts.amin(0),
}
"""For each operator, the function that reduces the parts of all ranks, [ranks, numbers]."""

CAN_ADD = hasattr(ReduceOp, "unbox")
"""True if a kernel can read the reduction operator. With torch 2.11 this is False, and only all-gathers take one round."""

_installed: library.Library | None = None


def install() -> None:
    """From this call on, collectives of CPU tensors in this process take one round where one round is faster."""
    global _installed
    if _installed is None:
        _installed = library.Library("c10d", "IMPL")
        kernels = {"_allgather_base_": gather}
        if CAN_ADD:
            kernels |= {"_reduce_scatter_base_": scatter, "allreduce_": reduce}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*overrid")  # torch 2.11 says that there was a kernel: that is known
            for name, kernel in kernels.items():
                _installed.impl(name, kernel, "CPU")


def gather(whole: Tensor, mine: Tensor, boxed: Any, async_op: bool = True, timeout: int = -1) -> tuple[Tensor, Any]:
    """Replacement of the operation `c10d::_allgather_base_`."""
    group = ProcessGroup.unbox(boxed)
    backend = _backend(group)
    if _small("gather", backend, whole):
        work = _exchange(backend, whole.view(-1), _times(mine, group.size()), timeout)
    else:
        work = backend._allgather_base(whole.view(-1), mine.reshape(-1), _options(AllgatherOptions(), timeout, async_op))
    return whole, work.boxed()


def scatter(
    mine: Tensor, whole: Tensor, boxed: Any, operator: Any, async_op: bool = True, timeout: int = -1
) -> tuple[Tensor, Any]:
    """Replacement of the operation `c10d::_reduce_scatter_base_`."""
    group, operator = ProcessGroup.unbox(boxed), ReduceOp.unbox(operator)
    backend, adds = _backend(group), _adds(operator)
    if adds and _small("scatter", backend, whole):
        parts = mine.new_empty(group.size(), mine.numel())
        work: Work = _Added(_exchange(backend, parts.view(-1), whole.contiguous().view(-1), timeout), parts, adds, mine)
    else:
        options = _options(ReduceScatterOptions(), timeout, async_op)
        options.reduceOp = operator
        work = backend._reduce_scatter_base(mine, whole, options)
    return mine, work.boxed()


def reduce(
    tensors: list[Tensor], boxed: Any, operator: Any, sparse: Tensor | None, async_op: bool = True, timeout: int = -1
) -> tuple[list[Tensor], Any]:
    """Replacement of the operation `c10d::allreduce_`. A tensor with fewer elements than ranks uses the ring, which is then faster because
    most of its steps are empty."""
    group, operator = ProcessGroup.unbox(boxed), ReduceOp.unbox(operator)
    backend, adds, ranks, (first, *more) = _backend(group), _adds(operator), group.size(), tensors
    if adds and sparse is None and not more and first.numel() >= ranks and _small("reduce", backend, first):
        parts = first.new_empty(ranks, first.numel())
        work: Work = _Added(_exchange(backend, parts.view(-1), _times(first, ranks), timeout), parts, adds, first)
    else:
        options = _options(AllreduceOptions(), timeout, async_op)
        options.reduceOp = operator
        work = backend.allreduce(tensors, options)
    return tensors, work.boxed()


class _Added(Work):
    """A pending sum: `wait` waits for the parts of all ranks and adds them up."""

    alive: ClassVar["set[_Added]"] = set()  # torch keeps the half of it that is not Python's

    def __init__(self, moving: Work, parts: Tensor, adds: Callable[[Tensor], Tensor], out: Tensor) -> None:
        super().__init__()
        self._moving, self._parts, self._adds, self._out = moving, parts, adds, out
        self._done = False
        self.alive.add(self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._done:
            self.alive.discard(self)
            self._moving.wait() if timeout is None else self._moving.wait(timeout)
            self._out.copy_(self._adds(self._parts).view(self._out.shape))
            self._done = True
        return True

    def is_completed(self) -> bool:
        return self._done


def _backend(group: ProcessGroup) -> Any:
    return group._get_backend(torch.device("cpu"))


def _small(what: str, backend: Any, whole: Tensor) -> bool:
    return backend.name() == "gloo" and 0 < whole.nbytes <= MAXIMUM[what]


def _adds(operator: ReduceOp) -> Callable[[Tensor], Tensor] | None:
    return next((adds for known, adds in ADDS.items() if operator == known), None)


def _times(tensor: Tensor, ranks: int) -> Tensor:
    return tensor.reshape(-1).repeat(ranks)


def _exchange(backend: Any, arriving: Tensor, leaving: Tensor, timeout: int) -> Work:
    return backend.alltoall_base(arriving, leaving, [], [], _options(AllToAllOptions(), timeout))


def _options(options: Any, timeout: int, async_op: bool = True) -> Any:
    if timeout >= 0:
        options.timeout = timedelta(milliseconds=timeout)
    options.asyncOp = async_op
    return options
