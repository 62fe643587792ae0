"""Converts moments and master weights in few bits to fp32 for update rules, and back. An elementwise rule gets the fp32 numbers one piece
at a time."""

from collections.abc import Iterator, Sequence
from math import gcd
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megalith.kernels import moments
from megalith.kernels.halves import join, split
from megalith.spec.numbers import NUMBERS
from megalith.spec.state import LOWER, PIECES, Slot
from megalith.train.optimizers.global_tensors import Cut

if TYPE_CHECKING:
    from megalith.train.optimizers.rule import Part

WORD = 16
"""The number of bits by which an fp32 number is longer than a bf16 number."""
LANES = 64
"""Pieces are padded to whole SIMD vectors of this length. Kernels round the elements after the last whole vector differently, so without
padding the bits would depend on the size of pieces."""


class PackedState(NamedTuple):
    """Converts those tensors of one parameter that are in few bits to fp32 and back: moments, master weights in two halves, and the
    gradient."""

    name: str
    slots: tuple[Slot, ...]
    """The moments with the parameter's shape; some may be in fp32."""
    lower: Slot | None
    """The slot for the lower half of the master weights; None: master weights are in fp32."""
    number: int
    """The number of the update, which seeds stochastic rounding."""
    cut: Cut
    alone: bool
    """True if the rule is elementwise, so that a part may come in pieces."""
    target: str | None
    """The kind of device that determines the size of pieces; None: the kind on which the tensors are."""

    @classmethod
    def of(
        cls,
        name: str,
        slots: Sequence[Slot],
        number: int,
        cut: Cut,
        *,
        alone: bool,
        narrow: bool = False,
        target: str | None = None,
    ) -> "PackedState | None":
        """Return None if the moments, the master weights and the gradient are all in fp32. `narrow`: the gradient is not in fp32."""
        moments = tuple(slot for slot in slots if slot.shape == "like" and slot.category == "optimizer")
        lower = next((slot for slot in slots if slot in LOWER.values()), None)
        found = cls(name, moments, lower, number, cut, alone, target)
        return found if narrow or found.few else None

    @property
    def few(self) -> bool:
        """True if moments or master weights, and not only the gradient, are in few bits."""
        return self.lower is not None or any(slot.number != "fp32" for slot in self.slots)

    @property
    def masters(self) -> bool:
        """True if the master weights are in two halves."""
        return self.lower is not None

    def _piece(self, device: torch.device) -> int:
        return PIECES[self.target or device.type]

    def opened(self, part: "Part", *, weights_alone: bool = False) -> "Iterator[Part]":
        """Yield a part, or flat pieces of it, with moments and master weights in fp32. Changes to a piece are stored when the next one is
        requested. `weights_alone`: the caller does not need the moments."""
        if not self.few:
            yield from self._with_wide_gradient(part)
            return
        slots = () if weights_alone else self.slots
        if not part.weight.numel():
            weight = part.weight.float()
            yield part._replace(
                weight=weight,
                gradient=part.gradient.float(),
                slots={**part.slots, **{slot.name: torch.zeros_like(weight) for slot in slots}},
                small=None,
            )
            return
        columns = self.cut.sizes[-1]
        weight, gradient = part.weight.view(-1, columns), part.gradient.reshape(-1, columns)
        rows = rows_of(self.cut, weight.device)[part.first // columns :]
        kept = {slot: part.slots[slot.name].view(len(weight), -1) for slot in slots}
        lower = None if self.lower is None else part.slots[self.lower.name].view(-1, columns)
        grain = LANES // gcd(columns, LANES)  # rows of whole vectors
        step = max(grain, self._piece(weight.device) // columns // grain * grain) if self.alone else len(weight)
        for start in range(0, len(weight), step):
            here = slice(start, start + step)
            near = {slot: wide(slot, tensor[here], columns) for slot, tensor in kept.items()}
            master = weight[here] if lower is None else join(weight[here], lower[here])
            if self.alone:
                piece = part._replace(first=part.first + start * columns)
                yield from self._filled(piece, master, gradient[here].float(), near)
            else:
                held = {slot.name: moment.view_as(part.weight) for slot, moment in near.items()}
                gradient = part.gradient.float()
                yield part._replace(
                    weight=master.view_as(part.weight), gradient=gradient, slots={**part.slots, **held}, small=None
                )
            for slot, moment in near.items():
                self._keep(slot, moment, kept[slot][here], rows[here])
            if lower is not None:
                self._split(master, weight[here], lower[here], rows[here])

    def _with_wide_gradient(self, part: "Part") -> "Iterator[Part]":
        """Yield the part, or flat pieces of it, with the gradient in fp32. Pieces of state on disk need not consist of whole rows."""
        if not self.alone:
            yield part._replace(gradient=part.gradient.float(), small=None)
            return
        weight, gradient = part.weight.view(-1), part.gradient.reshape(-1)
        moments = {slot.name: part.slots[slot.name].view(-1) for slot in self.slots}
        piece = self._piece(weight.device)
        for start in range(0, len(weight), piece):
            here = slice(start, start + piece)
            near = {name: moment[here] for name, moment in moments.items()}
            slots, first = {**part.slots, **near}, part.first + start
            yield part._replace(weight=weight[here], gradient=gradient[here].float(), slots=slots, first=first, small=None)

    def _keep(self, slot: Slot, moment: Tensor, into: Tensor, rows: Tensor) -> None:
        if slot.number != "fp32":  # a wide one was changed where it is
            keep(moment, into, slot, name=self.name, number=self.number, rows=rows[: len(moment)], first=self.cut.offset[-1])

    def _split(self, master: Tensor, upper: Tensor, lower: Tensor, rows: Tensor) -> None:
        assert self.lower is not None
        bits, drawn = NUMBERS[self.lower.number].bits, None
        if bits < WORD:
            seed = moments.seed_of_draws(self.name, self.lower.name, self.number)
            drawn = moments.words(seed, rows[: len(master)], self.cut.offset[-1], master.shape[1])
        high, low = split(master, bits, drawn)
        upper.copy_(high)
        lower.copy_(low)

    def _filled(self, part: "Part", weight: Tensor, gradient: Tensor, near: dict[Slot, Tensor]) -> "Iterator[Part]":
        """Yield a flat piece. A flat piece whose moments are in few bits is padded to whole SIMD vectors; any other piece has the same
        length as with state in fp32."""
        few = any(slot.number != "fp32" for slot in near)
        numbers, missing = weight.numel(), -weight.numel() % LANES if few else 0
        whole = [
            F.pad(tensor.reshape(-1), (0, missing)) if missing else tensor.view(-1)
            for tensor in (weight, gradient, *near.values())
        ]
        slots = dict(zip((slot.name for slot in near), whole[2:], strict=True))
        yield part._replace(weight=whole[0], gradient=whole[1], slots=slots, small=None)
        if missing:
            for tensor, changed in zip((weight, *near.values()), (whole[0], *whole[2:]), strict=True):
                tensor.copy_(changed[:numbers].view_as(tensor))


def rows_of(cut: Cut, device: torch.device) -> Tensor:
    """Return the indices (int64) of a share's rows in the whole parameter."""
    return moments.rows_of(cut.shape, cut.offset, cut.sizes, device)


def keep(moment: Tensor, into: Tensor, slot: Slot, *, name: str, number: int, rows: Tensor, first: int) -> None:
    """Store rows of a moment (fp32 [rows, n]) in the slot's number format. `rows`: the indices of these rows in the whole parameter.
    `first`: the index of their first column. `number`: the number of the update, which seeds stochastic rounding."""
    if slot.number == "fp32":
        into.copy_(moment)
        return
    drawn = moments.words(moments.seed_of_draws(name, slot.name, number), rows, first, moment.shape[1])
    if slot.block:
        moments.pack(moment, into, slot.block, drawn, root=slot.root)
    else:
        moments.narrow(moment, into, drawn)


def wide(slot: Slot, kept: Tensor, columns: int) -> Tensor:
    """Return the stored rows `kept` of a moment in fp32, [rows, columns]."""
    return moments.unpack(kept, slot.block, columns, root=slot.root) if slot.block else kept.float()
