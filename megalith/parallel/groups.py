"""The mesh of `megalith.mesh` as process groups."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megalith.mesh import EXPERTS, STATE, Mesh

Coordinates = dict[str, int]


@dataclass(frozen=True)
class Groups:
    """This rank's place on the mesh and the process groups it is in. All ranks build theirs at the same time."""

    mesh: Mesh
    rank: int
    state: DeviceMesh  # this rank's (copies, shards, tensor): where the dense weights' shares lie
    experts: DeviceMesh  # this rank's (copies, shards, expert, expert_tensor): where the experts' shares lie
    data: dist.ProcessGroup  # data x context: the ranks that compute different tokens with the same part of the model
    context: dist.ProcessGroup
    sequence: dist.ProcessGroup  # context x tensor: the ranks that together see every token of a sequence
    tokens: dist.ProcessGroup  # data x context x tensor: the ranks that together see every token of a microbatch
    place: (
        dist.ProcessGroup
    )  # the ranks that hold the same stages: `tokens`, and in a bidirectional pipeline those of the mirror rank
    line: tuple[int, ...]  # the ranks of this rank's pipeline, first stage first
    ends: dist.ProcessGroup  # first and last pipeline rank, which both hold a tied embedding; a rank between them alone

    @classmethod
    def build(cls, mesh: Mesh, *, device: str) -> "Groups":
        """Needs an initialised default process group; raises ValueError if it has not `mesh.ranks` ranks."""
        if dist.get_world_size() != mesh.ranks:
            raise ValueError(f"the plan needs {mesh.ranks} ranks, {dist.get_world_size()} were started")
        rank = dist.get_rank()
        here = mesh.coordinates(rank)
        line = [mesh.rank(here | {"pipeline": p}) for p in range(mesh.pipeline)]
        ends = sorted({line[0], line[-1]})

        def along(*axes: str) -> dist.ProcessGroup:
            return group_of([r for r in range(mesh.ranks) if _same(mesh.coordinates(r), here, but=axes)])

        return cls(
            mesh=mesh,
            rank=rank,
            state=_device_mesh(mesh, rank, device, STATE, mesh.state, mesh.state_coordinates),
            experts=_device_mesh(mesh, rank, device, EXPERTS, mesh.experts, mesh.expert_coordinates),
            data=along("data", "context"),
            context=along("context"),
            sequence=along("context", "tensor"),
            tokens=along("data", "context", "tensor"),
            place=group_of([r for r in range(mesh.ranks) if mesh.place(r) == mesh.place(rank)]),
            line=tuple(line),
            ends=group_of(ends if rank in ends else [rank]),
        )

    @cached_property
    def coordinates(self) -> Coordinates:
        """What this rank computes: its place on each axis of work."""
        return self.mesh.coordinates(self.rank)

    @property
    def tensor(self) -> dist.ProcessGroup:
        return self.state.get_group("tensor")

    @property
    def expert(self) -> dist.ProcessGroup:
        """The ranks among which tokens travel to their experts."""
        return self.experts.get_group("expert")

    @property
    def expert_tensor(self) -> dist.ProcessGroup:
        """The ranks that split each expert."""
        return self.experts.get_group("expert_tensor")


def _same(one: Coordinates, other: Coordinates, but: Sequence[str]) -> bool:
    return all(one[axis] == other[axis] for axis in one if axis not in but)


def _device_mesh(
    mesh: Mesh, rank: int, device: str, axes: tuple[str, ...], sizes: tuple[int, ...], place: Callable[[int], Coordinates]
) -> DeviceMesh:
    """The ranks as an array over `axes`; this rank's slice of it along all but the first."""
    ranks = torch.empty(sizes, dtype=torch.int)
    for other in range(mesh.ranks):
        ranks[tuple(place(other).values())] = other
    return DeviceMesh(device, ranks, mesh_dim_names=axes)[axes[1:]]


MESSAGES_ONLY = "messages"
"""Describes a group whose members send each other messages, not all equally many: how many they began says nothing of who is late."""


def group_of(ranks: Sequence[int], *, purpose: str | None = None) -> dist.ProcessGroup:
    """A process group, made by its members alone: with thousands of ranks, making every group on every rank would take minutes.

    All ranks must make equally many, each its own, or those that follow never form: torch names them by their count.
    """
    group = dist.new_group(list(ranks), use_local_synchronization=True, group_desc=purpose)
    assert isinstance(group, dist.ProcessGroup), "called by a rank outside the group"
    return group


def wait_for(work: Any) -> None:
    """Wait for what travels, in a call whose name says so: a rank whose stack ends here waits for another (`control.watch`)."""
    work.wait()
