"""The global batch is divided without a remainder under every plan."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megalith.data.stream import Batch as Samples
from megalith.prove.parity import RandomText
from megalith.spec.run import RunSpec
from megalith.train.assemble import mesh_groups
from megalith.train.batches import Cut, count_valid, indices, to_batch
from tests.ranks import run_ranks
from tests.specs import tiny_run

CPU = torch.device("cpu")


def run_of(data: int, microbatch: int, microbatches: int) -> RunSpec:
    plan = {"data": data, "microbatch": microbatch}
    return tiny_run(plan=plan, train={"global_batch": data * microbatch * microbatches})


@settings(max_examples=100, deadline=None)
@given(data=st.integers(1, 9), microbatch=st.integers(1, 5), microbatches=st.integers(1, 6), steps=st.integers(1, 4))
def test_every_sample_is_computed_by_one_rank_once_across_steps(data, microbatch, microbatches, steps):
    spec = run_of(data, microbatch, microbatches)
    size = spec.train.global_batch
    seen = [
        number
        for step in range(steps)
        for rank in range(data)
        for part in indices(spec, first=step * size, data_rank=rank)
        for number in part
    ]
    assert sorted(seen) == list(range(steps * size))
    for rank in range(data):
        found = indices(spec, first=0, data_rank=rank)
        assert len(found) == microbatches and all(len(part) == microbatch for part in found)


@settings(max_examples=50, deadline=None)
@given(data=st.integers(1, 9), microbatch=st.integers(1, 5), microbatches=st.integers(1, 6), first=st.integers(0, 10**12))
def test_a_microbatch_of_all_ranks_together_is_a_run_of_samples(data, microbatch, microbatches, first):
    by_rank = [indices(run_of(data, microbatch, microbatches), first=first, data_rank=rank) for rank in range(data)]
    for i in range(microbatches):
        together = [number for rank in by_rank for number in rank[i]]
        start = first + i * data * microbatch
        assert together == list(range(start, start + data * microbatch))


@settings(max_examples=30, deadline=None)
@given(steps=st.integers(1, 3), factors=st.permutations([2, 3, 2]))
def test_every_plan_computes_the_same_samples_in_a_step(steps, factors):
    data, microbatch, microbatches = factors
    spec = run_of(data, microbatch, microbatches)
    for step in range(steps):
        numbers = {n for rank in range(data) for part in indices(spec, first=step * 12, data_rank=rank) for n in part}
        assert numbers == set(range(step * 12, step * 12 + 12))


def samples(**parts: Any) -> Samples:
    """Two rows of four tokens."""
    whole: dict[str, Any] = {
        "tokens": np.arange(8).reshape(2, 4),
        "targets": np.array([[1, 2, -100, 4], [5, 6, 7, -100]]),
        "positions": np.array([[0, 1, 0, 1], [0, 1, 2, 3]]),
        "segments": ((2, 2), (4,)),
        "domains": ("a", "a"),
        "numbers": (7, 9),
    }
    return Samples(**whole | parts)


def test_a_batch_says_which_samples_and_positions_its_tokens_are():
    """This includes a context rank, which has the first and the last of four chunks of each sequence."""
    whole = to_batch(samples(), Cut(), device=CPU, loss_scale=1.0).work
    part = to_batch(samples(), Cut(contexts=2, context=0), device=CPU, loss_scale=1.0, wide=True).work
    assert whole is not None and part is not None
    assert (whole.samples.tolist(), whole.positions.tolist(), whole.wide) == ([7, 9], [0, 1, 2, 3], False)
    assert (part.samples.tolist(), part.positions.tolist(), part.wide) == ([7, 9], [0, 3], True)


def test_a_masked_batch_carries_positions_and_the_cuts_of_its_rows():
    batch = to_batch(samples(), Cut(masked=True), device=CPU, loss_scale=0.5, z_loss=0.1)
    assert batch.segments == ((2, 2), (4,))
    assert batch.positions is not None and batch.positions.tolist() == [[0, 1, 0, 1], [0, 1, 2, 3]]
    assert (batch.loss_scale, batch.z_loss) == (0.5, 0.1)
    assert batch.tokens.dtype == torch.int64 and batch.targets is not None and batch.targets.tolist()[0] == [1, 2, -100, 4]


def test_rows_of_one_document_each_need_no_cuts():
    assert to_batch(samples(segments=((4,), (4,))), Cut(masked=True), device=CPU, loss_scale=1.0).segments is None


def test_without_masks_rows_are_single_documents():
    batch = to_batch(samples(), Cut(masked=False), device=CPU, loss_scale=1.0)
    assert batch.segments is None and batch.positions is None


def _valid(rank: int, ranks: int) -> int:
    spec = tiny_run(plan={"data": ranks}, train={"global_batch": 12})
    text = RandomText(spec)
    groups = mesh_groups(spec, CPU)
    return count_valid([text.batch(part) for part in indices(spec, first=0, data_rank=rank)], groups=groups)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_valid_targets_are_counted_over_the_whole_global_batch(ranks):
    whole = RandomText(tiny_run()).batch(range(12))
    assert run_ranks(_valid, ranks, ranks) == [int((whole.targets >= 0).sum())] * ranks
    assert (whole.targets < 0).sum() > 0


def _none(rank: int) -> int:
    return count_valid([samples(targets=np.full((2, 4), -100))], groups=mesh_groups(tiny_run(), CPU))


def test_a_batch_without_targets_divides_by_one_not_by_zero():
    assert run_ranks(_none, 1) == [1]
