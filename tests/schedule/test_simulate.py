from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalith.schedule.action import Action, Overlap, RowEntry, Schedule, computations, parse_row, parts
from megalith.schedule.lower import lower
from megalith.schedule.simulate import activations, in_flight, simulate
from megalith.schedule.table import SCHEDULES, build

COST = {"F": 1.0, "B": 2.0}


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 3, 8, 32])
def test_the_bubble_is_one_pipeline_depth(name, ranks, microbatches):
    timeline = simulate(lower(build(name, ranks=ranks, microbatches=microbatches), 0), COST)
    assert timeline.end == 3 * (microbatches + ranks - 1)
    assert timeline.bubble == pytest.approx((ranks - 1) / microbatches)
    assert timeline.busy == (3 * microbatches,) * ranks


@pytest.mark.slow
@given(
    st.sampled_from(["gpipe", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipev", "dualpipe"]),
    st.integers(1, 2),
    st.integers(2, 8),
    st.integers(1, 3),
    st.sampled_from([0, 1]),
    st.randoms(use_true_random=False),
)
@settings(deadline=None)
def test_ranks_do_what_the_schedule_says_one_thing_at_a_time(name, pairs, microbatches, chunks, zero, random):
    schedule = build(name, ranks=2 * pairs, microbatches=microbatches, chunks=SCHEDULES[name].chunks.nearest(chunks))
    timeline = simulate(lower(schedule, zero), lambda _: random.random(), transfer=lambda _: random.random())
    ends: dict[RowEntry, float] = {}
    for rank, row in enumerate(schedule.rows):
        spans = [span for span in timeline.row(rank) if not str(span.action).endswith(("GATHER", "REDUCE"))]
        assert [action for span in spans for action in parts(span.action)] == list(computations(row))
        assert all(before.end <= after.start for before, after in pairwise(spans))
        ends |= {action: span.end for span in spans for action in parts(span.action)}
    for span in timeline.spans:
        for action in parts(span.action):
            kind, stage, microbatch = action
            before = [Action("F", stage - 1, microbatch)] if kind == "F" and stage > 0 else []
            if kind in ("B", "I"):
                before += [Action("F", stage, microbatch)]
                before += [a for half in ("B", "I") if (a := Action(half, stage + 1, microbatch)) in ends]
                assert stage + 1 == schedule.stages or len(before) == 2
            if kind == "W":
                before += [Action("I", stage, microbatch)]
            assert all(ends[earlier] <= span.start for earlier in before), str(action)


def test_a_message_takes_its_time_once_on_the_way_forward_and_once_back():
    timeline = simulate(lower(build("1f1b", ranks=2, microbatches=1), 0), COST, transfer=0.5)
    assert timeline.end == 2 * 3 + 2 * 0.5
    assert [(span.rank, str(span.action), span.end - span.start) for span in timeline.transfers] == [
        (0, "0SEND_F0", 0.5),
        (1, "1SEND_B0", 0.5),
    ]


def test_messages_of_one_channel_go_one_after_the_other():
    timeline = simulate(lower(build("gpipe", ranks=2, microbatches=3), 0, ahead=3), {"F": 1.0, "B": 2.0}, transfer=4.0)
    forward = [span for span in timeline.transfers if span.rank == 0]
    assert [span.start for span in forward] == [1.0, 5.0, 9.0]


def test_a_receive_started_early_hides_its_transfer():
    schedule = build("1f1b", ranks=2, microbatches=8)
    late, early = (simulate(lower(schedule, 0, ahead=ahead), COST, transfer=0.5).end for ahead in (0, 1))
    assert early < late


def test_an_exposed_gather_holds_up_every_computation_of_its_stage():
    schedule = build("1f1b", ranks=1, microbatches=4)
    assert simulate(lower(schedule, 3), COST | {"GATHER": 0.25}).end == 4 * 3 + 8 * 0.25
    assert simulate(lower(schedule, 1), COST | {"GATHER": 0.25}).end == 4 * 3 + 0.25


def test_a_reduction_runs_beside_the_computations_that_follow():
    schedule = build("1f1b", ranks=1, microbatches=4)
    assert simulate(lower(schedule, 2), COST | {"REDUCE": 0.5}).end == 4 * 3 + 0.5


def test_a_backward_waits_for_what_is_fetched_and_the_fetch_for_what_leaves():
    """Alone, a microbatch's backward follows its forward: both movements are exposed. With more, they run beside computations."""
    one, many = (lower(build("1f1b", ranks=1, microbatches=count), 0, retained={0}) for count in (1, 4))
    assert simulate(one, COST | {"OFFLOAD": 0.5, "FETCH": 0.25}).end == 3 + 0.75
    gpipe = lower(build("gpipe", ranks=1, microbatches=4), 0, retained={0})
    assert simulate(gpipe, COST | {"OFFLOAD": 1.0, "FETCH": 1.0}).end == 4 * 3
    assert simulate(gpipe, COST | {"FETCH": 3.0}).end == 4 + 2 + 3 * 3 + 2, "fetches are sequential, the first beside a forward"
    assert simulate(many, COST).end == 4 * 3


def test_an_overlap_may_cost_less_than_its_two_computations():
    rows = (parse_row("0F0 (0F1;0B0) 0B1"),)
    program = lower(Schedule("overlap", rows, 1, 2, (0,)), 0)
    assert simulate(program, COST).end == 6
    assert simulate(program, COST | {"OVERLAP": 2.0}).end == 5
    assert isinstance(simulate(program, COST).spans[1].action, Overlap)


def test_half_backwards_let_the_stage_before_go_on():
    rows = (parse_row("0F0 0I0 0W0"), parse_row("1F0 1I0 1W0"))
    program = lower(Schedule("split", rows, 2, 1, (0, 1)), 0)
    assert simulate(program, {"F": 1.0, "I": 1.0, "W": 1.0}).end == 5


def test_a_kind_without_seconds_is_refused():
    with pytest.raises(ValueError, match=r"the time of B \(0B0\) is missing"):
        simulate(lower(build("1f1b", ranks=1, microbatches=1), 0), {"F": 1.0})


def test_a_program_that_cannot_finish_is_refused_with_what_it_waits_for():
    rows = (parse_row("0F0 0B0 0F1 0B1"), parse_row("1F0 1F1 1B0 1B1"))
    with pytest.raises(ValueError, match="rank 1 at 1F1 waits for 1RECV_F1 of rank 0"):
        simulate(lower(Schedule("stuck", rows, 2, 2, (0, 1)), 0), COST)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("microbatches", [8, 9, 16])
def test_the_bubble_of_papers_is_idle_time_inside_a_ranks_own_span(name, ranks, microbatches):
    timeline = simulate(lower(build(name, ranks=ranks, microbatches=microbatches), 0), {"F": 1.0, "B": 2.0})
    assert timeline.bubble_seconds == (ranks - 1) * (1.0 + 2.0)
    if name == "1f1b":
        assert timeline.gaps == tuple(3.0 * (ranks - 1 - rank) for rank in range(ranks))
        assert timeline.idle == (3.0 * (ranks - 1),) * ranks


@pytest.mark.parametrize("chunks", [2, 3, 5])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (3, 7), (4, 18), (8, 17)])
def test_interleaving_divides_the_bubble_by_the_chunks(ranks, microbatches, chunks):
    """The idle time is (p - 1)(F + B) / v, with F and B of a whole rank. Microbatches need not be a multiple of ranks."""
    cost = {"F": 1.0 / chunks, "B": 2.0 / chunks}
    timeline = simulate(lower(build("interleaved", ranks=ranks, microbatches=microbatches, chunks=chunks), 0), cost)
    assert timeline.bubble_seconds == pytest.approx((ranks - 1) * 3.0 / chunks)


