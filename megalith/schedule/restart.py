"""A row that may be run twice: up to its first backward, and from the beginning again, if what the forwards computed with was wrong.

Every rank learns this in the same step, but each in its own place: at the end of its row's `head`. By then some messages of the program
are under way whose other end stands behind that rank's head. Before a second try they are completed, with tensors nobody reads.
"""

from collections import Counter
from collections.abc import Iterator

from megalith.schedule.action import COMPUTATIONS, MESSAGES, Action, Row, parts
from megalith.schedule.lower import Channel, Program


def head(row: Row) -> Row:
    """The slots before the first one with a backward: their actions do not change weights or gradients."""
    for number, slot in enumerate(row):
        if any(action.kind in COMPUTATIONS and action.kind != "F" for action in parts(slot)):
            return row[:number]
    return row


def unmet(program: Program, rank: int) -> tuple[Action, ...]:
    """The messages that stand behind the head of `rank`'s row while their other end is within a head, in the order of the row.

    In that order, which is also that of each channel, they cannot block each other: the program had them in it.
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
    return (action for slot in row for action in parts(slot) if action.kind in MESSAGES)
