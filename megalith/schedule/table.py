"""The table of schedules that a plan can name, with their properties, and the checks of whether a schedule can be built."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
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
"""Function from (ranks, microbatches, chunks) to a schedule"""

Count: TypeAlias = Callable[[int, int], int]
"""Function from (ranks, microbatches) to a number of microbatches"""

Idle: TypeAlias = Callable[[int, int, int, float], float | None]
"""Function from (ranks, microbatches, chunks, backward) to the idle time of a rank in a step"""

FILE = "file:"
"""Prefix of the name of a schedule from a file."""


def _fixed(schedule: Callable[[int, int], Schedule]) -> Builder:
    return lambda ranks, microbatches, _: schedule(ranks, microbatches)


def _every(ranks: int, microbatches: int) -> int:
    return microbatches


def _one_a_rank(ranks: int, microbatches: int) -> int:
    return min(ranks, microbatches)


def _two_rounds(ranks: int, microbatches: int) -> int:
    """Return the number of microbatches in two rounds. After two rounds, each microbatch that starts replaces one that has ended."""
    return min(microbatches, 2 * ranks)


def _two_rounds_both_ways(ranks: int, microbatches: int) -> int:
    """Return the number of microbatches in two rounds. If the number of all microbatches is odd, one is added, because one
    direction then has one more."""
    return min(microbatches, 2 * ranks + microbatches % 2)


def _uneven_rounds(ranks: int, microbatches: int) -> int:
    """Return the smallest number of microbatches for which the first two rounds have the same sizes as for all microbatches. The
    first two rounds decide how many microbatches are in flight."""
    if microbatches % ranks == 0:
        return _two_rounds(ranks, microbatches)
    first = rounds(ranks, microbatches)[:2]
    return next(few for few in range(min(sum(first), microbatches), microbatches + 1) if rounds(ranks, few)[:2] == first)


class Chunks(NamedTuple):
    """The number of stages that a rank holds under a schedule."""

    least: int
    usual: int
    """The number of stages a rank in pictures, drawn combinations and the planner's search."""
    most: int | None
    """The largest number of stages that a rank may hold; None: no limit."""

    def nearest(self, wanted: int) -> int:
        """Return the allowed number of stages that is nearest to `wanted`."""
        return max(self.least, wanted if self.most is None else min(wanted, self.most))


ONE, TWO = Chunks(1, 1, 1), Chunks(2, 2, 2)


@dataclass(frozen=True)
class Kind:
    """A schedule with its properties: a row of the table."""

    build: Builder
    title: str
    """The schedule's name in texts for people."""
    chunks: Chunks = ONE
    splits_backward: bool = False
    """Weight gradients are computed separately from input gradients, to fill the bubble."""
    bidirectional: bool = False
    """Microbatches run through an even number of ranks in both directions. Each stage has two copies, and ZeRO must be 0 or 1."""
    hides_exchange: bool = False
    """Ranks compute on one microbatch while the tokens of another are dispatched to their experts."""
    searched: bool = False
    """The planner tries this schedule besides 1F1B and interleaved 1F1B. If the schedule `hides_exchange`, the planner tries it
    only for models with experts."""
    instead: str | None = None
    """The name of the schedule to use instead if this one's gain does not justify its memory."""
    needs_post_validation: bool = False
    """The schedule fills the bubble only if the next step may begin before the global norm is known."""
    in_flight: Count = _every
    """Approximately the largest number of microbatches that a rank keeps for backward."""
    representative: Count = _every
    """The smallest number of microbatches that has the same peak of microbatches in flight and the same idle time as the full
    number."""
    idle: Idle | None = None
    """A closed form of a rank's idle time, in units of one microbatch's forward. `backward`, the time of a microbatch's backward, is in the
    same unit; its two halves, and all stages, are assumed to be equal. The function returns None if the formula does not hold; such
    programs are simulated.
    """
    fills_and_drains: bool = False
    """Each rank idles just as long as one microbatch takes through a chunk of every other rank, for any number of microbatches
    and any times (Narayanan et al. 2021). The time of a step of such a schedule therefore needs no simulation."""


def _filling(ranks: int, microbatches: int, chunks: int, backward: float) -> float:
    """Idle time after Narayanan et al. 2021, arXiv:2104.04473: (ranks - 1) / chunks for the forwards and as many backwards. The
    idle time is longer if there are too few microbatches to keep a rank busy between its chunks."""
    waiting = chunks * max(0, ranks - microbatches) + min(ranks, microbatches) - 1
    return waiting * (1 + backward) / chunks


def _zb_h1_idle(ranks: int, microbatches: int, chunks: int, backward: float) -> float | None:
    """Idle time of ZB-H1 after Qi et al. 2024, arXiv:2401.10241."""
    return (ranks - 1) * max(1.0, backward / 2) if microbatches >= ranks else None


