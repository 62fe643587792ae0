"""Sums gradients over ranks while backward continues."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megalith.parallel.groups import wait_for


class Reduction:
    """A reduction of one bucket's gradients that is in progress: a reduce-scatter over the shards, then an all-reduce over the copies."""

    def __init__(
        self, flat: Tensor, shards: dist.ProcessGroup, copies: dist.ProcessGroup, done: Callable[[Tensor], None]
    ) -> None:
        """`flat`: the gradients [shards, numbers]. `done` is called with the summed gradients of this rank's share."""
        self.flat: Tensor | None = flat  # what the first half sums, which must live until then
        self.copies, self.done, self.sharded = copies, done, shards.size() > 1
        self.mine = flat.new_empty(flat.shape[1]) if self.sharded else flat[0]
        self.work: Any = None
        if self.sharded:
            self.work = dist.reduce_scatter_tensor(self.mine, flat.flatten(), group=shards, async_op=True)
        else:
            self.second()

    def second(self) -> None:
        """Wait for the reduce-scatter, and begin the all-reduce."""
        if self.work is not None:
            wait_for(self.work)
        self.work = self.flat = None
        self.work = dist.all_reduce(self.mine, group=self.copies, async_op=True) if self.copies.size() > 1 else None

    def finish(self) -> None:
        """Wait for the sums, and pass them to `done`."""
        if self.work is not None:
            wait_for(self.work)
        self.done(self.mine)


class Reducer:
    """A rank's reductions in progress. After each `add`, at most one reduce-scatter and one all-reduce are in progress, which limits the
    memory for them."""

    def __init__(self) -> None:
        self.first: Reduction | None = None
        self.last: Reduction | None = None

    def add(self, reduction: Reduction | None) -> None:
        """Add a reduction that has started. Begin the all-reduce of the previous reduction, and finish the reduction before that."""
        if reduction is None:
            return
        self._advance()
        self.first = reduction

    def _advance(self) -> None:
        if self.first is None:
            return
        if self.first.sharded:
            self.first.second()
        if self.last is not None:
            self.last.finish()
        self.first, self.last = None, self.first

    def finish(self) -> None:
        """Wait for all reductions in progress."""
        self._advance()
        if self.last is not None:
            self.last.finish()
        self.last = None
