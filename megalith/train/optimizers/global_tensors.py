"""Gives update rules sums over whole tensors that are sharded over ranks, under every plan, with one all-reduce."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megalith.checkpoint.shares import box_of
from megalith.parallel.gradients import SharedParameters, counted
from megalith.parallel.groups import Groups
from megalith.spec.sizes import Parameter


class Cut(NamedTuple):
    """Location of this rank's share of a parameter in the whole parameter."""

    shape: tuple[int, ...]
    """The whole parameter's shape."""
    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    counted: bool = True
    """True on the first of the ranks that hold the same share. Only that first rank contributes the share to a sum over ranks."""

    @property
    def first_column(self) -> bool:
        """True if the share begins at the whole parameter's first column, as exactly one of the shares with the same rows does."""
        return not self.offset or self.offset[-1] == 0


class GlobalSum(NamedTuple):
    """This rank's term of a sum over ranks. The sum is a tensor of `shape`, and this rank adds `value` to the box that begins at
    `offset`."""

    name: str
    """The name of the parameter."""
    value: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    counts: bool = True
    """False: this rank does not add its value, because another rank adds the same value."""


@dataclass(frozen=True)
class GlobalTensors:
    """Computes sums over the whole tensors of which this rank holds shares. `cuts`: the location of this rank's share of each parameter."""

    cuts: Mapping[str, Cut]
    held: Mapping[str, Tensor]
    """The parameters as sharded tensors (DTensors), which describe the layout of the shares."""
    described: Mapping[str, Parameter] = field(default_factory=dict)
    """The model's description of its parameters, for rules that split a parameter into matrices."""
    groups: Groups | None = None
    """The process groups; None: this process holds every parameter whole."""
    tied: frozenset[str] = frozenset()
    """Names of parameters that both ends of the pipeline hold. Each end computes its own update of these parameters, and the two updates
    must be equal."""

    @classmethod
    def of(
        cls, parameters: Mapping[str, nn.Parameter], described: Mapping[str, Parameter], shared: SharedParameters, groups: Groups
    ) -> "GlobalTensors":
        """Build the object from this rank's shares. `described`: the description of each parameter, by its name in the whole model."""
        first = {name for name, p in parameters.items() if not isinstance(p, DTensor)}
        first.update(counted(parameters, SharedParameters(shared.partial, ()), groups))
        cuts = {name: _cut(name, parameter, name in first) for name, parameter in parameters.items()}
        return cls(cuts, parameters, described, groups, frozenset(shared.tied))

    @classmethod
    def alone(cls, parameters: Mapping[str, Tensor], described: Mapping[str, Parameter] | None = None) -> "GlobalTensors":
        """Build the object for one process that holds all parameters whole."""
        cuts = {name: Cut(tuple(p.shape), (0,) * p.dim(), tuple(p.shape)) for name, p in parameters.items()}
        return cls(cuts, parameters, described or {})

    def add_up(self, parts: Sequence[GlobalSum]) -> list[Tensor]:
        """For each term, return the term's box of the sum over all ranks, in fp64. One all-reduce computes all sums. The ranks of a
        pipeline place (with the same stages) call this together, with the same names and shapes in the same order."""
        if self.groups is None or self.groups.place.size() == 1 or not parts:
            return [part.value.double() for part in parts]
        sizes = [max(1, torch.Size(part.shape).numel()) for part in parts]
        packed = torch.zeros(sum(sizes), dtype=torch.float64, device=parts[0].value.device)
        boxes = [_box(flat, part) for flat, part in zip(packed.split(sizes), parts, strict=True)]
        for box, part in zip(boxes, parts, strict=True):
            if part.counts:
                box.copy_(part.value)
        dist.all_reduce(packed, group=self.groups.place)
        self._agree([box for box, part in zip(boxes, parts, strict=True) if part.name in self.tied])
        return boxes

    def _agree(self, boxes: list[Tensor]) -> None:
        if boxes and self.groups is not None and self.groups.ends.size() > 1:
            packed = torch.cat([box.flatten() for box in boxes])
            dist.all_reduce(packed, group=self.groups.ends)
            for box, both in zip(boxes, packed.split([box.numel() for box in boxes]), strict=True):
                box.copy_(both.view_as(box) / 2)


def squares(name: str, tensor: Tensor, cut: Cut) -> GlobalSum:
    """Return this share's terms for the sums of squares of the parameter's matrices (or of the vector), in fp64. Each expert is a matrix of
    its own."""
    dims = tuple(range(max(0, tensor.dim() - 2), tensor.dim()))
    total = torch.linalg.vector_norm(tensor, dim=dims or None, dtype=torch.float64).square_()
    return GlobalSum(name, total, cut.shape[:-2], cut.offset[:-2], cut.counted)


def _cut(name: str, parameter: nn.Parameter, first: bool) -> Cut:
    shape = tuple(parameter.shape)
    if not isinstance(parameter, DTensor):
        return Cut(shape, (0,) * len(shape), shape, first)
    place = parameter.device_mesh.get_coordinate()
    assert place is not None
    return Cut(shape, *box_of(name, parameter, place), first)


def _box(flat: Tensor, part: GlobalSum) -> Tensor:
    found = flat.view(part.shape)
    for dim, (start, size) in enumerate(zip(part.offset, part.value.shape, strict=True)):
        found = found.narrow(dim, start, size)
    return found
