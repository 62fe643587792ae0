"""Moments in few bits, opened for an update: fp32 for as long as a rule looks at them, a piece at a time where it may."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megalith.kernels import moments
from megalith.spec.state import Slot
from megalith.train.optimizers.rule import Part
from megalith.train.optimizers.whole import Cut

PIECE = 1 << 18
"""About how many numbers of a part are wide at once, where each is updated by itself: they stay in a processor's cache."""
LANES = 64
"""A piece is filled up to whole vectors: kernels round what is left behind them in another way, and then a cut would decide about bits."""


class Small(NamedTuple):
    """Opens the slots of one parameter that are kept in few bits."""

    name: str
    slots: tuple[Slot, ...]
    number: int
    """The update, which draws of stochastic rounding depend on."""
    cut: Cut
    alone: bool
    """True if each element is updated by itself, so that a part may come in pieces."""

    @classmethod
    def of(cls, name: str, slots: Sequence[Slot], number: int, cut: Cut, *, alone: bool) -> "Small | None":
        """None if all slots are wide."""
        few = tuple(slot for slot in slots if slot.shape == "like" and slot.number != "fp32")
        return cls(name, few, number, cut, alone) if few else None

    def opened(self, part: Part) -> Iterator[Part]:
        """Yield a part, or a flat piece of one, with its moments in fp32. Changes are kept once the next is asked for."""
        if not part.weight.numel():
            yield part._replace(
                slots={**part.slots, **{slot.name: torch.zeros_like(part.weight) for slot in self.slots}}, small=None
            )
            return
        columns = self.cut.sizes[-1]
        weight, gradient = part.weight.view(-1, columns), part.gradient.reshape(-1, columns)
        rows = rows_of(self.cut, weight.device)[part.first // columns :]
        kept = {slot: part.slots[slot.name].view(len(weight), -1) for slot in self.slots}
        step = max(1, PIECE // columns) if self.alone else len(weight)
        for start in range(0, len(weight), step):
            here = slice(start, start + step)
            near = {slot: wide(slot, tensor[here], columns) for slot, tensor in kept.items()}
            if self.alone:
                yield from _filled(part, weight[here], gradient[here], near)
            else:
                slots = {slot.name: moment.view_as(part.weight) for slot, moment in near.items()}
                yield part._replace(slots={**part.slots, **slots}, small=None)
            for slot, moment in near.items():
                self._keep(slot, moment, kept[slot][here], rows[here])

    def _keep(self, slot: Slot, moment: Tensor, into: Tensor, rows: Tensor) -> None:
        keep(moment, into, slot, name=self.name, number=self.number, rows=rows[: len(moment)], first=self.cut.offset[-1])


def rows_of(cut: Cut, device: torch.device) -> Tensor:
    """The numbers (int64) of a share's rows among those of its whole parameter."""
    return moments.rows_of(cut.shape, cut.offset, cut.sizes, device)


def keep(moment: Tensor, into: Tensor, slot: Slot, *, name: str, number: int, rows: Tensor, first: int) -> None:
    """Keep rows of a moment (fp32 [rows, n]) in the slot's number format. `rows`: their numbers in the whole parameter. `first`: the
    column that they begin with. `number`: the update."""
    if slot.number == "fp32":
        into.copy_(moment)
        return
    drawn = moments.words(moments.seed_of_draws(name, slot.name, number), rows, first, moment.shape[1])
    if slot.block:
        moments.pack(moment, into, slot.block, drawn, root=slot.root)
    else:
        moments.narrow(moment, into, drawn)


def wide(slot: Slot, kept: Tensor, columns: int) -> Tensor:
    """Rows of a moment in fp32, [rows, columns]."""
    return moments.unpack(kept, slot.block, columns, root=slot.root) if slot.block else kept.float()


def _filled(part: Part, weight: Tensor, gradient: Tensor, near: dict[Slot, Tensor]) -> Iterator[Part]:
    """Yield a piece of whole vectors, flat."""
    numbers, missing = weight.numel(), -weight.numel() % LANES
    whole = [
        F.pad(tensor.reshape(-1), (0, missing)) if missing else tensor.view(-1) for tensor in (weight, gradient, *near.values())
    ]
    slots = dict(zip((slot.name for slot in near), whole[2:], strict=True))
    yield part._replace(weight=whole[0], gradient=whole[1], slots=slots, small=None)
    if missing:
        for tensor, changed in zip((weight, *near.values()), (whole[0], *whole[2:]), strict=True):
            tensor.copy_(changed[:numbers].view_as(tensor))
