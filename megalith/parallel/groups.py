"""Process groups of the mesh of `megalith.mesh`.

Some of the started ranks may not train, so `world` is the group of the ranks that train, and a mesh numbers its ranks within `world`. In a
training run, only `train.run.join`, which makes `world`, and `Groups.build` use torch's default group.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megalith.mesh import EXPERTS, STATE, Mesh

Coordinates = dict[str, int]


@dataclass(frozen=True)
class Groups:
    """This rank's place on the mesh, and the process groups to which it belongs. All ranks build their `Groups` at the same time."""

    mesh: Mesh
    world: dist.ProcessGroup  # the ranks that train, in the mesh's order
    rank: int  # in `world`
    state: DeviceMesh  # this rank's (copies, shards, tensor): where the dense weights' shares lie
    experts: DeviceMesh  # this rank's (copies, shards, expert, expert_tensor): where the experts' shares lie
    data: dist.ProcessGroup  # data x context: the ranks that compute different tokens with the same part of the model
    context: dist.ProcessGroup
    sequence: dist.ProcessGroup  # context x tensor: the ranks that together see every token of a sequence
    tokens: dist.ProcessGroup  # data x context x tensor: the ranks that together see every token of a microbatch
    place: (
        dist.ProcessGroup
    )  # the ranks that hold the same stages: `tokens`, and in a bidirectional pipeline those of the mirror rank
    line: tuple[int, ...]  # the ranks of this rank's pipeline in `world`, first stage first
    ends: dist.ProcessGroup  # first and last pipeline rank, which both hold a tied embedding; a rank between them alone

    @classmethod
    def build(cls, mesh: Mesh, *, device: str, world: dist.ProcessGroup | None = None) -> "Groups":
        """Build this rank's groups. `world`: the group of the ranks that train; None: torch's default group, which must be initialised.
        Raises ValueError if `world` does not have `mesh.ranks` ranks."""
        world = world or dist.group.WORLD
        assert world is not None, "torch.distributed is not initialised"
        if world.size() != mesh.ranks:
            raise ValueError(f"the plan needs {mesh.ranks} ranks, but {world.size()} were started")
        rank = world.rank()
        here = mesh.coordinates(rank)
        line = [mesh.rank(here | {"pipeline": p}) for p in range(mesh.pipeline)]
        ends = sorted({line[0], line[-1]})

        def along(*axes: str) -> dist.ProcessGroup:
            return group_of(world, [r for r in range(mesh.ranks) if _same(mesh.coordinates(r), here, but=axes)])

        return cls(
            mesh=mesh,
            world=world,
            rank=rank,
            state=_device_mesh(world, device, STATE, mesh.state, mesh.state_coordinates),
            experts=_device_mesh(world, device, EXPERTS, mesh.experts, mesh.expert_coordinates),
            data=along("data", "context"),
            context=along("context"),
            sequence=along("context", "tensor"),
            tokens=along("data", "context", "tensor"),
            place=group_of(world, [r for r in range(mesh.ranks) if mesh.place(r) == mesh.place(rank)]),
            line=tuple(line),
            ends=group_of(world, ends if rank in ends else [rank]),
        )

    @cached_property
    def coordinates(self) -> Coordinates:
        """This rank's place on each axis of work; the places determine what the rank computes."""
        return self.mesh.coordinates(self.rank)

    @property
    def tensor(self) -> dist.ProcessGroup:
        return self.state.get_group("tensor")

    @property
    def expert(self) -> dist.ProcessGroup:
        """The ranks among which tokens are sent to their experts."""
        return self.experts.get_group("expert")

    @property
    def expert_tensor(self) -> dist.ProcessGroup:
        """The ranks that split each expert."""
        return self.experts.get_group("expert_tensor")


def _same(one: Coordinates, other: Coordinates, but: Sequence[str]) -> bool:
    return all(one[axis] == other[axis] for axis in one if axis not in but)


def _device_mesh(
    world: dist.ProcessGroup, device: str, axes: tuple[str, ...], sizes: tuple[int, ...], place: Callable[[int], Coordinates]
) -> DeviceMesh:
    """Return this rank's device mesh: the ranks of `world` with this rank's place on the first of `axes`, arranged along the other axes.

    Each rank makes only its own groups. If torch made the mesh, every rank would have to create the groups of all ranks.
    """
    here = place(world.rank())
    places = [place(rank) for rank in range(world.size())]
    lines = [[rank for rank, there in enumerate(places) if _same(there, here, but=[axis])] for axis in axes[1:]]
    groups = [world if len(line) == world.size() else group_of(world, line) for line in lines]
    everyone = dist.get_process_group_ranks(world)
    ranks = torch.empty(sizes[1:], dtype=torch.int)
    for rank, there in enumerate(places):
        if there[axes[0]] == here[axes[0]]:
            ranks[tuple(there[axis] for axis in axes[1:])] = everyone[rank]
    return DeviceMesh.from_group(groups, device, ranks, mesh_dim_names=axes[1:])


MESSAGES_ONLY = "messages"
"""Description of a group whose members send different numbers of messages. In such a group, the counts of messages do not show which rank
is late."""


def group_of(world: dist.ProcessGroup, ranks: Sequence[int], *, purpose: str | None = None) -> dist.ProcessGroup:
    """Make a process group of some ranks of `world`; only its members call this. With thousands of ranks, creating every group on every
    rank would take minutes.

    All ranks must create the same number of groups, because torch names groups by their count; otherwise later groups never form.
    """
    everyone = dist.get_process_group_ranks(world)
    return _made(dist.new_group([everyone[rank] for rank in ranks], use_local_synchronization=True, group_desc=purpose))


def another(world: dist.ProcessGroup, *, timeout: timedelta, purpose: str | None = None) -> dist.ProcessGroup:
    """Make a separate gloo group of all ranks of `world`, for CPU tensors, so that its messages do not wait for messages of other
    groups."""
    ranks = dist.get_process_group_ranks(world)
    return _made(dist.new_group(ranks, timeout, "gloo", use_local_synchronization=True, group_desc=purpose))


def _made(group: object) -> dist.ProcessGroup:
    assert isinstance(group, dist.ProcessGroup), "this rank is not in the group that it creates"
    return group


def ranks_in(world: dist.ProcessGroup, group: dist.ProcessGroup) -> list[int]:
    """Return the members of `group`, as ranks in `world`."""
    numbers = {global_rank: rank for rank, global_rank in enumerate(dist.get_process_group_ranks(world))}
    return [numbers[global_rank] for global_rank in dist.get_process_group_ranks(group)]


def wait_for(work: Any) -> None:
    """Wait for communication. A rank whose stack ends in this function waits for another rank; `control.watch` recognises it by the
    function's name."""
    work.wait()
