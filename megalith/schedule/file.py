"""A schedule from a file that a person or another program wrote: it is checked, and then used like any other schedule.

    # lines that begin like this are comments
    name = two of each
    stages = 2
    microbatches = 2
    placement = 0 1
    rank 0: 0F0 0F1 0B0 0B1
    rank 1: 1F0 1B0 1F1 1B1

`placement` names the rank of each stage; a line such as `mirrored = 4` makes the schedule bidirectional (see `Schedule`). Actions are
written as in `action.parse`: F, B, I, W and overlaps such as `(0F1;0B0)`; messages and collectives are added by `lower`.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from megalith.schedule.action import COMPUTATIONS, Row, RowEntry, Schedule, format_row, parse, parts

NUMBERS = ("stages", "microbatches", "mirrored")
"""Keys of the file's header that have one number as value; `placement` has a number for each stage."""

_ROW = re.compile(r"rank\s+(\d+)\s*:(.*)")


def dump(schedule: Schedule) -> str:
    """Return the text of a schedule's file; `read` turns it back into the schedule."""
    lines = [f"name = {schedule.name}", f"stages = {schedule.stages}", f"microbatches = {schedule.microbatches}"]
    lines.append(f"placement = {' '.join(map(str, schedule.placement))}")
    if schedule.mirrored is not None:
        lines.append(f"mirrored = {schedule.mirrored}")
    lines += [f"rank {rank}: {format_row(row)}" for rank, row in enumerate(schedule.rows)]
    return "\n".join(lines) + "\n"


def read(text: str) -> Schedule:
    """Return the schedule of a file's text. Raises ValueError with every reason why the text is not a schedule, with line numbers if they
    apply. `verify.problems` checks whether the schedule can run.
    """
    draft = _Draft()
    for number, line in enumerate(text.splitlines(), start=1):
        draft.take(number, line.strip())
    faults = draft.faults or list(_misfits(draft))
    if faults:
        raise ValueError("\n".join(faults))
    rows = tuple(draft.rows[rank] for rank in range(len(draft.rows)))
    return Schedule(draft.name, rows, draft.numbers["stages"], draft.numbers["microbatches"], draft.placement, draft.mirrored)


@dataclass
class _Draft:
    """The reader's findings so far: the values read from a file, and the problems."""

    name: str = "file"
    numbers: dict[str, int] = field(default_factory=dict)
    placement: tuple[int, ...] = ()
    rows: dict[int, Row] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    @property
    def mirrored(self) -> int | None:
        return self.numbers.get("mirrored")

    def take(self, number: int, line: str) -> None:
        if not line or line.startswith("#"):
            return
        if row := _ROW.fullmatch(line):
            self._row(number, int(row[1]), row[2])
            return
        key, equals, value = (part.strip() for part in line.partition("="))
        if key == "name" and value:
            self.name = value
        elif key in NUMBERS and value.isdecimal():
            self.numbers[key] = int(value)
        elif key == "placement" and all(word.isdecimal() for word in value.split()):
            self.placement = tuple(map(int, value.split()))
        elif equals and key in ("name", "placement", *NUMBERS):
            wanted = {"name": "a name", "placement": "one rank for each stage, such as 0 1 2 3"}.get(key, "a number of 0 or more")
            self.faults.append(f"line {number}: {key} = {value!r}. Write {wanted}.")
        else:
            keys = ", ".join(f'"{key} = "' for key in ("name", "placement", *NUMBERS))
            self.faults.append(f'line {number}: {line[:60]!r} is not understood. Lines begin with {keys}, "rank N:" or "#".')

    def _row(self, number: int, rank: int, text: str) -> None:
        if rank in self.rows:
            self.faults.append(f"line {number}: rank {rank} has a row already. Write one line for each rank.")
        row: list[RowEntry] = []
        for word in text.split():
            try:
                entry = parse(word)
            except ValueError as fault:
                self.faults.append(f"line {number}: {fault}")
                continue
            row.append(entry)
            if {action.kind for action in parts(entry)} - COMPUTATIONS:
                self.faults.append(f"line {number}: {word} is communication, which `lower` adds. Write only F, B, I and W.")
        self.rows[rank] = tuple(row)


def _misfits(draft: _Draft) -> Iterator[str]:
    ranks = len(draft.rows)
    numbers: Mapping[str, int] = draft.numbers
    missing = [key for key in ("stages", "microbatches") if key not in numbers]
    missing += [] if draft.placement else ["placement"]
    if missing or not ranks:
        yield f"{' and '.join([*missing, *([] if ranks else ['rows'])])} missing: a schedule has stages, microbatches, placement and rows."
        return
    stages, microbatches = numbers["stages"], numbers["microbatches"]
    if sorted(draft.rows) != list(range(ranks)):
        yield f"rows for ranks {sorted(draft.rows)}: ranks are numbered from 0 without a gap. Use 0 to {ranks - 1}."
    if len(draft.placement) != stages:
        yield f"placement has {len(draft.placement)} ranks for stages = {stages}. Name one rank for each stage."
    copies = {ranks - 1 - rank for rank in draft.placement} if draft.mirrored is not None else set()
    if (holders := set(draft.placement) | copies) != set(range(ranks)):
        yield f"placement puts stages on ranks {sorted(holders)}, but there are rows for {ranks} ranks. Every rank needs a stage."
    if draft.mirrored is not None and draft.mirrored > microbatches:
        yield f"mirrored = {draft.mirrored}, but there are only {microbatches} microbatches. Use mirrored <= {microbatches}."
    for rank, row in sorted(draft.rows.items()):
        outside = [a for entry in row for a in parts(entry) if a.stage >= stages or (a.microbatch or 0) >= microbatches]
        if outside:
            listed = format_row(tuple(outside[:5])) + (" ..." if len(outside) > 5 else "")
            yield f"rank {rank}: {listed}: there are only {stages} stages and {microbatches} microbatches, both numbered from 0."
