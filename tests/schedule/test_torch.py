"""torch's own pipeline schedules as an oracle for the order on each rank."""

import re
from types import SimpleNamespace

import pytest

from megalith.schedule.action import format_row
from megalith.schedule.table import build

torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")


def private(owner: str, method: str):
    """Return a private method of torch's, the oracle for our schedules. Skips the test if this version of torch lacks it."""
    found = getattr(getattr(torch_schedules, owner, None), method, None)
    # private methods may disappear; test_verify.py also tests each schedule with our own laws
    return found or pytest.skip(f"this torch has no {owner}.{method}")


def texts(actions) -> str:
    """Return the computations of torch's row. Its text form equals ours, except for the word after an overlap."""
    words = (str(action).removesuffix("OVERLAP_F_B") for action in actions)
    return " ".join(word for word in words if re.fullmatch(r"\d+[FBIW]\d+|\(.*\)", word))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("microbatches", [4, 5, 16])
def test_gpipe_is_torchs(ranks, microbatches):
    order = private("ScheduleGPipe", "_get_pipeline_order")(SimpleNamespace(_num_stages=ranks, _n_microbatches=microbatches))
    rows = build("gpipe", ranks=ranks, microbatches=microbatches).rows
    assert [format_row(row) for row in rows] == [texts(order[rank]) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("microbatches", [4, 5, 16])
def test_1f1b_is_torchs(ranks, microbatches):
    order = private("Schedule1F1B", "_get_pipeline_order")(SimpleNamespace(_num_stages=ranks, _n_microbatches=microbatches))
    *rows, last = [format_row(row) for row in build("1f1b", ranks=ranks, microbatches=microbatches).rows]
    assert rows == [texts(order[rank]) for rank in range(ranks - 1)]
    # torch numbers the last rank's forwards from 1 (it has no warm-up), but runs them from 0
    assert re.sub(r"F\d+", "F", last) == re.sub(r"F\d+", "F", texts(order[ranks - 1]))


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (2, 8), (4, 3), (4, 8), (4, 10), (3, 9)])
def test_interleaving_is_torchs(ranks, microbatches, chunks):
    per_round = microbatches // max(1, microbatches // ranks)
    stand_in = SimpleNamespace(
        n_local_stages=chunks, microbatches_per_round=per_round, pp_group_size=ranks, _n_microbatches=microbatches
    )
    calculate = private("ScheduleInterleaved1F1B", "_calculate_single_rank_operations")
    rows = build("interleaved", ranks=ranks, microbatches=microbatches, chunks=chunks).rows
    assert [format_row(row) for row in rows] == [texts(calculate(stand_in, rank)) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 4, 9, 24])
def test_zb_h1_is_torchs_interleaved_zero_bubble_of_one_stage(ranks, microbatches):
    stand_in = SimpleNamespace(
        n_local_stages=1, microbatches_per_round=microbatches, pp_group_size=ranks, _n_microbatches=microbatches
    )
    calculate = private("ScheduleInterleavedZeroBubble", "_calculate_single_rank_operations")
    rows = build("zb-h1", ranks=ranks, microbatches=microbatches).rows
    assert [format_row(row) for row in rows] == [texts(calculate(stand_in, rank)) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
@pytest.mark.parametrize("microbatches", [1, 3, 8, 14, 25])
def test_zb_v_is_torchs(ranks, microbatches):
    stand_in = SimpleNamespace(pp_group_size=ranks, num_stages=2 * ranks, _n_microbatches=microbatches)
    calculate = private("ScheduleZBVZeroBubble", "_calculate_single_rank_operations")
    rows = build("zb-v", ranks=ranks, microbatches=microbatches, chunks=2).rows
    assert [format_row(row) for row in rows] == [texts(calculate(stand_in, rank)) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
@pytest.mark.parametrize("more", [0, 1, 9])
def test_dualpipev_is_torchs(ranks, more):
    microbatches = 2 * ranks + more
    stand_in = SimpleNamespace(pp_group_size=ranks, _n_microbatches=microbatches)
    calculate = private("ScheduleDualPipeV", "_calculate_single_rank_operations")
    rows = build("dualpipev", ranks=ranks, microbatches=microbatches, chunks=2).rows
    assert [format_row(row) for row in rows] == [texts(calculate(stand_in, rank)) for rank in range(ranks)]
