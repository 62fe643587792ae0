"""Progress of each rank in the collectives of its groups, which shows the rank that the others wait for. The signal that requests a
rank's stack also requests this progress. A separate thread answers, because the main thread may be in a call that never returns. A
stopped process does not answer.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

PREFIX = "==== stands at "
"""Prefix of the line in which a rank answers, in its log."""


def line(begun: Mapping[str, int], recorded: Sequence[str]) -> str:
    """Return the line with a rank's answer. `begun`: collectives begun in each group, by its name; `recorded`: the last ones, as
    text."""
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
    """Return the late ranks, with reasons: others wait for them in some group, but they wait for no rank. `begun`: the counts of each
    rank that answered. A rank waits for a member of its group that has begun fewer collectives. Empty if all have begun equally many,
    because the counts then do not show a late rank.
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
