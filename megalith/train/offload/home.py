"""The two homes of offloaded state: the host's memory, and files on disk, whose chunks are updated through buffers in memory."""

import os
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate
from math import lcm, prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megalith.kernels.numbers import DTYPE
from megalith.parallel.data import Weight, local
from megalith.parallel.source import Source
from megalith.spec.numbers import NUMBERS
from megalith.spec.plan import StateSpec
from megalith.spec.state import LOWER, MASTER, Slot, away_names
from megalith.train.offload.disk_shares import LiveShare
from megalith.train.offload.slot_file import memory_of, padded
from megalith.train.offload.slots import Slots
from megalith.train.offload.stream import Stream
from megalith.train.optimizers.rule import Part

MIB = 1 << 20
MASTER_BYTES = 4
"""Bytes per element of a master weight in fp32."""
ROUND = 1024
"""Parameters are cut at multiples of this many elements, so that kernels vectorise a piece in the same way as the whole parameter."""


class Lot(NamedTuple):
    """One parameter whose state is kept off the device."""

    weight: Weight
    slots: tuple[Slot, ...]
    """The slots that are kept off the device."""
    whole: bool
    """True if the parameter's update needs the whole share at once."""
    tile: int = 0
    """The number of elements in a tile, if the weight is read and updated in tiles (`parallel.tables`); chunks end where tiles end."""

    @property
    def share(self) -> Tensor:
        """The parameter's share of the master weights; it has no memory if they are off the device."""
        return local(self.weight.master)


def lots_of(
    state: StateSpec, weights: Mapping[str, Weight], slots: Mapping[str, Sequence[Slot]], whole: Mapping[str, bool]
) -> dict[str, Lot]:
    """Return the parameters whose state is kept off the device, with their slots. Master weights are offloaded too if products compute in
    another number format; if they are stored in two halves, only the lower half is offloaded."""
    sizes = {name: local(weight.master).numel() for name, weight in weights.items()}

    def masters(name: str) -> list[Slot]:
        return [MASTER] if weights[name].narrow and not any(slot in LOWER.values() for slot in slots[name]) else []

    return {name: Lot(weights[name], (*masters(name), *slots[name]), whole[name]) for name in away_names(sizes, state.away)}


def _first(slot: Slot, lot: Lot, source: Source | None) -> Tensor | None:
    """Return the initial values of a slot for master weights, or for their lower halves; None for other slots, which begin as zeros.
    `source`: see `Weight.move_out`."""
    if slot == MASTER:
        return lot.weight.move_out(source)
    return lot.weight.split(NUMBERS[slot.number].bits) if slot in LOWER.values() else None


class Host:
    """State in the host's memory, where the CPU updates it."""

    def __init__(self, lots: Mapping[str, Lot], *, weights: bool = False) -> None:
        """`weights`: True if each gather makes the compute weights from the master weights in this home."""
        self.lots = lots
        self.held: dict[tuple[Slot, str], Tensor] = {}
        for name, lot in lots.items():
            share, source = lot.share, Source(partial(_at_once, self.held, name)) if weights else None
            for slot in lot.slots:
                first = _first(slot, lot, source)
                zeros = torch.zeros(slot.shape_of(share.shape), dtype=DTYPE[slot.number])
                self.held[slot, name] = zeros if first is None else first.cpu()

    @property
    def masters(self) -> bool:
        """True if this home also holds the master weights, or their lower halves (`spec.state.LOWER`)."""
        return any(slot == MASTER or slot in LOWER.values() for slot, _ in self.held)

    def stream(self, parts: Sequence[Part]) -> Iterator[Part]:
        """Yield each part with its state; after the caller's update, copy its master weights to the compute weights. A part that is a tile
        of a share has a gradient of its own size."""
        for part in parts:
            lot, count = self.lots[part.name], part.gradient.numel()
            near = {slot.name: self.held[slot, part.name] for slot in lot.slots}
            if count < lot.share.numel():
                near = {slot.name: _rows(near[slot.name], slot, lot, part.first, count) for slot in lot.slots}
            master = near.pop(MASTER.name, None)
            whole = master is not None or count == lot.share.numel()
            resident = part.weight if whole else part.weight.view(-1)[part.first : part.first + count]
            weight = resident.cpu() if master is None else master
            yield part._replace(weight=weight, gradient=part.gradient.cpu(), slots=near, home=None)
            if master is not None:
                lot.weight.take_over(part.first, master)
            elif weight is not resident:
                resident.copy_(weight)

    def publish(self) -> None:
        """After master weights were loaded, make the compute weights from them."""
        for (slot, name), held in self.held.items():
            if slot == MASTER:
                self.lots[name].weight.take_over(0, held)

    def settle(self) -> None:
        """No-op, because changes in memory are valid at once."""

    undo = settle

    @property
    def sum(self) -> int:
        """0, because the digest of state in host memory is computed from the memory itself."""
        return 0

    @property
    def bytes(self) -> dict[str, int]:
        """The bytes of the offloaded state, under the name of its tier."""
        return {"host": sum(held.numel() * held.element_size() for held in self.held.values())}


