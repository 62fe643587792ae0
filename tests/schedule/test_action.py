import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalith.schedule.action import (
    COLLECTIVES,
    COMPUTATIONS,
    MESSAGES,
    TRANSFERS,
    Action,
    Overlap,
    Schedule,
    format_row,
    parse,
    parse_row,
)

numbers = st.integers(0, 9999)
computed = st.builds(Action, st.sampled_from(sorted(COMPUTATIONS)), numbers, numbers)
actions = (
    computed
    | st.builds(Action, st.sampled_from(sorted(MESSAGES | TRANSFERS)), numbers, numbers)
    | st.builds(Action, st.sampled_from(sorted(COLLECTIVES)), numbers, st.none())
)
entries = actions | st.builds(Overlap, computed, computed)


@pytest.mark.slow
@given(st.lists(entries).map(tuple))
@settings(deadline=None)
def test_a_row_survives_its_text_form(row):
    assert parse_row(format_row(row)) == row


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("0F3", Action("F", 0, 3)),
        ("12W0", Action("W", 12, 0)),
        ("1RECV_F10", Action("RECV_F", 1, 10)),
        ("2GATHER", Action("GATHER", 2)),
        ("0FETCH5", Action("FETCH", 0, 5)),
        ("(0F7;7B3)", Overlap(Action("F", 0, 7), Action("B", 7, 3))),
    ],
)
def test_the_text_form_is_stage_kind_microbatch(text, action):
    assert parse(text) == action
    assert str(action) == text


@pytest.mark.parametrize(
    "text", ["", "F3", "0F", "0X3", "2GATHER1", "2FETCH", "0SEND3", "(0F1)", "(0F1;0SEND_F1)", "(0F1;1B0;2B0)", "0F-1"]
)
def test_a_text_that_is_no_action_is_refused_with_the_text(text):
    with pytest.raises(ValueError, match="is not an"):
        parse(text)


def test_a_schedule_refuses_communication():
    with pytest.raises(AssertionError, match="computations only"):
        Schedule("mine", ((Action("SEND_F", 0, 0),),), 1, 1, (0,))


def test_a_rank_knows_its_stages():
    v = Schedule("v", ((), ()), 4, 1, (0, 1, 1, 0))
    assert (v.ranks, v.stages_of(0), v.stages_of(1)) == (2, (0, 3), (1, 2))