def _zb_v_idle(ranks: int, microbatches: int, chunks: int, backward: float) -> float | None:
    """Idle time of ZB-V after Qi et al. 2024, arXiv:2405.15362."""
    return (ranks - 1) * backward / 4 if microbatches >= 2 * ranks and backward >= 2 else None


def _dualpipev_idle(ranks: int, microbatches: int, chunks: int, backward: float) -> float | None:
    """Idle time of DualPipeV after DeepSeek-AI's DualPipe repository and Sea AI Lab's "cut in half"."""
    return ranks - 1.0 if microbatches >= 2 * ranks and backward == 2 else None


def _dualpipe_idle(ranks: int, microbatches: int, chunks: int, backward: float) -> float | None:
    """Idle time of DualPipe after DeepSeek-AI 2024, arXiv:2412.19437, table 2. With an odd number of microbatches, one direction
    has one microbatch more."""
    return ranks - 2.0 + 3 * (microbatches % 2) if microbatches >= 2 * ranks and backward == 2 else None


SCHEDULES: dict[str, Kind] = {
    "gpipe": Kind(gpipe, "GPipe", Chunks(1, 1, None), idle=_filling),
    "1f1b": Kind(
        _fixed(one_f_one_b), "1F1B", in_flight=_one_a_rank, representative=_two_rounds, idle=_filling, fills_and_drains=True
    ),
    "interleaved": Kind(
        interleaved, "interleaved 1F1B", Chunks(1, 2, None),
        in_flight=_one_a_rank, representative=_uneven_rounds, idle=_filling, fills_and_drains=True,
    ),
    "zb-h1": Kind(
        _fixed(zb_h1), "ZB-H1", splits_backward=True, searched=True,
        in_flight=_one_a_rank, representative=_two_rounds, idle=_zb_h1_idle,
    ),
    "zb-h2": Kind(
        _fixed(zb_h2), "ZB-H2", splits_backward=True, needs_post_validation=True, instead="zb-h1",
        in_flight=lambda ranks, microbatches: min(2 * ranks - 1, microbatches), representative=_two_rounds,
    ),
    "zb-v": Kind(
        _fixed(zb_v), "ZB-V", TWO, splits_backward=True, searched=True,
        in_flight=_one_a_rank, representative=_two_rounds, idle=_zb_v_idle,
    ),
    "dualpipev": Kind(
        _fixed(dualpipev), "DualPipeV", TWO, splits_backward=True, hides_exchange=True, searched=True,
        in_flight=_one_a_rank, representative=_two_rounds, idle=_dualpipev_idle,
    ),
    "dualpipe": Kind(
        _fixed(dualpipe), "DualPipe", splits_backward=True, bidirectional=True, hides_exchange=True, searched=True,
        instead="dualpipev", in_flight=_one_a_rank, representative=_two_rounds_both_ways, idle=_dualpipe_idle,
    ),
}  # fmt: skip
"""The schedules by their name in a plan. Under DualPipe a rank holds one of the plan's stages and a copy of another."""


def kind(name: str) -> Kind:
    """Return the row of a schedule. A schedule from a file has only default properties, and is assumed to have as many
    microbatches in flight as ranks."""
    return SCHEDULES.get(name) or Kind(lambda *_: load(name), name, Chunks(1, 1, None), in_flight=_one_a_rank)


def interleaving(chunks: int) -> str:
    """Return the name of the schedule 1F1B with this number of stages a rank, with which other schedules are compared."""
    return "1f1b" if chunks == 1 else "interleaved"


class ScheduleProblem(NamedTuple):
    """A reason why a schedule cannot be built: the field of the plan, its value, the reason, and a value that works."""

    field: str
    value: str | int
    reason: str
    way_out: str

    def __str__(self) -> str:
        return f"{self.field} = {self.value!r} {self.reason}. {self.way_out}"


def schedule_problems(name: str, *, ranks: int, microbatches: int, chunks: int, zero: int = 0) -> list[ScheduleProblem]:
    """Return why this schedule cannot be built for these pipeline ranks, microbatches and chunks, or cannot run under this ZeRO
    stage; empty if it can. If the schedule is in a file, this function reads the file."""
    found = [
        ScheduleProblem(field, value, "is too few: a schedule needs at least 1", f"Use {field} >= 1.")
        for field, value in (("ranks", ranks), ("microbatches", microbatches), ("chunks", chunks))
        if value < 1
    ]
    if name.startswith(FILE):
        return found + _of_file(name, ranks=ranks, microbatches=microbatches, chunks=chunks)
    if name not in SCHEDULES:
        near = get_close_matches(name.lower(), SCHEDULES, n=1)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        return [
            ScheduleProblem(
                "schedule", name, "is not a known schedule", f"{hint}Use one of: {', '.join(SCHEDULES)}, {FILE}PATH."
            ),
            *found,
        ]
    if chunks >= 1 and not _holds(name, chunks):
        least = SCHEDULES[name].chunks.least
        others = ", ".join(repr(other) for other in SCHEDULES if _holds(other, chunks))
        reason = f"with schedule = {name!r}, which needs {'one stage' if least == 1 else f'{least} stages'} a rank"
        found.append(ScheduleProblem("chunks", chunks, reason, f"Use chunks = {least}, or another schedule: {others}."))
    if SCHEDULES[name].bidirectional:
        found += _both_ways(name, ranks=ranks, microbatches=microbatches, zero=zero)
    return found


