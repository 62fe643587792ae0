"""Hooks at which a rank injects the faults of a list, at the same point in every run with that list. Without a list
(`MEGALITH_FAULTS`), the hooks do nothing.
"""

import os
import time
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from megalith.fleet.actions import happen, make_room
from megalith.fleet.injection import VARIABLE, Injection, Moment, fired, load, marks
from megalith.fleet.rank_info import RankInfo


class Faults:
    """The faults that one rank injects. `due` records the faults that it returns, so that a restarted rank does not inject them
    again."""

    def __init__(self, path: Path, rank_info: RankInfo, generation: str = "") -> None:
        self.rank_info, self._generation = rank_info, generation
        self._path = path
        listed = load(path)
        self.fill_disks = any(one.kind == "full" for one in listed)
        self._mine = [one for one in listed if rank_info.rank in one.ranks]
        self._befallen: dict[int, int] = {}  # lasting ones that befell this process: since which step

    def due(self, moment: Moment, step: int | None) -> Iterator[Injection]:
        """Yield the faults that must be injected now, at `moment` of step `step`."""
        for one in self._mine:
            if one.moment == moment and self._is_time(one, step) and self._mark(one, step):
                yield one

    def _is_time(self, one: Injection, step: int | None) -> bool:
        if one.after is not None:
            return one.after in fired(self._path)
        if step is None or one.lasts == 1:
            return step == one.step
        since = self._befallen.get(one.number, one.step)
        return since <= step < since + one.lasts

    def _mark(self, one: Injection, step: int | None) -> bool:
        if one.number in self._befallen:
            return True
        if any(self._is_older(mark) for mark in marks(self._path).glob(f"{one.number}-*")):
            return False
        mark = marks(self._path) / f"{one.number}-{self.rank_info.rank}"
        written = self._path.with_suffix(f".{self.rank_info.rank}")
        written.unlink(missing_ok=True)  # it is the last mark by another name
        written.write_text(f"{time.time():.6f} {self.rank_info.node} {self._generation}")
        try:
            os.link(written, mark)  # whole or not at all: a rank may be ended here, for the fault before this one
        except FileExistsError:
            return False
        if one.lasts > 1:
            self._befallen[one.number] = step or 0
        return True

    def _is_older(self, mark: Path) -> bool:
        return mark.read_text().rpartition(" ")[2] != self._generation


@cache
def _find(path: str) -> Faults:
    return Faults(Path(path), RankInfo.find(), os.environ.get("MEGALITH_GENERATION", ""))


def find(environment: Mapping[str, str] = os.environ) -> Faults | None:
    """Return the faults of this rank; None if no list is given."""
    path = environment.get(VARIABLE)
    return _find(path) if path else None


def at(moment: Moment, step: int | None = None) -> None:
    """Inject the faults that this rank's list has for this moment of this step. Faults in tensors are injected by
    `train.inject`."""
    faults = find()
    if faults is None:
        return
    if moment == "saving" and faults.fill_disks:
        make_room(but=step)
    for one in faults.due(moment, step):
        happen(one, faults.rank_info)
