"""Exchanges of values and tensors between ranks. A value is sent as JSON, and is checked against its type on arrival. torch's own object
collectives send pickles, with which somebody on the network path could execute code on every rank.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import Tensor

T = TypeVar("T")

LONGEST = 1 << 30
"""Bytes that one rank's value may take as JSON."""
LONGEST_TENSORS = 1 << 35
"""Bytes that the tensors of one rank may take."""
DTYPES = {
    str(one): one
    for one in (
        *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


class ExchangeError(ValueError):
    """A message of another rank is too long, or does not have its type: it was altered on its way."""


@dataclass(frozen=True)
class ObjectCollectives:
    """Collectives of values over the ranks of `group`, which has a backend for CPU tensors; None: this process alone. `kind`: the type of
    one rank's value, as pydantic understands it; Any: plain JSON.

    For a value that is exchanged at each start of the ranks, `kind` is a TypeAdapter that its module makes when it is imported: the process
    from which ranks are forked imports it once, while each rank would need milliseconds to make it."""

    group: dist.ProcessGroup | None

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank()

    @property
    def size(self) -> int:
        return 1 if self.group is None else self.group.size()

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

    def gather(self, value: T, kind: Any) -> list[T] | None:
        """Return every rank's value in rank order on the leading rank; None on other ranks."""
        if self.group is None:
            return [value]
        found = _gather(_encoded(value, kind), self.group, most=LONGEST)
        return None if found is None else [_decoded(one, kind) for one in found]

    def all_gather(self, value: T, kind: Any) -> list[T]:
        """Return every rank's value in rank order, on every rank."""
        if self.group is None:
            return [value]
        mine = _encoded(value, kind)
        sizes = _sizes(mine, self.group, most=LONGEST)
        whole = torch.empty(len(sizes) * max(sizes), dtype=torch.uint8)  # flat, as gloo wants it from a single rank
        dist.all_gather_into_tensor(whole, _padded(mine, max(sizes)), group=self.group)
        return [_decoded(row[:size], kind) for row, size in zip(whole.view(len(sizes), -1), sizes, strict=True)]

    def scatter(self, values: list[T] | None, kind: Any) -> T:
        """Return this rank's item of the leading rank's list."""
        if self.group is None:
            assert values is not None
            return values[0]
        parts = [_encoded(value, kind) for value in values or ()]
        sizes = torch.tensor([part.numel() for part in parts] or [0] * self.size)
        dist.broadcast(sizes, group_src=0, group=self.group)
        longest = _checked(sizes, most=LONGEST)
        mine = torch.empty(longest, dtype=torch.uint8)
        dist.scatter(mine, [_padded(part, longest) for part in parts] or None, group_src=0, group=self.group)
        return _decoded(mine[: int(sizes[self.rank])], kind)

    def broadcast(self, value: T, kind: Any) -> T:
        """Return the leading rank's value on every rank."""
        if self.group is None:
            return value
        text = _encoded(value, kind) if self.is_leader else torch.empty(0, dtype=torch.uint8)
        size = torch.tensor([text.numel()])
        dist.broadcast(size, group_src=0, group=self.group)
        text = text if self.is_leader else torch.empty(_checked(size, most=LONGEST), dtype=torch.uint8)
        dist.broadcast(text, group_src=0, group=self.group)
        return value if self.is_leader else _decoded(text, kind)


def gather_tensors(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> list[list[Tensor]] | None:
    """Return every rank's CPU tensors in rank order on the first rank of `group`; None on other ranks."""
    forms = [(str(tensor.dtype), tuple(tensor.shape)) for tensor in tensors]
    told = ObjectCollectives(group).gather(forms, list[tuple[str, tuple[int, ...]]])
    octets = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
    found = _gather(torch.cat(octets) if octets else torch.empty(0, dtype=torch.uint8), group, most=LONGEST_TENSORS)
    if told is None or found is None:
        return None
    return [_cut(one, wanted) for one, wanted in zip(found, told, strict=True)]


def _cut(octets: Tensor, forms: Sequence[tuple[str, tuple[int, ...]]]) -> list[Tensor]:
    try:
        sizes = [prod(shape) * DTYPES[dtype].itemsize for dtype, shape in forms]
        parts = zip(octets.split(sizes), forms, strict=True)
        return [part.clone().view(DTYPES[dtype]).view(shape) for part, (dtype, shape) in parts]
    except (KeyError, RuntimeError) as error:
        raise ExchangeError(
            f"the tensors of another rank do not have the dtypes and shapes that it announced: {error}"
        ) from error


def _gather(mine: Tensor, group: dist.ProcessGroup, *, most: int) -> list[Tensor] | None:
    """Return every rank's bytes on the first rank; None on other ranks."""
    sizes = _sizes(mine, group, most=most)
    longest = max(sizes)
    leads = group.rank() == 0
    found = [torch.empty(longest, dtype=torch.uint8) for _ in sizes] if leads else None
    dist.gather(_padded(mine, longest), found, group_dst=0, group=group)
    return None if found is None else [one[:size] for one, size in zip(found, sizes, strict=True)]


def _sizes(mine: Tensor, group: dist.ProcessGroup, *, most: int) -> list[int]:
    sizes = torch.empty(group.size(), dtype=torch.int64)
    dist.all_gather_into_tensor(sizes, torch.tensor([mine.numel()]), group=group)
    _checked(sizes, most=most)
    return [int(size) for size in sizes]


def _checked(sizes: Tensor, *, most: int) -> int:
    """Return the largest size. Raises ExchangeError for sizes that no message has."""
    if not 0 <= int(sizes.min()) <= int(sizes.max()) <= most:
        raise ExchangeError(f"a rank announced a message of {sizes.tolist()} bytes, but at most {most:,} bytes are allowed")
    return int(sizes.max())


def _padded(octets: Tensor, size: int) -> Tensor:
    return torch.cat([octets, octets.new_zeros(size - octets.numel())])


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return kind if isinstance(kind, TypeAdapter) else TypeAdapter(kind)


def _encoded(value: Any, kind: Any) -> Tensor:
    plain = value if kind is Any else _adapter(kind).dump_python(value, warnings=False)
    text = json.dumps(plain, separators=(",", ":"), default=_plain)
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _plain(value: Any) -> Any:
    return [*value] if isinstance(value, set | frozenset) else os.fspath(value)


def _decoded(octets: Tensor, kind: Any) -> Any:
    try:
        plain = json.loads(octets.numpy().tobytes())
        return plain if kind is Any else _adapter(kind).validate_python(plain)
    except (ValueError, RecursionError) as error:
        raise ExchangeError(f"a message of another rank is not a {kind}: it was altered on its way ({error})") from error
