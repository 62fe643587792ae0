"""Collectives in one round of messages give the same results as gloo's, through every function that calls them."""

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megalith.parallel import one_round
from tests.parallel.traffic import NAMES, Traffic
from tests.ranks import run_ranks

TYPES = (torch.float32, torch.bfloat16, torch.int64)
OPERATORS = (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT)


def _values(rank: int, numbers: int, dtype: torch.dtype) -> torch.Tensor:
    """Return small integers, whose sums are exact in every dtype and order."""
    made = torch.randint(1, 4, (numbers,), generator=torch.Generator().manual_seed(rank))
    return made.to(dtype)


def _both(rank: int, ranks: int) -> None:
    """Assert that every operation gives the same result by gloo's ring and in one round."""
    for dtype in TYPES:
        for each in (1, 5, 3000):
            own, all_ = _values(rank, each, dtype), _values(rank, each * ranks, dtype)
            results: list[list[torch.Tensor]] = []
            for most in (0, 1 << 30):
                one_round.MAXIMUM.update(dict.fromkeys(one_round.MAXIMUM, most))
                whole = torch.empty(each * ranks, dtype=dtype)
                dist.all_gather_into_tensor(whole, own)
                found = [whole]
                for operator in OPERATORS:
                    part, total = torch.empty(each, dtype=dtype), all_.clone()
                    dist.reduce_scatter_tensor(part, all_.clone(), op=operator)
                    dist.all_reduce(total, op=operator)
                    found += [part, total]
                results.append(found)
            for one, other in zip(*results, strict=True):
                assert torch.equal(one, other), (dtype, each)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_one_round_gives_what_the_ring_gives(ranks: int) -> None:
    run_ranks(_both, ranks, ranks)


def _bits(rank: int, ranks: int) -> torch.Tensor:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(rank)) * 10.0 ** torch.arange(-5, 5).repeat(100)
    dist.all_reduce(values)
    return values


@pytest.mark.slow
@pytest.mark.skipif(not one_round.CAN_ADD, reason="with this torch sums go around a ring")
def test_all_ranks_have_the_same_bits_added_in_their_order() -> None:
    found = run_ranks(_bits, 4, 4)
    parts = [
        torch.randn(1000, generator=torch.Generator().manual_seed(r)) * 10.0 ** torch.arange(-5, 5).repeat(100) for r in range(4)
    ]
    assert all(torch.equal(one, torch.stack(parts).sum(0)) for one in found)


def _several(rank: int, ranks: int) -> None:
    """Begin operations, and wait for them in another order, while nothing else references their tensors."""
    whole = torch.arange(4.0 * ranks) + rank
    parts, gathered, total = torch.empty(4), torch.empty(ranks * 2), torch.ones(8)
    works = [
        dist.reduce_scatter_tensor(parts, whole, async_op=True),
        dist.all_gather_into_tensor(gathered, torch.full((2,), float(rank)), async_op=True),
        dist.all_reduce(total, async_op=True),
    ]
    gc.collect()
    for work in reversed(works):
        assert work is not None
        work.wait()
    assert torch.equal(parts, ranks * (torch.arange(4.0) + 4 * rank) + sum(range(ranks)))
    assert gathered.tolist() == [float(r) for r in range(ranks) for _ in range(2)]
    assert total.tolist() == [float(ranks)] * 8
    assert not one_round._Added.alive, "what was waited for is forgotten"


@pytest.mark.slow
def test_several_are_under_way_at_once() -> None:
    run_ranks(_several, 3, 3)


def _counted(rank: int, ranks: int) -> list[Any]:
    found = []
    for most in (0, 1 << 30):
        one_round.MAXIMUM.update(dict.fromkeys(one_round.MAXIMUM, most))
        with Traffic() as traffic:
            dist.all_gather_into_tensor(torch.empty(8), torch.ones(8 // ranks))
            dist.reduce_scatter_tensor(torch.empty(8 // ranks), torch.ones(8))
            dist.all_reduce(torch.ones(8))
        found.append(traffic.calls)
    return found


def test_who_counts_collectives_sees_the_same_ones() -> None:
    for ring, one in run_ranks(_counted, 2, 2):
        assert ring == one
        assert [call.name for call in one] == [
            NAMES[f"c10d::{op}"] for op in ("_allgather_base_", "_reduce_scatter_base_", "allreduce_")
        ]
