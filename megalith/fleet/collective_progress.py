"""Number of collectives that each rank has begun in each of its process groups, which shows the rank that the others wait for. A
rank writes its numbers of collectives to its log on the signal that requests its stack. A separate thread writes the numbers,
because the main thread may be in a call that never returns. A stopped process (SIGSTOP) writes nothing.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

PREFIX = "==== stands at "
"""Prefix of the line in a rank's log that states its progress."""


def line(begun: Mapping[str, int], recorded: Sequence[str]) -> str:
    """Return the log line that states a rank's progress. `begun`: number of collectives begun in each group, by the group's name;
    `recorded`: descriptions of the last collectives."""
    return f"\n{PREFIX}{json.dumps({'begun': dict(begun), 'recorded': list(recorded)})}\n"


def read(log: str) -> tuple[dict[str, int], tuple[str, ...]]:
    """Return (begun, recorded) from the last line in a rank's log that states its progress; both are empty if there is none."""
    text = log.rpartition(PREFIX)[2].partition("\n")[0] if PREFIX in log else ""
    try:
        found: dict[str, Any] = json.loads(text)
    except ValueError:
        return {}, ()
    return found["begun"], tuple(found["recorded"])


def without(log: str) -> str:
    """Return a rank's log without the lines that state its progress."""
    return "\n".join(text for text in log.split("\n") if not text.startswith(PREFIX))


def behind(begun: Mapping[int, Mapping[str, int]]) -> dict[int, str]:
    """Return the late ranks, each with the reason: in some group other ranks wait for it, but it waits for no rank itself. A rank
    waits for the members of a group that have begun fewer collectives than it has. `begun`: for each rank that wrote its
    progress, the collectives begun in each group. If all numbers are equal, they show no late rank, and the result is empty.
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
                late.setdefault(
                    rank, f"the rank has begun {number} collectives in group {group}, but another rank has begun {most}"
                )
    return {rank: reason for rank, reason in late.items() if rank not in waiting}
