"""Tensors that this rank keeps for its parameters between two steps: those of the state table (`spec.state`), by slot and by parameter."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from megalith.kernels.numbers import DTYPE
from megalith.parallel.data import local
from megalith.spec.state import GRADIENT, MASTER, Category, Slot, bytes_each
from megalith.train.optimizers.rule import Part
from megalith.train.stability.history import History
from megalith.train.stability.loss_scale import Scale

SCALE = "loss_scale"
"""Key of the loss scale and its counters: fp32 [4], the fields of `Scale`, the same on every rank."""


class State:
    """This rank's shares, in the memory that training changes. A key is `SLOT.PARAMETER`, as in checkpoints and copies."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        buffers: Mapping[str, Tensor],
        slots: Mapping[str, Sequence[Slot]],
        scale: Scale | None = None,
    ) -> None:
        """`buffers`: tensors that training changes besides parameters, such as routers' biases. `slots`: the tensors that the optimizer
        keeps for each parameter; they begin as zeros. `scale`: the first loss scale; None: the run has none."""
        self.parameters, self.buffers, self.slots = parameters, buffers, slots
        self.updates = 0
        """Updates made: what bias correction and the learning rate follow."""
        self.skipped = 0
        """Updates left out: steps tried are both together."""
        self.history = History()
        """Numbers of the last updates, and what is known of spikes: a part of the run's position."""
        self.scaling: dict[str, Tensor] = {}
        """The loss scale as checkpoints, copies and digests hold it; empty if the run has none."""
        self._scale = scale
        self._weights = {name: local(parameter).detach() for name, parameter in parameters.items()}
        self._slots = tuple(dict.fromkeys(slot for name in self._weights for slot in slots[name]))
        self._kept = {
            slot.name: {name: _zeros(slot, share) for name, share in self._weights.items() if slot in slots[name]}
            for slot in self._slots
        }
        if scale is not None:
            device = next(iter(self._weights.values())).device
            self.scaling[SCALE] = torch.tensor(scale, dtype=torch.float32, device=device)

    @property
    def scale(self) -> Scale | None:
        """The loss scale of the next step; None: the run has none."""
        return self._scale

    @scale.setter
    def scale(self, scale: Scale | None) -> None:
        if scale is not None:
            self.scaling[SCALE].copy_(torch.tensor(scale, dtype=torch.float32))
        self._scale = scale

    def read_scale(self) -> None:
        """Take the loss scale from its tensor, which was loaded."""
        if self.scaling:
            self._scale = Scale(*map(int, self.scaling[SCALE].tolist()))

    @property
    def unusable(self) -> int:
        """Updates left out that count against `stability.skips`: all but those of spikes, and of gradients that overflowed at some
        loss scale."""
        return self.skipped - self.history.left_out - (self._scale.overflows if self._scale is not None else 0)

    def parts(self) -> list[Part]:
        """Return every parameter's share on this rank, with its gradient. A share that is empty here may have none."""
        parts = []
        for name, weight in self._weights.items():
            gradient = self.parameters[name].grad
            assert gradient is not None or not weight.numel(), f"{name} is a parameter without gradient"
            kept = {slot.name: self._kept[slot.name][name] for slot in self.slots[name]}
            parts.append(Part(name, weight, torch.zeros_like(weight) if gradient is None else local(gradient), kept))
        return parts

    def changed(self) -> list[Tensor]:
        """The shares that an update changes."""
        return [*self._weights.values(), *(share for kept in self._kept.values() for share in kept.values())]

    def drop_gradients(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def shares(self, *categories: Category) -> dict[str, Tensor]:
        """The shares as plain tensors, buffers among the weights. `categories`: of these alone, without the loss scale."""
        return {f"{slot.name}.{name}": share for slot, name, share, _ in self._walk(categories)} | self._scaling_of(categories)

    def tensors(self, *categories: Category) -> dict[str, Tensor]:
        """The same as tensors of whole shapes that know how they are cut: what a checkpoint holds."""
        found = {f"{slot.name}.{name}": like(slot, share, whole) for slot, name, share, whole in self._walk(categories)}
        return found | self._scaling_of(categories)

    def _scaling_of(self, categories: Sequence[Category]) -> dict[str, Tensor]:
        return {} if categories else self.scaling

    def bytes(self) -> dict[str, int]:
        """Bytes of the shares, by category. Gradients are counted as they are when all are there; buffers are not counted."""
        numbers = sum(share.numel() for share in self._weights.values())
        kept = (share for slot in self._kept.values() for share in slot.values())
        return {
            MASTER.category: sum(map(_bytes, self._weights.values())),
            GRADIENT.category: int(numbers * bytes_each([GRADIENT])),
            "optimizer": sum(map(_bytes, kept)),
        }

    def _walk(self, categories: Sequence[Category]) -> Iterator[tuple[Slot, str, Tensor, Tensor]]:
        """Slot, parameter, this rank's share, and the tensor whose cut it has."""
        if not categories or MASTER.category in categories:
            for name, share in self._weights.items():
                yield MASTER, name, share, self.parameters[name]
            for name, buffer in self.buffers.items():
                yield MASTER, name, buffer, buffer
        for slot in self._slots:
            if not categories or slot.category in categories:
                for name, share in self._kept[slot.name].items():
                    yield slot, name, share, self.parameters[name]


def _bytes(share: Tensor) -> int:
    return share.numel() * share.element_size()


def _zeros(slot: Slot, share: Tensor) -> Tensor:
    """A slot's share before the first update: plain memory like the parameter's share."""
    if slot.dropped(share.dim()) is None:
        return torch.zeros_like(share, dtype=DTYPE[slot.number])
    return share.new_zeros(slot.shape_of(share.shape), dtype=DTYPE[slot.number])


def like(slot: Slot, share: Tensor, parameter: Tensor) -> Tensor:
    """`share` as a tensor of the slot's whole shape for `parameter`, cut as that is."""
    if not isinstance(parameter, DTensor):
        return share
    dropped = slot.dropped(parameter.dim())
    if dropped is None:
        placements, shape, stride = parameter.placements, parameter.shape, parameter.stride()
    else:
        placements = [_without(dropped, placement) for placement in parameter.placements]
        shape = torch.Size(slot.shape_of(parameter.shape))
        stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(share, parameter.device_mesh, placements, run_check=False, shape=shape, stride=stride)


def _without(dropped: int, placement: Placement) -> Placement:
    """How a tensor is cut that lacks one dimension of another which is cut by `placement`."""
    if not isinstance(placement, Shard | _StridedShard):
        return placement
    if placement.dim == dropped:
        return Replicate()
    dim = placement.dim - (placement.dim > dropped)
    return _StridedShard(dim, split_factor=placement.split_factor) if isinstance(placement, _StridedShard) else Shard(dim)
