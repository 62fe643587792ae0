"""For each copy of the state, gathers each sharded matrix on one rank, the matrix's home, which computes the update. All shares are sent in
one exchange, and all results in another."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from megalith.checkpoint.shares import box_of
from megalith.parallel.groups import ranks_in, wait_for
from megalith.train.optimizers.global_tensors import GlobalTensors

Box: TypeAlias = tuple[slice, slice]
"""A range of rows and a range of columns of a matrix."""


class Item(NamedTuple):
    """One matrix: a whole parameter, or one expert of a parameter."""

    name: str
    expert: int | None
    shape: tuple[int, int]

    @property
    def work(self) -> int:
        """The cost of orthogonalising the matrix, up to a constant factor."""
        return max(self.shape) * min(self.shape) ** 2


@dataclass(frozen=True)
class MatrixHome:
    """A matrix, its home, and the ranks that hold parts of it. Ranks are numbered within the pipeline place (the ranks
    with the same stages)."""

    item: Item
    home: int
    held: dict[int, Box]
    """The parts of the matrix, by the rank that holds them, for one copy of the state."""

    @cached_property
    def senders(self) -> dict[int, Box]:
        """The rank that sends each part to the home: the home itself if it holds the part, else the first rank that does."""
        found: dict[tuple[int, ...], int] = {}
        for rank, box in self.held.items():
            key = tuple(edge for side in box for edge in (side.start, side.stop))
            if rank == self.home or key not in found:
                found[key] = rank
        return {rank: self.held[rank] for rank in found.values()}


def share_out(items: Iterable[tuple[Item, Sequence[int]]], loads: dict[int, float]) -> dict[Item, int]:
    """Return the home of each matrix. In the order of decreasing cost, each matrix is assigned to the candidate rank with the least work so
    far; of equal candidates, to the first one. `loads`: the work that each rank already has, updated in place. If all loads begin at
    0 and each rank is a candidate for each matrix, the largest load is at most a third above the optimum (Graham 1969).
    """
    homes: dict[Item, int] = {}
    for item, candidates in sorted(items, key=lambda each: -each[0].work):  # a stable sort: the same on every rank
        homes[item] = min(candidates, key=lambda rank: loads.setdefault(rank, 0.0))
        loads[homes[item]] += item.work
    return homes


def homes_of(whole: GlobalTensors, names: Sequence[str]) -> list[MatrixHome]:
    """Assign a home to each matrix of the parameters `names`, among the ranks that hold the same copy of the state as this rank. All copies
    assign homes in the same way. No message is needed, because each rank knows which shares the other ranks hold.
    """
    if whole.groups is None:
        return [MatrixHome(item, 0, {0: box}) for name in names for item, box in _items(name, whole.cuts[name].shape, None)]
    views = {role: _View(whole, role) for role in ("experts", "dense")}
    loads: dict[int, float] = {}
    found: dict[str, list[MatrixHome]] = {}
    for role, view in views.items():  # experts first: only some ranks hold each of them
        mine = [name for name in names if (whole.described[name].role == "experts") == (role == "experts")]
        held = {item: boxes for name in mine for item, boxes in view.holders(name, whole).items()}
        if role == "dense":  # another copy's ranks may have other places on the expert axis, and their place gives their work
            loads = {rank: loads.get(views["experts"].twin(rank), 0.0) for rank in view.ranks}
        homes = share_out(((item, tuple(boxes)) for item, boxes in held.items()), loads)
        for item, boxes in held.items():
            found.setdefault(item.name, []).append(MatrixHome(item, homes[item], boxes))
    return [placed for name in names for placed in found[name]]


def _items(name: str, shape: Sequence[int], part: tuple[Sequence[int], Sequence[int]] | None) -> list[tuple[Item, Box]]:
    """Return the matrices of a parameter that overlap the box `part` (offset and sizes; None: the whole parameter), and the overlap with
    each."""
    offset, sizes = part or ((0,) * len(shape), shape)
    if not prod(sizes):
        return []
    rows, columns = (slice(start, start + size) for start, size in zip(offset[-2:], sizes[-2:], strict=True))
    size = (shape[-2], shape[-1])
    if len(shape) == 2:
        return [(Item(name, None, size), (rows, columns))]
    return [(Item(name, expert, size), (rows, columns)) for expert in range(offset[0], offset[0] + sizes[0])]


class _View:
    """The ranks of a pipeline place, arranged as in the mesh of dense state or in the mesh of experts."""

    def __init__(self, whole: GlobalTensors, role: str) -> None:
        groups = whole.groups
        assert groups is not None
        place = groups.mesh.expert_coordinates if role == "experts" else groups.mesh.state_coordinates
        world = ranks_in(groups.world, groups.place)
        self.everyone = {number: tuple(place(rank).values())[1:] for number, rank in enumerate(world)}
        """The mesh coordinates of each rank of the pipeline place; the first coordinate is the number of the copy of the state."""
        copy = self.everyone[world.index(groups.rank)][0]
        self.ranks = {rank: stand for rank, stand in self.everyone.items() if stand[0] == copy}
        """The ranks that hold the same copy of the state as this rank."""
        self._at = {stand[1:]: rank for rank, stand in self.ranks.items()}

    def twin(self, rank: int) -> int:
        return self._at[self.everyone[rank][1:]]

    def holders(self, name: str, whole: GlobalTensors) -> dict[Item, dict[int, Box]]:
        parameter, found = whole.held[name], dict[Item, dict[int, Box]]()
        for rank, stand in self.ranks.items():
            part = box_of(name, parameter, stand) if isinstance(parameter, DTensor) else None
            for item, box in _items(name, tuple(parameter.shape), part):
                found.setdefault(item, {})[rank] = box
        return found


class MatrixExchange:
    """Sends parts of matrices to the homes of the matrices, and the results back to all ranks that hold parts."""

    def __init__(self, whole: GlobalTensors, placed: Sequence[MatrixHome]) -> None:
        self.whole, self.placed = whole, placed
        self.group = whole.groups.place if whole.groups else None
        self.rank = self.group.rank() if self.group else 0
        self.ranks = self.group.size() if self.group else 1
        self.exchanges = self.group is not None and any(len(each.held) > 1 for each in placed)
        """True if any rank sends a message; all ranks of a pipeline place have the same value."""

    @property
    def mine(self) -> list[MatrixHome]:
        """The matrices whose home is this rank."""
        return [each for each in self.placed if each.home == self.rank]

    def gather(self, shares: Mapping[str, Tensor]) -> Callable[[], dict[Item, Tensor]]:
        """Start to send this rank's shares of all parameters to the homes. Return a function that waits for the exchange and returns the
        whole matrices whose home is this rank."""
        sent = [
            [(each, box) for each in self.placed if each.home == rank and (box := each.senders.get(self.rank))]
            for rank in range(self.ranks)
        ]
        received = [[(each, each.senders[rank]) for each in self.mine if rank in each.senders] for rank in range(self.ranks)]
        pieces = [[self._part(shares[each.item.name], each.item) for each, _ in row] for row in sent]
        like = next(iter(shares.values()))
        arrive = self._all_to_all(pieces, [sum(_numel(box) for _, box in row) for row in received], like)

        def wait() -> dict[Item, Tensor]:
            whole = {each.item: like.new_empty(each.item.shape) for each in self.mine}
            for row, flat in zip(received, arrive(), strict=True):
                for (each, box), piece in zip(row, flat.split([_numel(box) for _, box in row]), strict=True):
                    target = whole[each.item][box]
                    target.copy_(piece.view(target.shape))
            return whole

        return wait

    def scatter(self, matrices: Mapping[Item, Tensor], shares: Mapping[str, Tensor]) -> None:
        """Send the matrices whose home is this rank to all ranks that hold parts of them, and fill this rank's `shares` with what all homes
        send."""
        sent = [[(each, box) for each in self.mine if (box := each.held.get(rank))] for rank in range(self.ranks)]
        received = [
            [(each, each.held[self.rank]) for each in self.placed if each.home == rank and self.rank in each.held]
            for rank in range(self.ranks)
        ]
        pieces = [[matrices[each.item][box] for each, box in row] for row in sent]
        like = next(iter(shares.values()))
        arrived = self._all_to_all(pieces, [sum(_numel(box) for _, box in row) for row in received], like)()
        for row, flat in zip(received, arrived, strict=True):
            for (each, _), piece in zip(row, flat.split([_numel(box) for _, box in row]), strict=True):
                target = self._part(shares[each.item.name], each.item)
                target.copy_(piece.view(target.shape))

    def _part(self, share: Tensor, item: Item) -> Tensor:
        return share if item.expert is None else share[item.expert - self.whole.cuts[item.name].offset[0]]

    def _all_to_all(self, pieces: list[list[Tensor]], sizes: list[int], like: Tensor) -> Callable[[], Sequence[Tensor]]:
        sent = torch.cat([like.new_empty(0), *(piece.reshape(-1) for row in pieces for piece in row)])
        leaving = [sum(piece.numel() for piece in row) for row in pieces]
        if not self.exchanges:
            return lambda: sent.split(leaving)
        arrived = sent.new_empty(sum(sizes))
        work = dist.all_to_all_single(arrived, sent, sizes, leaving, group=self.group, async_op=True)

        def wait() -> Sequence[Tensor]:
            wait_for(work)
            return arrived.split(sizes)

        return wait


def _numel(box: Box) -> int:
    rows, columns = box
    return (rows.stop - rows.start) * (columns.stop - columns.start)