class Disk:
    """State in files of this rank. The CPU updates this state in the host's memory, chunk by chunk. A chunk holds one range of elements of
    all offloaded tensors of a parameter."""

    def __init__(self, lots: Mapping[str, Lot], path: Path, *, most: int, weights: bool = False) -> None:
        """`most`: the maximum bytes of one tensor in a chunk, except for updates that need the whole share at once. `weights`: True if each
        gather makes the compute weights from the master weights in this home."""
        self.lots = lots
        self.pieces: dict[str, list[tuple[int, int, int]]] = {}
        """The pieces of each parameter: the number of the chunk, the index of the piece's first element in the share, and the piece's
        number of elements."""
        chunks = list[tuple[str, list[int]]]()
        for name, lot in lots.items():
            for first, last in _cut(lot, most):
                self.pieces.setdefault(name, []).append((len(chunks), first, last - first))
                sizes = [_bytes(slot, _shape(slot, lot, last - first)) for slot in lot.slots]
                chunks.append((f"{name}, numbers {first:,} to {last - 1:,}", sizes))
        self.slots = Slots(path, chunks, dry=any(isinstance(lot.share, FakeTensor) for lot in lots.values()))
        self._stream = Stream(self.slots)
        weakref.finalize(self, self._stream.close)
        reader = None
        if weights and not self.slots.dry:  # a dry run counts what its own thread allocates
            reader = ThreadPoolExecutor(1, thread_name_prefix="weights-read")
            weakref.finalize(self, reader.shutdown)
        self._passing = [memory_of(max(padded(sizes[0]) for _, sizes in chunks))] if weights else []
        read = partial(_one_by_one, self.slots, *self._passing)
        sources = {name: Source(partial(read, self.pieces[name]), reader) for name in lots} if weights else {}
        self.held = {
            (slot, name): self._stored(name, number) for name, lot in lots.items() for number, slot in enumerate(lot.slots)
        }
        for (slot, name), stored in self.held.items():
            if (first := _first(slot, lots[name], sources.get(name))) is not None:
                stored.fill((0,) * first.dim(), first)

    def _stored(self, name: str, number: int) -> LiveShare:
        lot = self.lots[name]
        slot = lot.slots[number]
        starts = [_starts(lot, count)[number] for _, _, count in self.pieces[name]]
        pieces = [
            (chunk, prod(_shape(slot, lot, first)), prod(_shape(slot, lot, count))) for chunk, first, count in self.pieces[name]
        ]
        return LiveShare(self._stream, number, pieces, starts, slot.shape_of(lot.share.shape), DTYPE[slot.number])

    @property
    def masters(self) -> bool:
        """True if this home also holds the master weights, or their lower halves (`spec.state.LOWER`)."""
        return any(slot == MASTER or slot in LOWER.values() for slot, _ in self.held)

    def stream(self, parts: Sequence[Part]) -> Iterator[Part]:
        """Yield the parts piece by piece, with their state. Meanwhile, threads read the next pieces and write the previous ones. A part
        that is a tile of a share has a gradient of its own size."""
        order = [(part, *piece) for part in parts for piece in self.pieces[part.name] if _has(part, piece)]
        bodies = self._stream.over([chunk for _, chunk, _, _ in order])
        for (part, _, first, count), (_, body) in zip(order, bodies, strict=True):
            lot = self.lots[part.name]
            here = slice(first - part.first, first - part.first + count)
            near = _tensors(lot, body, count)
            master = near.pop(MASTER.name, None)
            resident = part.weight if lot.whole or master is not None else part.weight.view(-1)[first : first + count]
            weight = resident.cpu() if master is None else master
            gradient = (part.gradient if lot.whole else part.gradient.reshape(-1)[here]).cpu()
            yield part._replace(weight=weight, gradient=gradient, slots=near, first=first, home=None)
            if master is not None:
                lot.weight.take_over(first, master)
            elif weight is not resident:
                resident.copy_(weight)

    def publish(self) -> None:
        """After master weights were loaded, make the compute weights from them."""
        for (slot, name), stored in self.held.items():
            if slot == MASTER and self.lots[name].weight.source is None:
                for first, numbers in stored.pieces():
                    self.lots[name].weight.take_over(first, numbers)

    def settle(self) -> None:
        """Make the written update valid."""
        self.slots.settle()

    def drop(self) -> None:
        """Discard an update that is not valid yet, and restore the compute weights from the master weights before this update."""
        self.slots.drop()
        self.publish()

    def undo(self) -> None:
        """Restore the state before the newest update."""
        self.slots.undo()

    @property
    def sum(self) -> int:
        """The sum of all words of the state on disk, from which digests of the state are computed."""
        return self.slots.sum

    @property
    def warning(self) -> str:
        """A message if state goes through the page cache, because the file system cannot bypass it; empty otherwise."""
        if self.slots.direct:
            return ""
        words = f"plan.state: the file system of {self.slots.path.parent} has no direct I/O, so state on disk goes through the page cache"
        return f"{words}, which makes updates slower. plan.state.folder can name a folder on another disk"

    @property
    def buffers(self) -> list[Tensor]:
        """The buffers in memory through which chunks are streamed."""
        return [*self._stream.buffers, *self._passing]

    @property
    def bytes(self) -> dict[str, int]:
        """The bytes of the offloaded state, under the name of its tier."""
        return {"disk": self.slots.bytes}


