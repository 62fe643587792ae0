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
"""Number of files that each hold all of a rank's state on disk: the file in use, the file that an update writes, and a
replacement for a file that a checkpoint holds."""


class Slot(NamedTuple):
    """One tensor that is kept for each parameter. It is sharded over the ranks like its parameter."""

    name: str
    """The tensor's key in checkpoints and copies is `NAME.PARAMETER`."""
    number: str = "fp32"
    """The tensor's number format, a row of `spec.numbers`."""
    shape: Shape = "like"
    """`row` leaves out the parameter's last dimension, `column` the one before it; a parameter of fewer dimensions keeps its shape."""
    category: Category = "optimizer"
    zero: int = 1
    """The lowest ZeRO stage under which data ranks shard the tensor (Rajbhandari et al. 2019, arXiv:1910.02054)."""
    lasting: bool = True
    """True if training resumes from the tensor, which is then in checkpoints, copies and digests."""
    root: bool = False
    """True for a mean of squares: in 8 bits its square root is stored, because the root's exponents span half the range."""
    block: int = 0
    """Numbers along the last dimension that share a scale of one byte, stored after their codes; 0: no scale."""
    place: Place = "device"
    """The place of a tensor of merges (`sites.place`); the plan decides the places of all others (`plan.state`)."""

    def shape_of(self, parameter: Sequence[int]) -> tuple[int, ...]:
        """The slot's shape for a parameter of this shape, or for a share of a parameter that no block of a scale crosses."""
        shape = tuple(size for dim, size in enumerate(parameter) if dim != self.dropped(len(parameter)))
        return (*shape[:-1], shape[-1] + -(-shape[-1] // self.block)) if self.block else shape

    @property
    def bytes(self) -> float:
        """Bytes of one number, with its share of a scale."""
        return NUMBERS[self.number].bytes + (1 / self.block if self.block else 0)

    def dropped(self, dims: int) -> int | None:
        """The dimension that the slot leaves out of a parameter with `dims` dimensions; None: it leaves none out."""
        if self.shape == "like" or dims < 2:
            return None
        return dims - (1 if self.shape == "row" else 2)


class Moments(NamedTuple):
    """Number format of moments that have the shape of their parameter."""

    number: str = "fp32"
    """`fp32`, `bf16` or `fp8`."""
    block: int = 128
    """fp8: numbers along the last dimension that share a scale."""
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
"""The weights that updates change."""
MasterForm: TypeAlias = Literal["fp32", "split16", "split8"]
LOWER: Mapping[str, Slot] = {
    "split16": Slot("lower", number="int16", category="weights", lasting=False),
    "split8": Slot("lower", number="int8", category="weights", lasting=False),
}
"""The lower half of master weights whose upper half is the compute weight (`kernels.halves`). Checkpoints hold both halves
joined, as master weights in fp32."""
UPPER = Slot("upper", number="bf16", category="weights", lasting=False)
"""A rank's share of the upper half, if the compute weights are gathered from it."""
PIECES: Mapping[str, int] = {"cpu": 1 << 18, "cuda": 1 << 24}
"""By kind of device: approximate number of elements that an element-wise update expands to fp32 at a time, if the state is in
few bits. On a CPU these elements fit the cache. On a GPU the kernel takes longer than its launch. The number changes no bit
of the result."""
GRADIENT = Slot("gradients", category="gradients", zero=2, lasting=False)
"""The sums of gradients, from the first backward of a step to its update."""


def compute(number: str) -> Slot:
    """Return the slot of the compute weights, in the format of the products."""
    return Slot("compute", number=number, category="weights", zero=3, lasting=False)


def gradient(number: str) -> Slot:
    """Return the slot of gradient sums in the format `number`."""
    return GRADIENT._replace(number=number)


def kept(number: str, optimizer: Iterable[Slot], *, master: str = "fp32", gradients: str = "fp32") -> tuple[Slot, ...]:
    """Return all slots of a run that computes in the format `number`, keeps master weights in the form `master`, and adds up
    gradients in the format `gradients`."""
    return (compute(number), LOWER.get(master, MASTER), gradient(gradients), *optimizer)


def bytes_each(slots: Iterable[Slot]) -> float:
    """Return the bytes of these slots per parameter, unsharded. Slots with a row or a column of a matrix are neglected."""
    return sum(slot.bytes for slot in slots if slot.shape == "like")


def lasting(slots: Iterable[Slot]) -> tuple[Slot, ...]:
    """Return the slots that training resumes from: those that a checkpoint holds and an update changes."""
    return tuple(slot for slot in slots if slot.lasting)


def bytes_of(slots: Iterable[Slot], parameters: float, *, zero: int, shards: int) -> dict[Category, float]:
    """Return the bytes of these slots on one rank, by category, for a number of parameters that ZeRO stage `zero` shards over
    `shards` data ranks."""
    found: dict[Category, float] = dict.fromkeys(CATEGORIES, 0.0)
    for slot in slots:
        found[slot.category] += bytes_each([slot]) * parameters / (shards if zero >= slot.zero else 1)
    return found


def away_names(sizes: Mapping[str, int], share: float) -> list[str]:
    """Return, in the order of `sizes`, the parameters whose state leaves the device: together at most about `share` of all
    elements. `sizes`: each parameter's number of elements on this rank; a parameter with none stays. The largest parameter
    that still fits is chosen first."""
    left, found = share * sum(sizes.values()), set[str]()
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        if 0 < sizes[name] <= left + 1e-6:
            left -= sizes[name]
            found.add(name)
    return [name for name in sizes if name in found]
