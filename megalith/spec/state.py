"""Tensors that a rank keeps for a parameter: their number format, place and sharding. All arithmetic of bytes per parameter is
here. No torch."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

from megalith.spec.numbers import NUMBERS

Category: TypeAlias = Literal["weights", "gradients", "optimizer"]
CATEGORIES: tuple[Category, ...] = ("weights", "gradients", "optimizer")
Place: TypeAlias = Literal["device", "host", "disk"]
Shape: TypeAlias = Literal["like", "row", "column"]
DISK_SLOTS = 3
"""Number of files of the size of a rank's whole state that `plan.state` may need on disk: the file in use, the file that an
update writes, and a third while a checkpoint refers to one of the two."""


class Slot(NamedTuple):
    """A tensor that is kept for each parameter and sharded over ranks like the parameter."""

    name: str
    """First part of the tensor's key in checkpoints and copies, which is `NAME.PARAMETER`."""
    number: str = "fp32"
    """The tensor's number format, a row of `spec.numbers`."""
    shape: Shape = "like"
    """`like` is the parameter's shape, `row` the shape without the last dimension, `column` the shape without the dimension
    before the last one."""
    category: Category = "optimizer"
    zero: int = 1
    """The lowest ZeRO stage under which data ranks shard the tensor (Rajbhandari et al. 2019, arXiv:1910.02054)."""
    lasting: bool = True
    """True if training needs the tensor in order to resume, so that checkpoints, copies and digests include it."""
    root: bool = False
    """True for a second moment, whose square root is stored in 8-bit formats, because the root needs half the range of
    exponents."""
    block: int = 0
    """How many numbers along the last dimension share a scale of one byte, which is stored after the codes; 0: no scale."""
    place: Place = "device"
    """The place of a tensor of merges (`sites.place`); the plan decides the places of all other tensors (`plan.state`)."""

    def shape_of(self, parameter: Sequence[int]) -> tuple[int, ...]:
        """Shape of the slot's tensor for a parameter, or share of a parameter, of this shape. A share must consist of whole
        blocks."""
        shape = tuple(size for dim, size in enumerate(parameter) if dim != self.dropped(len(parameter)))
        return (*shape[:-1], shape[-1] + -(-shape[-1] // self.block)) if self.block else shape

    @property
    def bytes(self) -> float:
        """Bytes of one number, including its share of a block's scale."""
        return NUMBERS[self.number].bytes + (1 / self.block if self.block else 0)

    def dropped(self, dims: int) -> int | None:
        """The dimension of a parameter with `dims` dimensions that the slot's tensor lacks; None if it lacks none."""
        if self.shape == "like" or dims < 2:
            return None
        return dims - (1 if self.shape == "row" else 2)


class Moments(NamedTuple):
    """Number format of an optimizer's moments, for moments with the shape of their parameter."""

    number: str = "fp32"
    """`fp32`, `bf16` or `fp8`."""
    block: int = 128
    """With fp8: how many numbers along the last dimension share a scale."""
    least: int = 4096
    """Parameters with fewer elements keep moments in fp32."""

    def of(self, slots: Iterable[Slot]) -> tuple[Slot, ...]:
        """Return an optimizer's slots for a large matrix."""
        if self.number == "fp32":
            return tuple(slots)
        block = self.block if self.number == "fp8" else 0
        return tuple(slot._replace(number=self.number, block=block) if slot.shape == "like" else slot for slot in slots)


WIDE = Moments()
"""Moments in fp32."""
MASTER = Slot("weights", category="weights")
"""Master weights, which updates change."""
MasterForm: TypeAlias = Literal["fp32", "split16", "split8"]
LOWER: Mapping[str, Slot] = {
    "split16": Slot("lower", number="int16", category="weights", lasting=False),
    "split8": Slot("lower", number="int8", category="weights", lasting=False),
}
"""Lower bits of split master weights, whose upper bits are the compute weight (`kernels.halves`). Checkpoints contain upper and
lower bits joined, as fp32 master weights."""
UPPER = Slot("upper", number="bf16", category="weights", lasting=False)
"""A rank's shard of the upper bits of split master weights, if compute weights are gathered from shards."""
PIECES: Mapping[str, int] = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Approximate number of elements that an element-wise update expands from 8 or 16 bits to fp32 at a time, by kind of device. On a
CPU, this many elements fit the cache; on a GPU, a kernel on this many takes longer than its launch. This number of elements does
not affect the result."""
GRADIENT = Slot("gradients", category="gradients", zero=2, lasting=False)
"""Gradients summed over microbatches, from the first backward of a step to its update."""


def compute(number: str) -> Slot:
    """Return the slot of the compute weights in the format `number`."""
    return Slot("compute", number=number, category="weights", zero=3, lasting=False)


def gradient(number: str) -> Slot:
    """Return the slot of gradient sums in the format `number`."""
    return GRADIENT._replace(number=number)


def kept(number: str, optimizer: Iterable[Slot], *, master: str = "fp32", gradients: str = "fp32") -> tuple[Slot, ...]:
    """Return all slots of a run that computes in the format `number`, keeps master weights in the form `master`, and adds up
    gradients in the format `gradients`."""
    return (compute(number), LOWER.get(master, MASTER), gradient(gradients), *optimizer)


def bytes_each(slots: Iterable[Slot]) -> float:
    """Return the unsharded bytes of these slots per element of a parameter. Slots with only a row or column are neglected."""
    return sum(slot.bytes for slot in slots if slot.shape == "like")


def lasting(slots: Iterable[Slot]) -> tuple[Slot, ...]:
    """Return the slots whose tensors training needs in order to resume."""
    return tuple(slot for slot in slots if slot.lasting)


def bytes_of(slots: Iterable[Slot], parameters: float, *, zero: int, shards: int) -> dict[Category, float]:
    """Return the bytes of these slots on one rank, by category, if ZeRO stage `zero` shards `parameters` elements over `shards`
    data ranks."""
    found: dict[Category, float] = dict.fromkeys(CATEGORIES, 0.0)
    for slot in slots:
        found[slot.category] += bytes_each([slot]) * parameters / (shards if zero >= slot.zero else 1)
    return found


def away_names(sizes: Mapping[str, int], share: float) -> list[str]:
    """Return the names of the parameters whose state leaves the device, which have at most `share` of all elements. `sizes`: the
    number of elements of each parameter on this rank. Larger parameters are chosen first."""
    left, found = share * sum(sizes.values()), set[str]()
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        if 0 < sizes[name] <= left + 1e-6:
            left -= sizes[name]
            found.add(name)
    return [name for name in sizes if name in found]
