"""Collectives of small Python values among the ranks that save and load together; they also work in a single process."""

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


@dataclass(frozen=True)
class ObjectCollectives:
    """Collectives over the ranks of `group`; None: this process alone."""

    group: dist.ProcessGroup | None

    @property
    def rank(self) -> int:
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def size(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def is_leader(self) -> bool:
        """True on the leading rank, which makes decisions for all ranks and commits checkpoints."""
        return self.rank == 0

    def any(self, flag: bool) -> bool:
        """Return True on all ranks if `flag` is true on any."""
        if self.group is None:
            return flag
        value = torch.tensor([int(flag)])
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self.group)
        return bool(value.item())

    def gather(self, value: T) -> list[T] | None:
        """Return every rank's value in rank order on the leading rank; None on other ranks."""
        if self.group is None:
            return [value]
        values: list[Any] | None = [None] * self.size if self.is_leader else None
        dist.gather_object(value, values, dst=dist.get_global_rank(self.group, 0), group=self.group)
        return values

    def all_gather(self, value: T) -> list[T]:
        """Return every rank's value in rank order, on every rank."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def scatter(self, values: list[T] | None) -> T:
        """Return this rank's item of the leading rank's list."""
        if self.group is None:
            assert values is not None
            return values[0]
        received: list[Any] = [None]
        dist.scatter_object_list(received, values, src=dist.get_global_rank(self.group, 0), group=self.group)
        return received[0]

    def broadcast(self, value: T) -> T:
        """Return the leading rank's value on every rank."""
        if self.group is None:
            return value
        values: list[Any] = [value]
        dist.broadcast_object_list(values, src=dist.get_global_rank(self.group, 0), group=self.group)
        return values[0]
