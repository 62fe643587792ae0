"""The place of a parameter's shares: on which mesh, and along which of its dimensions."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard


@dataclass(frozen=True)
class Place:
    """Location of a parameter's shares. The axes of `mesh` are the copies, the shards, and then the axes that split the computation;
    `split` says how each of the latter splits the parameter."""

    mesh: DeviceMesh
    split: tuple[Placement, ...]
    dim: int = 0  # along which the shards cut it

    def placements(self) -> tuple[Placement, ...]:
        """Placements of the sharded (master) DTensor. The axes of `split` cut the parameter first, and the shard axis cuts the resulting
        pieces; if both cut the same dimension, the placement is a strided shard."""
        parts = [self.mesh.size(2 + axis) for axis, p in enumerate(self.split) if isinstance(p, Shard) and p.dim == self.dim]
        factor = prod(parts)
        shard = _StridedShard(self.dim, split_factor=factor) if factor > 1 else Shard(self.dim)
        return (Replicate(), shard, *self.split)

    def shape(self, computes: Sequence[int]) -> tuple[int, ...]:
        """Return the whole parameter's shape, from the shape of the compute tensor."""
        sizes = list(computes)
        for axis, placement in enumerate(self.split):
            if isinstance(placement, Shard):
                sizes[placement.dim] *= self.mesh.size(2 + axis)
        return tuple(sizes)
