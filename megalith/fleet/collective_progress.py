"""Progress of each rank in the collectives of its groups, which shows the rank that the others wait for. The signal that requests a
rank's stack also requests this progress. A separate thread of the rank answers, because the main thread may be inside a call that never
returns. A stopped process does not answer.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

PREFIX = "==== stands at "
"""Prefix of the line in which a rank answers, in its log."""


def line(begun: Mapping[str, int], recorded: Sequence[str]) -> str:
    """Return the line with a rank's answer. `begun`: number of collectives begun in each group, by the group's name; `recorded`: the
    last collectives, as text."""
    return f"\n{PREFIX}{json.dumps({'begun': dict(begun), 'recorded': list(recorded)})}\n"


def read(log: str) -> tuple[dict[str, int], tuple[str, ...]]:
    """Return the last complete answer in a rank's output; empty if the output has no answer."""
    text = log.rpartition(PREFIX)[2].partition("\n")[0] if PREFIX in log else ""
    try:
        found: dict[str, Any] = json.loads(text)
    except ValueError:
        return {}, ()
    return found["begun"], tuple(found["recorded"])


def without(log: str) -> str:
    """Return a rank's output without its answers."""
    return "\n".join(text for text in log.split("\n") if not text.startswith(PREFIX))


def behind(begun: Mapping[int, Mapping[str, int]]) -> dict[int, str]:
    """Return the late ranks, each with the reason as text: those that others wait for in some group, and that wait for no rank
    themselves. `begun`: the counts of each rank that answered. If a rank has begun a collective that another member of the group has
    not, it waits for that member. The result is empty if all members have begun equally many collectives, because the counts then do
    not show a late rank.
    """
    groups: dict[str, dict[int, int]] = {}
    for rank, numbers in begun.items():
        for group, number in numbers.items():
            groups.setdefault(group, {})[rank] = number
    waiting: set[int] = set()
    late: dict[int, str] = {}
    for group, members in groups.items():
        least, most = min(members.values()), max(members.values())
        for rank, number in members.items():
            if number > least:
                waiting.add(rank)
            if number < most:
                late.setdefault(rank, f"it has begun {number} collectives in group {group}, but another rank has begun {most}")
    return {rank: reason for rank, reason in late.items() if rank not in waiting}
