"""The share of each tensor that each rank holds, described as boxes of the whole tensor. State described by such boxes can be
saved under one plan and loaded under any other."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megalith.checkpoint.folder import FileDigest, Piece
from megalith.checkpoint.tensors import DTYPES, TORCH_DTYPES

Place = tuple[str, tuple[int, ...]]  # identifies a box: its tensor's name and where it starts


@dataclass(frozen=True)
class HeldShare:
    """A box of a tensor that a rank holds. `shape`: the shape of the whole tensor. Sizes are in elements."""

    key: str
    shape: tuple[int, ...]
    dtype: str
    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    bytes: int

    @property
    def place(self) -> Place:
        return self.key, self.offset


class ImmutableFile(Protocol):
    """A safetensors file that is never written again, so that a checkpoint may link it."""

    @property
    def payload(self) -> int:
        """Return how many bytes of the file are state."""
        ...

    def link(self, path: Path) -> FileDigest:
        """Link the file at `path`, as a second name, and sync the name to disk. Raises OSError if the file cannot be linked, for
        example to another file system."""
        ...


class Extents(NamedTuple):
    """The location of a share in a file: its byte tensors, in order."""

    file: ImmutableFile
    pieces: tuple[Piece, ...]


class StreamedShare(Protocol):
    """A share that is not a tensor in memory, and is read and filled piece by piece."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def in_memory(self) -> bool:
        """True if all of the share is in memory, so that it can be copied at the speed of memory."""
        ...

    @property
    def extents(self) -> Extents | None:
        """The file that holds the share, if no later update changes the share; else None."""
        ...

    def snapshot(self) -> "StreamedShare | None":
        """Return a snapshot of the share, which any thread may read during later updates; None if no snapshot is possible."""
        ...

    def numel(self) -> int:
        """The number of elements."""
        ...

    def element_size(self) -> int:
        """Bytes of one element."""
        ...

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the share in flat pieces, in order: the index of a piece's first element, and the piece, which is valid until the next
        one."""
        ...

    def fill(self, offset: Sequence[int], values: Tensor) -> None:
        """Write `values` to the box of the share that begins at `offset`."""
        ...


@dataclass(frozen=True)
class OffDeviceShare:
    """A share that is not on this rank's device, with its box in the whole tensor."""

    held: HeldShare
    data: Tensor | StreamedShare

    @classmethod
    def of(cls, key: str, cut: Tensor, data: Tensor | StreamedShare) -> "OffDeviceShare":
        """`cut`: a tensor with the shape of the whole tensor and the same sharding; its values do not matter."""
        offset, sizes = (0,) * cut.dim(), tuple(cut.shape)
        if isinstance(cut, DTensor):
            place = cut.device_mesh.get_coordinate()
            assert place is not None
            offset, sizes = box_of(key, cut, place)
        size = prod(sizes) * data.element_size()
        return cls(HeldShare(key, tuple(cut.shape), DTYPES[data.dtype], offset, sizes, size), data)


@dataclass(frozen=True)
class Share:
    """This rank's box of a tensor, and the box's values: `data`, of shape `held.sizes`, is a view of the tensor, or represents
    values that are not in memory."""

    held: HeldShare
    data: Tensor | StreamedShare


def snapshot(share: Share) -> Share:
    """Return a snapshot that no update changes, if the share is on disk and allows one; else return the share itself."""
    if isinstance(share.data, Tensor) or share.data.in_memory:
        return share
    kept = share.data.snapshot()
    return share if kept is None else Share(share.held, kept)


def can_be_written_later(data: Tensor | StreamedShare) -> bool:
    """True if a share can be written while training continues, because it is copied first or does not change."""
    return isinstance(data, Tensor) or data.in_memory or data.extents is not None


def is_quick_to_copy(data: Tensor | StreamedShare) -> bool:
    """Return True if a share can be copied at the speed of memory."""
    return isinstance(data, Tensor) or data.in_memory


def as_tensor(share: Share) -> Tensor:
    """Return a share's values as a tensor in memory."""
    data = share.data
    if isinstance(data, Tensor):
        return data
    return torch.cat([torch.empty(0, dtype=data.dtype), *(piece.clone() for _, piece in data.pieces())]).view(data.shape)


def shares(state: Mapping[str, Tensor | OffDeviceShare]) -> dict[str, Share]:
    """Return this rank's shares of a flat state, by name. Empty boxes, and tensors of meshes without this rank, are left out. Raises
    ValueError with all tensors that cannot be described: unfinished sums (Partial), unknown dtypes or layouts.
    """
    found: dict[str, Share] = {}
    problems: list[str] = []
    for key, tensor in state.items():
        if isinstance(tensor, OffDeviceShare):
            if prod(tensor.held.sizes) or not prod(tensor.held.shape):
                found[key] = Share(tensor.held, tensor.data)
            continue
        try:
            share = _share(key, tensor)
        except ValueError as error:
            problems.append(str(error))
            continue
        if share is not None:
            found[key] = share
    if problems:
        raise ValueError("state that a checkpoint cannot hold:\n  " + "\n  ".join(problems))
    return found


