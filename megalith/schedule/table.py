"""The schedules a plan can name, and why one cannot be had."""

from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from megalith.schedule import file
from megalith.schedule.action import Schedule
from megalith.schedule.dual_pipe import dualpipe, dualpipev
from megalith.schedule.gpipe import gpipe
from megalith.schedule.interleaved import interleaved, rounds
from megalith.schedule.lower import lower
from megalith.schedule.one_f_one_b import one_f_one_b
from megalith.schedule.verify import problems
from megalith.schedule.zero_bubble import zb_h1, zb_h2
from megalith.schedule.zero_bubble_v import zb_v

Builder: TypeAlias = Callable[[int, int, int], Schedule]
"""(ranks, microbatches, chunks) -> schedule"""

CHUNKS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {"1f1b": (1, 1), "zb-h1": (1, 1), "zb-h2": (1, 1), "dualpipe": (1, 1), "zb-v": (2, 2), "dualpipev": (2, 2)}
)
"""The least and most stages a rank of schedules that do not take any number. DualPipe's rank has one of the plan's stages, and
the copy of another."""

BIDIRECTIONAL: frozenset[str] = frozenset({"dualpipe"})
"""Schedules that run both ways through an even number of ranks: with two copies of each stage, and ZeRO 0 or 1."""

FILE = "file:"
"""What the name of a schedule from a file begins with."""


def _fixed(schedule: Callable[[int, int], Schedule]) -> Builder:
    """A schedule whose number of chunks is given by its kind."""
    return lambda ranks, microbatches, _: schedule(ranks, microbatches)


SCHEDULES: Mapping[str, Builder] = MappingProxyType(
    {
        "gpipe": gpipe,
        "1f1b": _fixed(one_f_one_b),
        "interleaved": interleaved,
        "zb-h1": _fixed(zb_h1),
        "zb-h2": _fixed(zb_h2),
        "zb-v": _fixed(zb_v),
        "dualpipev": _fixed(dualpipev),
        "dualpipe": _fixed(dualpipe),
    }
)


class Misfit(NamedTuple):
    """Why a schedule cannot be had: the field of the plan, its value, the reason, and what would work."""

    field: str
    value: str | int
    reason: str
    way_out: str

    def __str__(self) -> str:
        return f"{self.field} = {self.value!r} {self.reason}. {self.way_out}"


def misfits(name: str, *, ranks: int, microbatches: int, chunks: int, zero: int = 0) -> list[Misfit]:
    """Why this schedule cannot be built for this many pipeline ranks, microbatches and chunks, or not be run under this ZeRO stage;
    empty when it can. Reads the file of a schedule from a file."""
    found = [
        Misfit(field, value, "is too few: a schedule needs at least one", f"Use {field} >= 1.")
        for field, value in (("ranks", ranks), ("microbatches", microbatches), ("chunks", chunks))
        if value < 1
    ]
    if name.startswith(FILE):
        return found + _of_file(name, ranks=ranks, microbatches=microbatches, chunks=chunks)
    if name not in SCHEDULES:
        near = get_close_matches(name.lower(), SCHEDULES, n=1)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        return [Misfit("schedule", name, "is not a schedule", f"{hint}Use one of: {', '.join(SCHEDULES)}, {FILE}PATH."), *found]
    if chunks >= 1 and not _holds(name, chunks):
        least, _ = CHUNKS[name]
        others = ", ".join(repr(other) for other in SCHEDULES if _holds(other, chunks))
        reason = f"with schedule = {name!r}, which has {'one stage' if least == 1 else f'{least} stages'} a rank"
        found.append(Misfit("chunks", chunks, reason, f"Use chunks = {least}, or another schedule: {others}."))
    if name in BIDIRECTIONAL:
        found += _both_ways(name, ranks=ranks, microbatches=microbatches, zero=zero)
    return found


def _holds(name: str, chunks: int) -> bool:
    """Can a schedule have this many stages a rank?"""
    least, most = CHUNKS.get(name, (1, chunks))
    return least <= chunks <= most