def home_of(lots: Mapping[str, Lot], state: StateSpec, *, folder: Path | None, rank: int) -> Host | Disk | None:
    """Return the home of the offloaded state; None if all state is on the device. `folder`: see `folder_of`.

    Raises StateFileError if a disk has no room.
    """
    if not lots:
        return None
    weights = state.weights != "device"
    if state.optimizer == "host":
        return Host(lots, weights=weights)
    return Disk(
        lots, folder_of(state, folder) / f"state-of-rank-{rank:05d}.{os.getpid()}", most=state.chunk * MIB, weights=weights
    )


def folder_of(state: StateSpec, folder: Path | None) -> Path:
    """Return the folder for state files: the plan's folder, else `folder`, else the folder for temporary files."""
    return Path(state.folder) if state.folder else folder or Path(tempfile.gettempdir())


# Sources read by functions, not by methods: a home that its own weights refer to would keep its files until garbage is collected.


def _at_once(held: Mapping[tuple[Slot, str], Tensor], name: str, start: int, numbers: int) -> Iterator[tuple[int, Tensor]]:
    yield start, held[MASTER, name].view(-1)[start : start + numbers]


def _one_by_one(
    slots: Slots, memory: Tensor, pieces: Sequence[tuple[int, int, int]], start: int, numbers: int
) -> Iterator[tuple[int, Tensor]]:
    """Yield the master weights of a parameter (the first of its slots) in these pieces, as far as they are within `numbers` elements from
    element `start` on. Only one thread may call this, because all pieces use the same memory."""
    for chunk, first, count in pieces:
        least, most = max(first, start), min(first + count, start + numbers)
        if least < most:
            slots.read(chunk, memory, 0)
            yield least, memory[: count * MASTER_BYTES].view(torch.float32)[least - first : most - first]


def _has(part: Part, piece: tuple[int, int, int]) -> bool:
    """True if the part, which may be a tile of a share, has this piece of the share."""
    return part.first <= piece[1] < part.first + part.gradient.numel()


def _cut(lot: Lot, most: int) -> list[tuple[int, int]]:
    """Return the range of elements of each piece of a share, so that no row with a common scale is cut."""
    numbers = lot.share.numel()
    grain = lcm(ROUND, lot.share.shape[-1]) if any(slot.number != "fp32" for slot in lot.slots) else ROUND
    step = numbers if lot.whole else max(grain, most // MASTER_BYTES // grain * grain)
    tile = lot.tile or numbers
    borders = [(first, min(first + tile, numbers)) for first in range(0, numbers, tile)] if numbers else []
    return [(first, min(first + step, end)) for begin, end in borders for first in range(begin, end, step)]


def _shape(slot: Slot, lot: Lot, count: int) -> tuple[int, ...]:
    if lot.whole:
        return slot.shape_of(lot.share.shape)
    columns = lot.share.shape[-1] if slot.block else 1
    return (count // columns, *slot.shape_of((columns,))) if slot.block else (count,)


def _rows(held: Tensor, slot: Slot, lot: Lot, first: int, count: int) -> Tensor:
    """Return the part of a slot's tensor for `count` elements of a share, from element `first` on."""
    shape = _shape(slot, lot, count)
    start = first // lot.share.shape[-1] * shape[1] if slot.block else first
    return held.view(-1)[start : start + prod(shape)].view(shape)


def _bytes(slot: Slot, shape: Sequence[int]) -> int:
    return prod(shape) * DTYPE[slot.number].itemsize


def _starts(lot: Lot, count: int) -> list[int]:
    sizes = (padded(_bytes(slot, _shape(slot, lot, count))) for slot in lot.slots)
    return list(accumulate(sizes, initial=0))[:-1]


def _tensors(lot: Lot, body: Tensor, count: int) -> dict[str, Tensor]:
    found = {}
    for slot, start in zip(lot.slots, _starts(lot, count), strict=True):
        shape = _shape(slot, lot, count)
        found[slot.name] = body[start : start + _bytes(slot, shape)].view(DTYPE[slot.number]).view(shape)
    return found
