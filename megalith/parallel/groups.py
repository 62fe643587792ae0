"""The mesh of `megalith.mesh` as process groups."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megalith.mesh import AXES, Mesh


@dataclass(frozen=True)
class Groups:
    """This rank's place on the mesh and the process groups it is in. All ranks build theirs at the same time."""

    mesh: Mesh
    rank: int
    device_mesh: DeviceMesh
    data: dist.ProcessGroup  # copies x shards: the ranks that read different samples
    line: tuple[int, ...]  # the ranks of this rank's pipeline, first stage first
    ends: dist.ProcessGroup  # first and last pipeline rank, which both hold a tied embedding; a rank between them alone

    @classmethod
    def build(cls, mesh: Mesh, *, device: str) -> "Groups":
        """Needs an initialised default process group; raises ValueError if it has not `mesh.ranks` ranks."""
        if dist.get_world_size() != mesh.ranks:
            raise ValueError(f"the plan needs {mesh.ranks} ranks, {dist.get_world_size()} were started")
        rank = dist.get_rank()
        here = mesh.coordinates(rank)
        data = [r for r in range(mesh.ranks) if {**mesh.coordinates(r), **_data(here)} == here]
        line = [mesh.rank(here | {"pipeline": p}) for p in range(mesh.pipeline)]
        ends = sorted({line[0], line[-1]})
        return cls(
            mesh=mesh,
            rank=rank,
            device_mesh=init_device_mesh(device, mesh.shape, mesh_dim_names=AXES),
            data=group_of(data),
            line=tuple(line),
            ends=group_of(ends if rank in ends else [rank]),
        )

    @cached_property
    def coordinates(self) -> dict[str, int]:
        """This rank's place on each axis."""
        return self.mesh.coordinates(self.rank)

    @property
    def tensor(self) -> dist.ProcessGroup:
        return self.device_mesh.get_group("tensor")


def _data(place: dict[str, int]) -> dict[str, int]:
    return {axis: place[axis] for axis in ("copies", "shards", "data")}


def group_of(ranks: Sequence[int]) -> dist.ProcessGroup:
    """A process group, made by its members alone: with thousands of ranks, making every group on every rank would take minutes.

    All ranks must make equally many, each its own, or those that follow never form: torch names them by their count.
    """
    group = dist.new_group(list(ranks), use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup), "called by a rank outside the group"
    return group
