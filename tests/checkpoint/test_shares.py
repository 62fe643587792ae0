"""The boxes of every layout partition the tensors, replicas are written once, and bytes are spread evenly."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Partial

from megalith.checkpoint.shares import HeldShare, owners, shares
from tests.checkpoint.states import laid_out, values
from tests.ranks import run_ranks


def held(key: str, offset: int, size: int, whole: int) -> HeldShare:
    return HeldShare(key, (whole,), "F32", (offset,), (size,), 4 * size)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.lists(st.tuples(st.integers(1, 40), st.integers(1, 6)), min_size=1, max_size=12))
def test_every_box_is_written_by_exactly_one_of_its_holders(ranks, tensors):
    boxes = [[] for _ in range(ranks)]
    for number, (size, copies) in enumerate(tensors):
        for copy in range(min(copies, ranks)):
            boxes[(number + copy) % ranks].append(held(f"x{number}", 0, size, size))
    mine, problems = owners(boxes)
    assert problems == []
    assert sorted(place for places in mine for place in places) == sorted({box.place for items in boxes for box in items})
    assert all(place in {box.place for box in boxes[rank]} for rank, places in enumerate(mine) for place in places)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 8), st.lists(st.integers(1, 1000), min_size=1, max_size=60))
def test_replicas_are_spread_so_that_no_rank_writes_much_more_than_another(ranks, sizes):
    """Every greedy assignment stays below the mean plus the largest item (Graham 1966)."""
    mine, _ = owners([[held(f"x{number}", 0, size, size) for number, size in enumerate(sizes)]] * ranks)
    heaviest = max(sum(sizes[int(key.removeprefix("x"))] for key, _ in places) for places in mine)
    assert heaviest <= sum(sizes) / ranks + max(sizes)


def test_a_part_that_nobody_holds_is_named():
    _, problems = owners([[held("x", 0, 3, 10)], [held("x", 5, 5, 10)]])
    assert problems == ["x: the ranks hold 8 of its 10 elements"]


def test_ranks_that_disagree_about_a_tensor_are_named():
    _, problems = owners([[held("x", 0, 10, 10)], [held("x", 0, 12, 12)]])
    assert len(problems) == 1
    assert problems[0].startswith("x: rank 1 holds it as")


def test_all_tensors_a_checkpoint_cannot_hold_are_named_at_once():
    with pytest.raises(ValueError, match="cannot hold") as error:
        shares({"a": torch.zeros(2, dtype=torch.complex64), "b": torch.zeros(2), "c": torch.zeros(2, dtype=torch.complex128)})
    assert "a has dtype torch.complex64" in str(error.value)
    assert "c has dtype torch.complex128" in str(error.value)


def _odd_layouts(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    found = {}
    for name, placements in {"sum": (Replicate(), Partial()), "twice": (Shard(0), Shard(0))}.items():
        try:
            found[name] = shares({name: DTensor.from_local(torch.zeros(3, 2), mesh, placements, run_check=False)})[name].held
        except ValueError as error:
            found[name] = str(error)
    return found


@pytest.mark.slow
def test_two_plain_shards_of_one_dim_nest_left_to_right_and_unfinished_sums_are_refused():
    ranks = run_ranks(_odd_layouts, 4)
    assert [found["twice"].offset for found in ranks] == [(0, 0), (3, 0), (6, 0), (9, 0)]
    assert all("sum is an unreduced partial sum" in found["sum"] for found in ranks)


def _boxes(rank, layout):
    """Return every share of this rank, and whether its values equal those of its box in the whole tensor."""
    state = values()
    found = []
    for key, share in shares(laid_out(state, layout)).items():
        whole = state[key]
        for dim, (start, size) in enumerate(zip(share.held.offset, share.held.sizes, strict=True)):
            whole = whole.narrow(dim, start, size)
        found.append((share.held, torch.equal(whole, share.data)))
    return found


@pytest.mark.slow
def test_a_share_is_the_box_it_says_it_is():
    """This includes shares of tensor parallelism that FSDP2 cuts unevenly: DTensor's offsets are wrong for 7 rows on 2 x 3
    ranks."""
    ranks = run_ranks(_boxes, 6, {"dp_shard": 3, "tensor": 2})
    assert all(right for items in ranks for _, right in items)
    _, problems = owners([[box for box, _ in items] for items in ranks])
    assert problems == []