def test_126_layers_on_16_stages_with_the_ends_one_short():
    """Llama 3 (arXiv:2407.21783, section 3.3.2): the first stage also has the embedding, and the last the output."""
    layers = [7, *[8] * 14, 7]
    assert sum(layers) == 126
    schedule, microbatches = build("1f1b", ranks=16, microbatches=64), 64
    assert activations(schedule, [float(n) for n in layers]) == [(16 - rank) * layers[rank] for rank in range(16)]

    def seconds(entry: RowEntry) -> float:
        assert isinstance(entry, Action)
        here = layers[entry.stage] + (entry.stage == 15)  # the output projection and the loss take as long as a layer
        return here * {"F": 1.0, "B": 2.0}.get(entry.kind, 0.0)

    timeline = simulate(lower(schedule, 0), seconds)
    assert timeline.busy == (64 * 7 * 3, *[64 * 8 * 3] * 15)
    there_and_back = 3.0 * sum(layers[:-1])  # the time of one microbatch; the last stage is never idle in between
    assert timeline.end == microbatches * 8 * 3 + there_and_back
    assert timeline.gaps[-1] == 0
    even = simulate(lower(schedule, 0), {"F": 8.0, "B": 16.0})
    assert timeline.end == even.end - 3.0  # the shorter first stage saves one layer, once


def test_with_chunks_a_rank_holds_its_stages_in_the_shares_of_its_warmup():
    layers = [3, *[4] * 30, 3]
    held = activations(build("interleaved", ranks=16, microbatches=32, chunks=2), [float(n) for n in layers])
    warmup = [16 + 2 * (15 - rank) + 1 for rank in range(16)]  # forwards on that rank before the first backward frees one
    assert held[1:-1] == [4.0 * min(depth, 64) for depth in warmup[1:-1]]
    assert held[0] == 3.0 * 31 + 4.0 * 16  # a round of 16 through each of its stages, then the second round of the short stage


def test_half_a_backward_can_free_part_of_what_a_forward_saved():
    rows = (parse_row("0F0 0F1 0I0 0F2 0I1 0I2 0W0 0W1 0W2"),)
    schedule = Schedule("split", rows, 1, 3, (0,))
    assert activations(schedule, [10.0]) == [30.0]
    assert activations(schedule, [10.0], [4.0]) == [10 + 10 - 6 + 10]
    assert activations(schedule, [10.0], [0.0]) == [20.0]


def test_memory_is_weighed_by_stage():
    schedule = build("1f1b", ranks=2, microbatches=4)
    assert activations(schedule, [100, 7]) == [200, 7]
    assert in_flight(schedule) == [2, 1]


def test_a_split_backward_keeps_memory_until_its_second_half():
    rows = (parse_row("0F0 0I0 0F1 0I1 0W0 0W1"),)
    assert in_flight(Schedule("split", rows, 1, 2, (0,))) == [2]


def test_both_halves_of_an_overlap_are_in_memory_together():
    rows = (parse_row("0F0 (0F1;0B0) 0B1"),)
    assert in_flight(Schedule("overlap", rows, 1, 2, (0,))) == [2]


def test_a_timeline_of_nothing_has_no_bubble():
    empty = Schedule("none", ((),), 1, 0, (0,))
    assert (simulate(lower(empty, 0), COST).end, simulate(lower(empty, 0), COST).bubble, in_flight(empty)) == (0.0, 0.0, [0])
