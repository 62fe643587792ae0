"""A list of faults to inject: a file that a campaign writes and ranks read. Each fault is injected once, because a file beside
the list, which outlives the rank, records the injection.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

VARIABLE = "MEGALITH_FAULTS"
Moment = Literal["joining", "building", "restoring", "step", "reading", "gradients", "resting", "saving"]

OWN_DATA = "hurt-by-a-campaign"
"""Name of a file in a data folder that permits faults in the folder's shards."""


@dataclass(frozen=True)
class Injection:
    """One fault, which `ranks` inject at `moment` after `step` finished steps. `after`: inject the fault only during the restart
    after the fault with this number. `place`: a number in 0..1 that selects the tensor and element. `lasts`: number of steps in
    which the fault is injected, while the affected process lives.
    """

    number: int
    kind: str
    step: int
    moment: Moment
    ranks: tuple[int, ...]
    place: float = 0.0
    lasts: int = 1
    after: int | None = None


def save(path: Path, injections: Sequence[Injection]) -> None:
    """Write a list of faults for the ranks, and delete the records of earlier injections."""
    shutil.rmtree(marks(path), ignore_errors=True)
    marks(path).mkdir(parents=True)
    path.write_text(json.dumps([asdict(one) for one in injections], indent=1), encoding="utf-8")


def load(path: Path) -> list[Injection]:
    """Read the list in a file."""
    rows = json.loads(path.read_text(encoding="utf-8"))
    return [Injection(**row | {"ranks": tuple(row["ranks"])}) for row in rows]


def fired(path: Path) -> dict[int, tuple[float, str]]:
    """Return the time (seconds since the epoch) and the node of each fault that was injected."""
    found: dict[int, tuple[float, str]] = {}
    for mark in marks(path).glob("*-*"):
        at, node, _ = mark.read_text().split(" ")
        number = int(mark.name.partition("-")[0])
        found[number] = min((float(at), node), found.get(number, (float(at), node)))
    return found


def marks(path: Path) -> Path:
    """Return the folder of marks for the list at `path`, with one file for each fault and rank."""
    return path.with_suffix(".came")
