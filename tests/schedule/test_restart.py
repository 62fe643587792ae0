"""The part of a row that may run twice, and the messages completed in between."""

from collections import defaultdict, deque

import pytest
from hypothesis import given, settings

from megalith.schedule.action import MESSAGES, Action, Row, computations, format_row, parse_row, parts
from megalith.schedule.lower import Program, lower, partner
from megalith.schedule.restart import head, unmet
from megalith.schedule.simulate import blocked
from megalith.schedule.table import build
from tests.schedule.test_lower import schedules


def _first_try(program: Program) -> Program:
    """Return the ranks' actions before they start over."""
    rows = tuple((*head(row), *unmet(program, rank)) for rank, row in enumerate(program.rows))
    return Program(program.schedule, program.zero, rows)


def _messages(row: Row) -> list[Action]:
    return [action for entry in row for action in parts(entry) if action.kind in MESSAGES]


@given(schedules())
@settings(deadline=None)
def test_a_head_holds_forwards_alone_and_ends_before_the_first_backward(case):
    for row in lower(*case).rows:
        begin = head(row)
        assert all(action.kind == "F" for action in computations(begin))
        assert len(begin) < len(row)
        assert any(action.kind in "BI" for action in parts(row[len(begin)]))


@pytest.mark.slow
@given(schedules())
@settings(deadline=None, max_examples=150)
def test_every_message_that_was_begun_meets_its_other_end_in_order(case):
    program = _first_try(lower(*case))
    ends = defaultdict(list)
    for row in program.rows:
        for message in _messages(row):
            sends = message.kind.startswith("SEND")
            ends[program.channel(message), sends].append(message if sends else partner(message))
    for channel, _ in ends:
        assert ends[channel, True] == ends[channel, False], channel


@pytest.mark.slow
@given(schedules())
@settings(deadline=None, max_examples=150)
def test_the_first_try_ends(case):
    assert not blocked(_first_try(lower(*case)))


@pytest.mark.slow
@given(schedules())
@settings(deadline=None, max_examples=150)
def test_it_ends_also_where_each_communicator_does_one_message_after_another(case):
    """NCCL works in this way: a message is done once both of its ranks have reached it, and each rank's next message on that communicator
    waits for it."""
    program = _first_try(lower(*case))
    queues = defaultdict(deque)  # (rank, lane) -> messages, named by their sends
    for rank, row in enumerate(program.rows):
        for message in _messages(row):
            channel = program.channel(message)
            lane = channel.carries, channel.source < channel.destination
            queues[rank, lane].append((channel, message if message.kind.startswith("SEND") else partner(message)))
    left = sum(map(len, queues.values()))
    while left:
        for (_, lane), queue in queues.items():
            while queue:
                channel, send = queue[0]
                both = queues[channel.source, lane], queues[channel.destination, lane]
                if not all(each and each[0] == (channel, send) for each in both):
                    break
                for each in both:
                    each.popleft()
        before, left = left, sum(map(len, queues.values()))
        assert left < before, "every rank waits"


@pytest.mark.parametrize(
    ("rank", "begin", "rest"),
    [(0, "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1", ""), (1, "1RECV_F0 1F0 1RECV_F1", "1SEND_B0 1SEND_B1")],
)
def test_1f1b_on_two_ranks(rank, begin, rest):
    program = lower(build("1f1b", ranks=2, microbatches=2), 0)
    assert (format_row(head(program.rows[rank])), format_row(unmet(program, rank))) == (begin, rest)


def test_forwards_alone_are_all_head():
    row = parse_row("0F0 0SEND_F0 0F1 0SEND_F1")
    assert head(row) == row