def enough(name: str, *, ranks: int, microbatches: int) -> int:
    """As many of the microbatches as show what all of them do: how many are in flight at most, and, but under interleaved 1F1B with uneven
    rounds, how long ranks idle. Past two rounds each takes another's place; but GPipe holds all, and of an odd number one way has more.
    """
    if name == "gpipe" or name not in SCHEDULES:
        return microbatches
    if name == "interleaved" and microbatches % ranks:
        first = rounds(ranks, microbatches)[:2]
        return next(few for few in range(min(sum(first), microbatches), microbatches + 1) if rounds(ranks, few)[:2] == first)
    return min(microbatches, 2 * ranks + (microbatches % 2 if name in BIDIRECTIONAL else 0))


def _both_ways(name: str, *, ranks: int, microbatches: int, zero: int) -> Iterator[Misfit]:
    if ranks >= 1 and ranks % 2:
        reason = f"is odd, and schedule = {name!r} mirrors each rank in another one"
        yield Misfit("ranks", ranks, reason, f"Use an even number, such as {ranks + 1}, or schedule = 'dualpipev'.")
    if microbatches == 1:
        yield Misfit("microbatches", 1, f"is too few: schedule = {name!r} runs some each way", "Use microbatches >= 2.")
    if zero >= 2:
        reason = f"with schedule = {name!r}, whose two copies of a stage would meet for each microbatch, in different orders"
        yield Misfit("zero", zero, reason, "Use zero <= 1 or schedule = 'dualpipev'.")


def _of_file(name: str, *, ranks: int, microbatches: int, chunks: int) -> list[Misfit]:
    """Does a file hold a schedule that can be run, for this plan?"""
    try:
        schedule = load(name)
    except (OSError, UnicodeDecodeError) as fault:
        return [Misfit("schedule", name, f"cannot be read ({fault})", f"Write the path of a schedule's file after {FILE!r}.")]
    except ValueError as refused:
        faults = str(refused).splitlines()
        return [Misfit("schedule", name, f"is no schedule: {fault.rstrip('.')}", "Mend the file.") for fault in faults]
    found: list[Misfit] = []
    stages = ranks * chunks
    for field, value, there, what in (
        ("ranks", ranks, schedule.ranks, "ranks"),
        ("microbatches", microbatches, schedule.microbatches, "microbatches"),
        ("chunks", chunks, schedule.stages / schedule.ranks, f"a rank ({schedule.stages} stages on {schedule.ranks} ranks)"),
    ):
        if value != there and not (field == "chunks" and stages == schedule.stages):
            way_out = f"Use {field} = {there:g} or another file." if there == int(there) else "Use another file."
            found.append(Misfit(field, value, f"with schedule = {name!r}, which is for {there:g} {what}", way_out))
    if schedule.mirrored is not None:  # what ranks share is laid out before a schedule is built
        reason = "is bidirectional, and a plan tells from a schedule's name which ranks share the state of a stage"
        found.append(Misfit("schedule", name, reason, "Use schedule = 'dualpipe', or a file without mirrored."))
    faults = problems(lower(schedule, 0))
    return found + [Misfit("schedule", name, f"cannot be run: {fault}", "Mend the file.") for fault in faults]


def load(name: str) -> Schedule:
    """The schedule of a name `file:PATH`. Raises OSError if the file cannot be read, ValueError with all reasons if it holds none."""
    return file.read(Path(name.removeprefix(FILE)).read_text(encoding="utf-8"))


def refusals(name: str, *, ranks: int, microbatches: int, chunks: int, zero: int = 0) -> list[str]:
    """The `misfits` in words, each with the value, the reason and what would work."""
    return [str(misfit) for misfit in misfits(name, ranks=ranks, microbatches=microbatches, chunks=chunks, zero=zero)]


def build(name: str, *, ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """The schedule of that name: a key of SCHEDULES, or `file:PATH`. Raises ValueError with every reason why it cannot be had."""
    if found := refusals(name, ranks=ranks, microbatches=microbatches, chunks=chunks):
        raise ValueError("\n".join(found))
    return load(name) if name.startswith(FILE) else SCHEDULES[name](ranks, microbatches, chunks)
