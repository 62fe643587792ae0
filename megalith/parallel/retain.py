"""Moves the tensors that blocks save for backward to the host's memory or to a file, and moves them back before the backward.

Autograd passes each tensor that it saves to a hook (`torch.autograd.graph.saved_tensors_hooks`). At the end of a block's forward, the
memory of the saved tensors moves to a tier. If several saved tensors are views of one memory, the memory moves once, to the place nearest
to the device. Memory that the step needs anyway stays on the device: weights, buffers, and tensors of the microbatch. Tensors of a named
part whose action keeps them on the device stay there too (`PlacedFunction`). Backward gets the same bits with the same strides, so it
computes the same bits.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from megalith.models.batch import Batch
from megalith.spec.state import Place


class PendingFetch(Protocol):
    """A transfer of memory back to the device."""

    def wait(self) -> Tensor:
        """Return the memory on the device. Computations that use the memory wait until the transfer has finished."""
        ...


class OffloadedCopy(Protocol):
    """A copy of some memory's content in a tier."""

    def fetch(self) -> PendingFetch:
        """Begin to move the content back to the device. Called once."""
        ...


class Tier(Protocol):
    """A place outside the device that holds the memory of saved tensors until their backward."""

    def put(self, memories: Sequence[Tensor]) -> Sequence[OffloadedCopy]:
        """Begin to move `memories`, the contiguous one-dimensional tensors of a block, to the tier. The caller then drops its references to
        `memories`."""
        ...


Tiers: TypeAlias = Mapping[Place, Tier]
"""The tier of each place outside the device."""


class _Memory:
    """The memory of one or several saved tensors, freed when the last of these tensors is freed."""

    def __init__(self, whole: Tensor, place: Place) -> None:
        self._here: Tensor | None = whole
        self.place = place
        self._copy: OffloadedCopy | None = None
        self._coming: PendingFetch | None = None

    def leave(self, copy: OffloadedCopy) -> None:
        self._copy, self._here = copy, None

    def fetch(self) -> None:
        if self._copy is not None:
            self._coming, self._copy = self._copy.fetch(), None

    def whole(self) -> Tensor:
        if self._here is None:
            self.fetch()
            assert self._coming is not None
            self._here, self._coming = self._coming.wait(), None
        return self._here


@dataclass(frozen=True)
class SavedTensor:
    """A saved tensor, as a view of memory that may be in a tier."""

    memory: _Memory
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        whole = self.memory.whole()
        return (whole if whole.dtype == self.dtype else whole.view(self.dtype)).as_strided(self.size, self.stride, self.offset)


_placed: list[Place] = []
"""A stack with the place for the saved tensors of each named part that is running, innermost last. One stack per process is enough, because
a forward does not pause inside a named part."""


class PlacedFunction:
    """A function that computes a named part of a block and whose saved tensors have a `place` of their own, independent of the block's
    place. torch.compile breaks its graph here, because the tensors that one compiled graph saves all get the same place."""

    def __init__(self, function: Callable[..., Any], *, place: Place) -> None:
        self.function = function
        self.place: Place = place

    @torch.compiler.disable(recursive=False)
    def __call__(self, *args: Any) -> Any:
        _placed.append(self.place)
        try:
            return self.function(*args)
        finally:
            _placed.pop()


def place_now(otherwise: Place) -> Place:
    """Return the place for tensors that are saved now. `otherwise`: the place for tensors that no named part saves."""
    return _placed[-1] if _placed else otherwise


class Shelf:
    """Saved tensors of one block and one microbatch that stay on the device."""

    moves = False
    """True if the saved tensors leave the device."""

    def saving(self) -> AbstractContextManager[object]:
        """Return a context in which autograd saves its tensors on this shelf. A computation must not pause inside this context."""
        return nullcontext()

    def put(self, tensor: Tensor) -> Tensor | SavedTensor:
        """Put a tensor on this shelf that autograd does not save itself."""
        return tensor

    def leave(self) -> None:
        """Begin to move the saved tensors off the device, at the end of the forward."""

    def fetch(self) -> None:
        """Begin to move all saved tensors back to the device, unless this has begun already."""


STAYS = Shelf()


class OffloadShelf(Shelf):
    """Saved tensors that leave the device when the block's forward has ended."""

    moves = True

    def __init__(self, tiers: Tiers, stays: frozenset[int], device: torch.device, *, rest: Place) -> None:
        """`stays`: the addresses of memory that stays on the device; `device`: the device that computes; `rest`: the place for tensors that
        no named part saves."""
        self._tiers, self._stays, self._device = tiers, stays, device
        self._rest: Place = rest
        self._memories: dict[int, _Memory] = {}  # by address, while the forward runs
        # On the device by a part that is named; held, so that no other memory gets an address of these.
        self._kept = list[Tensor]()
        self._left: list[weakref.ref[_Memory]] = []

    def saving(self) -> AbstractContextManager[object]:
        return saved_tensors_hooks(self.put, unpack_saved)

    def put(self, tensor: Tensor) -> Tensor | SavedTensor:
        storage = tensor.untyped_storage()
        address, size, each = storage._cdata, storage.nbytes(), tensor.element_size()
        if address in self._stays or not size or size % each or tensor.device != self._device:
            return tensor
        place = place_now(self._rest)
        if place == "device":
            self._kept.append(tensor.detach())
            return tensor
        if (memory := self._memories.get(address)) is None:
            # an as_strided view, not a copy: what is saved may still be written, such as a buffer that is filled piece by piece
            memory = self._memories[address] = _Memory(tensor.detach().as_strided((size // each,), (1,), 0), place)
        if place == "host":
            memory.place = place
        return SavedTensor(memory, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def leave(self) -> None:
        kept = {tensor.untyped_storage()._cdata for tensor in self._kept}  # nothing would be freed
        memories = [memory for address, memory in self._memories.items() if address not in kept]
        for place, tier in self._tiers.items():
            if leaving := [memory for memory in memories if memory.place == place]:
                copies = tier.put([memory.whole() for memory in leaving])
                for memory, copy in zip(leaving, copies, strict=True):
                    memory.leave(copy)
        self._left = [weakref.ref(memory) for memory in memories]
        self._memories, self._kept = {}, []

    def fetch(self) -> None:
        for left in self._left:
            if (memory := left()) is not None:
                memory.fetch()
        self._left = []


def unpack_saved(kept: Tensor | SavedTensor) -> Tensor:
    """Return a tensor from a shelf, on the device."""
    return kept.tensor() if isinstance(kept, SavedTensor) else kept


class Retention:
    """The parts of a stage, by number, whose saved tensors leave the device, and the tiers for these tensors."""

    def __init__(self, parts: Mapping[int, nn.Module], tiers: Tiers, device: torch.device, *, rest: Place) -> None:
        """`rest`: the place for saved tensors that belong to no named part of a block."""
        self._parts, self._tiers, self._device = parts, tiers, device
        self._rest: Place = rest

    def shelf(self, number: int, batch: Batch) -> Shelf:
        """Return an empty shelf for the forward of a part."""
        part = self._parts.get(number)
        if part is None or not torch.is_grad_enabled():
            return STAYS
        held = (*part.parameters(), *part.buffers(), *_tensors(batch))
        stays = frozenset(tensor.untyped_storage()._cdata for tensor in held)
        return OffloadShelf(self._tiers, stays, self._device, rest=self._rest)


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for each in value:
            yield from _tensors(each)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))
