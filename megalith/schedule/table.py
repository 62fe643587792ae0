"""The schedules a plan can name."""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import TypeAlias

from megalith.schedule.action import Schedule
from megalith.schedule.gpipe import gpipe
from megalith.schedule.interleaved import interleaved
from megalith.schedule.one_f_one_b import one_f_one_b

Builder: TypeAlias = Callable[[int, int, int], Schedule]
"""(ranks, microbatches, chunks) -> schedule"""


def _one_chunk(ranks: int, microbatches: int, chunks: int) -> Schedule:
    assert chunks == 1, chunks
    return one_f_one_b(ranks, microbatches)


SCHEDULES: Mapping[str, Builder] = MappingProxyType({"gpipe": gpipe, "1f1b": _one_chunk, "interleaved": interleaved})

MOST_CHUNKS: Mapping[str, int] = MappingProxyType({"1f1b": 1})
"""Schedules that hold a fixed number of stages a rank at most."""


def refusals(name: str, *, ranks: int, microbatches: int, chunks: int) -> list[str]:
    """Why this schedule cannot be built, each with the value, the reason and what would work; empty when it can."""
    found: list[str] = []
    if name not in SCHEDULES:
        near = get_close_matches(name.lower(), SCHEDULES, n=1)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        found.append(f"schedule = {name!r} is not a schedule. {hint}Use one of: {', '.join(SCHEDULES)}.")
    for value, what in ((ranks, "ranks"), (microbatches, "microbatches"), (chunks, "chunks")):
        if value < 1:
            found.append(f"{what} = {value}: a schedule needs at least one. Use {what} >= 1.")
    if chunks > MOST_CHUNKS.get(name, chunks):
        found.append(
            f"chunks = {chunks} with schedule = {name!r}, which has one stage a rank. Use chunks = 1 or schedule = 'interleaved'."
        )
    return found


def build(name: str, *, ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """The schedule of that name. Raises ValueError with every reason why it cannot be built."""
    if found := refusals(name, ranks=ranks, microbatches=microbatches, chunks=chunks):
        raise ValueError("\n".join(found))
    return SCHEDULES[name](ranks, microbatches, chunks)
