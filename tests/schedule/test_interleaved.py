import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalith.schedule.interleaved import interleaved, rounds
from megalith.schedule.lower import lower
from megalith.schedule.one_f_one_b import one_f_one_b
from megalith.schedule.simulate import in_flight, simulate

sizes = st.integers(1, 6)


@given(sizes, st.integers(1, 30))
@settings(deadline=None)
def test_one_chunk_is_1f1b(ranks, microbatches):
    assert interleaved(ranks, microbatches, 1).rows == one_f_one_b(ranks, microbatches).rows


@given(sizes, st.integers(1, 60))
@settings(deadline=None)
def test_rounds_share_all_microbatches_and_keep_the_pipeline_full(ranks, microbatches):
    found = rounds(ranks, microbatches)
    assert sum(found) == microbatches
    assert min(found) >= min(ranks, microbatches)
    assert max(found) - min(found) <= 1


@pytest.mark.slow
@given(sizes, st.integers(1, 4), st.integers(0, 20))
@settings(deadline=None)
def test_the_bubble_is_divided_by_the_chunks_for_any_number_of_microbatches(ranks, chunks, more):
    microbatches = ranks + more
    timeline = simulate(lower(interleaved(ranks, microbatches, chunks), 0), {"F": 1, "B": 2})
    assert timeline.bubble == pytest.approx((ranks - 1) / (chunks * microbatches))


@given(sizes, st.integers(2, 4), st.integers(1, 5))
@settings(deadline=None)
def test_memory_in_flight_is_the_papers(ranks, chunks, times):
    microbatches = ranks * times
    held = in_flight(interleaved(ranks, microbatches, chunks))
    warmup = [(chunks - 1) * ranks + 2 * (ranks - 1 - rank) for rank in range(ranks)]  # warm-up forwards in Megatron-LM
    assert held == [min(depth + 1, chunks * microbatches) for depth in warmup]