def _share(key: str, tensor: Tensor) -> Share | None:
    if tensor.dtype not in DTYPES:
        raise ValueError(f"{key} has dtype {tensor.dtype}; a checkpoint holds {', '.join(sorted(TORCH_DTYPES))}")
    shape = tuple(tensor.shape)
    data, offset, sizes = tensor, (0,) * len(shape), shape
    if isinstance(tensor, DTensor):
        place = tensor.device_mesh.get_coordinate()
        if place is None:
            return None
        data = tensor.to_local()
        offset, sizes = box_of(key, tensor, place)
    if tuple(data.shape) != sizes:
        raise ValueError(f"{key} {shape}: this rank holds {tuple(data.shape)}, its layout {_layout(tensor)} says {sizes}")
    if prod(sizes) == 0 and prod(shape) > 0:
        return None
    return Share(HeldShare(key, shape, DTYPES[tensor.dtype], offset, sizes, prod(sizes) * tensor.element_size()), data.detach())


def box_of(key: str, tensor: DTensor, place: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return offset and sizes of this rank's part of a DTensor, computed in the order in which the mesh axes actually split it:
    each tensor-parallel part is cut into consecutive chunks, as FSDP2 does. DTensor's own arithmetic (torch 2.11 and 2.15) gives
    other offsets if a chunk is empty (7 rows over 2 x 3 ranks); a checkpoint saved with these offsets would have rows in the
    wrong order.
    """
    offset, sizes = [0] * tensor.dim(), list(tensor.shape)
    for axis in _splitting_order(key, tensor):
        dim, ranks = tensor.placements[axis].dim, tensor.device_mesh.size(axis)  # type: ignore[attr-defined]
        chunk = -(-sizes[dim] // ranks)  # torch.chunk: equal chunks, the last ones shorter or empty
        start = min(place[axis] * chunk, sizes[dim])
        offset[dim] += start
        sizes[dim] = min(chunk, sizes[dim] - start)
    return tuple(offset), tuple(sizes)


def _splitting_order(key: str, tensor: DTensor) -> list[int]:
    """Return the mesh axes in the order in which they split the tensor: from left to right, except that a strided shard splits
    after as many axes to its right as make up its `split_factor` parts."""
    orders: dict[int, list[int]] = {}
    for axis in reversed(range(len(tensor.placements))):
        placement = tensor.placements[axis]
        if placement.is_replicate():
            continue
        if placement.is_partial():
            raise ValueError(f"{key} is an unreduced partial sum ({_layout(tensor)}); reduce it first")
        factor, order = getattr(placement, "split_factor", 1), orders.setdefault(placement.dim, [])  # type: ignore[attr-defined]
        before = [prod(tensor.device_mesh.size(other) for other in order[:count]) for count in range(len(order) + 1)]
        if factor not in before:
            raise ValueError(
                f"{key} is laid out as {_layout(tensor)}: the axes to the right of a strided shard do not make {factor} parts"
            )
        order.insert(before.index(factor), axis)
    return [axis for order in orders.values() for axis in order]


def _layout(tensor: Tensor) -> str:
    if not isinstance(tensor, DTensor):
        return "whole"
    return f"{tensor.placements} on {tuple(tensor.device_mesh.shape)}"


def owners(held: Sequence[Sequence[HeldShare]]) -> tuple[list[set[Place]], list[str]]:
    """Assign each box to one rank that writes it, with the bytes spread evenly over the ranks; also return a text for each
    contradiction between ranks. `held[rank]`: a rank's boxes. In order of decreasing size, each replicated box goes to its holder
    with the fewest bytes so far.
    """
    holders: dict[Place, list[int]] = {}
    boxes: dict[Place, HeldShare] = {}
    whole: dict[str, tuple[tuple[int, ...], str]] = {}
    problems: list[str] = []
    for rank, items in enumerate(held):
        for item in items:
            shape, dtype = whole.setdefault(item.key, (item.shape, item.dtype))
            if (shape, dtype) != (item.shape, item.dtype) or boxes.setdefault(item.place, item) != item:
                problems.append(f"{item.key}: rank {rank} holds it as {item}, another as {boxes.get(item.place, (shape, dtype))}")
                continue
            holders.setdefault(item.place, []).append(rank)
    filled = dict.fromkeys(whole, 0)
    for box in boxes.values():
        filled[box.key] += prod(box.sizes)
    problems += [
        f"{key}: the ranks hold {filled[key]} of its {prod(shape)} elements"
        for key, (shape, _) in whole.items()
        if filled[key] != prod(shape)
    ]
    load = [0] * len(held)
    mine: list[set[Place]] = [set() for _ in held]
    for place in sorted(holders, key=lambda place: (-boxes[place].bytes, place)):
        rank = min(holders[place], key=lambda rank: load[rank])
        mine[rank].add(place)
        load[rank] += boxes[place].bytes
    return mine, problems
