"""Finds and removes copies of the state that runs left outside their run folders, in this machine's shared memory and on its
disks."""

import contextlib
import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megalith import epochs
from megalith.fleet.secure import key
from megalith.fleet.tiers import copies, roots
from megalith.spec.files import SPEC_FILE
from megalith.spec.fleet import FleetSpec

State = Literal["in use", "ended", "abandoned"]


@dataclass(frozen=True)
class Leftover:
    """One folder of copies. `run`: the run folder to which the copies belong. `state`: "in use" while a process of the run
    exists; "abandoned" if no command can resume from the copies, because the run folder is gone or has another run. A run
    folder whose file system is not mounted is not gone. `step`: the
    newest step of which the folder has any copy; None: not known."""

    path: Path
    where: Literal["memory", "disk"]
    bytes: int
    run: Path
    state: State
    step: int | None


def find(*, run_dir: Path | None = None, disks: Iterable[Path] = ()) -> list[Leftover]:
    """Return the folders of copies of this user's runs (or of one run) in shared memory and then on disks (`disks`, and those
    that the runs' specifications name)."""
    wanted = None if run_dir is None else run_dir.resolve()
    in_memory = _in(roots.copies_place(), "memory")
    runs = {one.run for one in in_memory} | ({wanted} if wanted else set())
    places = {Path(FleetSpec().disk), *disks, *filter(None, map(_disk_of, runs))} - {roots.copies_place()}
    found = [*in_memory, *(one for place in sorted(places) for one in _in(place, "disk"))]
    return [one for one in found if wanted in (None, one.run)]


def clear(one: Leftover) -> bool:
    """Remove a folder of copies, and return True if it was removed. A folder that a process uses is kept."""
    with roots.claimed(one.path) as owner:
        if owner is not None:
            shutil.rmtree(one.path, ignore_errors=True)
    return not one.path.exists()


def _in(place: Path, where: Literal["memory", "disk"]) -> list[Leftover]:
    with contextlib.suppress(OSError):
        found = (_look(path, where) for path in sorted(place.glob("megalith-*")))
        return [one for one in found if one is not None]
    return []


def _look(path: Path, where: Literal["memory", "disk"]) -> Leftover | None:
    try:
        with roots.opened(path) as file:
            owner = json.load(file)
        run = Path(owner["run"])
        with roots.claimed(path) as free:
            state: State = "in use" if free is None else "abandoned" if _is_gone(owner) else "ended"
        size = sum(file.stat().st_blocks * 512 for file in path.rglob("*") if file.is_file())
        return Leftover(path, where, size, run, state, _newest(path, run))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _is_gone(owner: Mapping[str, str]) -> bool:
    with contextlib.suppress(OSError):  # a folder that cannot be read is away
        return roots.is_gone(owner)
    return False


def _newest(path: Path, run: Path) -> int | None:
    try:
        secret = key.Key(key.path_in(run).read_text(encoding="utf-8").strip())
    except OSError:
        return None
    steps = (step for node in path.glob("node-*") for step in copies.steps(node, key=secret))
    return max(steps, default=None)


def _disk_of(run: Path) -> Path | None:
    try:
        return Path(json.loads(epochs.newest(run, SPEC_FILE).read_text(encoding="utf-8"))["fleet"]["disk"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
