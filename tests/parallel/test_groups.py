"""The mesh as process groups: every rank finds the members of its groups."""

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megalith.mesh import Mesh
from megalith.parallel.groups import Groups, group_of, ranks_in
from tests.ranks import everyone, run_ranks


def _members(rank: int, mesh: Mesh) -> dict[str, list[int]]:
    groups = Groups.build(mesh, device="cpu")
    dist.barrier()  # a rank that ended now would break another rank's connection to it
    assert groups.rank == rank
    found = {"data": groups.data, "tensor": groups.tensor, "ends": groups.ends}
    return {name: dist.get_process_group_ranks(group) for name, group in found.items()} | {"line": list(groups.line)}


@pytest.mark.slow
def test_ranks_of_three_axes_find_each_other():
    found = run_ranks(_members, 8, Mesh(pipeline=2, data=2, tensor=2))
    assert found[0] == {"data": [0, 2], "tensor": [0, 1], "line": [0, 4], "ends": [0, 4]}
    assert found[7] == {"data": [5, 7], "tensor": [6, 7], "line": [3, 7], "ends": [3, 7]}


@pytest.mark.slow
def test_ranks_that_compute_different_tokens_are_data_times_context():
    found = run_ranks(_members, 4, Mesh(data=2, context=2))
    assert all(one["data"] == [0, 1, 2, 3] for one in found)


@pytest.mark.slow
def test_a_rank_between_the_ends_of_a_pipeline_shares_no_tied_table():
    found = run_ranks(_members, 3, Mesh(pipeline=3))
    assert [one["ends"] for one in found] == [[0, 2], [1], [0, 2]]


def _too_few(rank: int) -> None:
    with pytest.raises(ValueError, match="the plan needs 4 ranks, but 2 were started"):
        Groups.build(Mesh(tensor=4), device="cpu")


def test_another_number_of_ranks_than_the_plan_needs_is_refused():
    run_ranks(_too_few, 2)


def _outsider(rank: int) -> None:
    if rank == 0:
        group_of(everyone(), [0])
    else:
        with pytest.raises((AssertionError, ValueError)):
            group_of(everyone(), [0])


def test_a_group_is_made_by_its_members_alone():
    run_ranks(_outsider, 2)


def _all_of(rank: int, mesh: Mesh, first: int) -> dict[str, list[int]]:
    """Return the members of each of this rank's groups, numbered from rank `first`."""
    if rank < first:
        return {}
    world = everyone() if not first else dist.new_group(list(range(first, first + mesh.ranks)), use_local_synchronization=True)
    assert isinstance(world, dist.ProcessGroup)
    groups = Groups.build(mesh, device="cpu", world=world)
    dist.barrier(group=world)
    found = {name: group for name, group in vars(groups).items() if isinstance(group, dist.ProcessGroup)}
    for name, part in (("state", groups.state), ("experts", groups.experts)):
        found |= {f"{name} {axis}": part.get_group(axis) for axis in part.mesh_dim_names or ()}
    assert (groups.world is dist.group.WORLD) == (first == 0)
    return {name: ranks_in(world, group) for name, group in found.items()} | {"line": list(groups.line)}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [Mesh(pipeline=2, data=2, tensor=2, expert=4), Mesh(pipeline=2, data=4, replicate=2, sides=2)])
def test_ranks_of_a_part_of_those_that_met_find_each_other_alike(mesh: Mesh):
    whole, part = (run_ranks(_all_of, first + mesh.ranks, mesh, first) for first in (0, 1))
    assert part == [{}, *whole]


def _made(rank: int, mesh: Mesh) -> int:
    known = len(distributed_c10d._world.pg_map)
    Groups.build(mesh, device="cpu")
    dist.barrier()
    return len(distributed_c10d._world.pg_map) - known


@pytest.mark.slow
def test_an_axis_of_all_ranks_is_the_group_they_met_in():
    """Two of seven axes contain all ranks and need no group of their own. There are six groups in addition to those of axes."""
    assert run_ranks(_made, 2, Mesh(data=2)) == [11, 11]
