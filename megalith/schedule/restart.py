"""Restart of a row: a row runs up to its first backward, and again from its beginning if its forwards used wrong weights. All
ranks learn of the wrong weights in the same step, each at the end of its row's `head`. At the end of a rank's head, some messages
of another rank's head may have begun whose other end comes only after this rank's head. Before the restart, messages that have
begun at only one end are completed with tensors that no computation reads.
"""

from collections import Counter
from collections.abc import Iterator

from megalith.schedule.action import COMPUTATIONS, MESSAGES, Action, Row, parts
from megalith.schedule.lower import Channel, Program


def head(row: Row) -> Row:
    """Return the entries before the first backward; their actions do not change weights or gradients."""
    for number, entry in enumerate(row):
        if any(action.kind in COMPUTATIONS and action.kind != "F" for action in parts(entry)):
            return row[:number]
    return row


def unmet(program: Program, rank: int) -> tuple[Action, ...]:
    """Return the messages after the head of `rank`'s row whose other end is within the head of another row, in the order of the
    row. The returned messages cannot block each other, because both ends of a channel have the same order.
    """
    begun: Counter[Channel] = Counter()  # of a channel's two ends, the one further on
    for row in program.rows:
        begun |= Counter(program.channel(message) for message in _messages(head(row)))
    mine = program.rows[rank]
    met = Counter(program.channel(message) for message in _messages(head(mine)))
    found: list[Action] = []
    for message in _messages(mine[len(head(mine)) :]):
        channel = program.channel(message)
        if met[channel] < begun[channel]:
            met[channel] += 1
            found.append(message)
    return tuple(found)


def _messages(row: Row) -> Iterator[Action]:
    return (action for entry in row for action in parts(entry) if action.kind in MESSAGES)