def _holds(name: str, chunks: int) -> bool:
    return SCHEDULES[name].chunks.nearest(chunks) == chunks


def representative_microbatches(name: str, *, ranks: int, microbatches: int) -> int:
    """Return the smallest number of microbatches that has the same peak of microbatches in flight and the same idle time as all
    microbatches. For interleaved 1F1B with uneven rounds, only the peak is the same."""
    return kind(name).representative(ranks, microbatches)


def _both_ways(name: str, *, ranks: int, microbatches: int, zero: int) -> Iterator[ScheduleProblem]:
    other = SCHEDULES[name].instead
    alternative = f"or schedule = {other!r}" if other else ""
    if ranks >= 1 and ranks % 2:
        reason = f"is odd, but schedule = {name!r} pairs each rank with a mirror rank"
        way_out = f"Use an even number, such as {ranks + 1}"
        yield ScheduleProblem("ranks", ranks, reason, f"{way_out}, {alternative}." if other else f"{way_out}.")
    if microbatches == 1:
        yield ScheduleProblem(
            "microbatches", 1, f"is too few: schedule = {name!r} needs one microbatch in each direction", "Use microbatches >= 2."
        )
    if zero >= 2:
        reason = (
            f"does not fit schedule = {name!r}: ZeRO 2 and 3 reduce gradients for each microbatch, but the two copies of a stage run "
            f"their microbatches in different orders"
        )
        yield ScheduleProblem("zero", zero, reason, f"Use zero <= 1 {alternative}".rstrip() + ".")


def _of_file(name: str, *, ranks: int, microbatches: int, chunks: int) -> list[ScheduleProblem]:
    try:
        schedule = load(name)
    except (OSError, UnicodeDecodeError) as fault:
        return [
            ScheduleProblem("schedule", name, f"cannot be read ({fault})", f"Write the path of a schedule's file after {FILE!r}.")
        ]
    except ValueError as refused:
        faults = str(refused).splitlines()
        return [
            ScheduleProblem("schedule", name, f"is not a valid schedule: {fault.rstrip('.')}", "Correct the file.")
            for fault in faults
        ]
    found: list[ScheduleProblem] = []
    stages = ranks * chunks
    for field, value, there, what in (
        ("ranks", ranks, schedule.ranks, "ranks"),
        ("microbatches", microbatches, schedule.microbatches, "microbatches"),
        ("chunks", chunks, schedule.stages / schedule.ranks, f"a rank ({schedule.stages} stages on {schedule.ranks} ranks)"),
    ):
        if value != there and not (field == "chunks" and stages == schedule.stages):
            way_out = f"Use {field} = {there:g} or another file." if there == int(there) else "Use another file."
            found.append(ScheduleProblem(field, value, f"with schedule = {name!r}, which is for {there:g} {what}", way_out))
    if schedule.mirrored is not None:  # what ranks share is laid out before a schedule is built
        both_ways = [f"schedule = {known!r}" for known, row in SCHEDULES.items() if row.bidirectional]
        reason = "this file is bidirectional, but which ranks share a stage's state is known only for built-in schedules"
        found.append(
            ScheduleProblem("schedule", name, reason, f"Use {' or '.join(both_ways)}, or a file without the key mirrored.")
        )
    faults = problems(lower(schedule, 0))
    return found + [ScheduleProblem("schedule", name, f"cannot be run: {fault}", "Correct the file.") for fault in faults]


def load(name: str) -> Schedule:
    """Return the schedule of a name `file:PATH`. Raises OSError if the file cannot be read, and ValueError with all reasons if it is not a
    valid schedule."""
    return file.read(Path(name.removeprefix(FILE)).read_text(encoding="utf-8"))


def schedule_problem_texts(name: str, *, ranks: int, microbatches: int, chunks: int, zero: int = 0) -> list[str]:
    """Return the `schedule_problems` as sentences, each with the value, the reason and a value that works."""
    return [str(problem) for problem in schedule_problems(name, ranks=ranks, microbatches=microbatches, chunks=chunks, zero=zero)]


def build(name: str, *, ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Build the schedule `name`: a key of SCHEDULES, or `file:PATH`. Raises ValueError with every reason why the schedule cannot be
    built."""
    if found := schedule_problem_texts(name, ranks=ranks, microbatches=microbatches, chunks=chunks):
        raise ValueError("\n".join(found))
    return kind(name).build(ranks, microbatches, chunks)
