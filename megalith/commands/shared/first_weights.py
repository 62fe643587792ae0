"""The one checkpoint that `train.init_from` means for a run: a folder of checkpoints may get newer ones before the run has its own."""

import contextlib
import os
from dataclasses import replace
from pathlib import Path

from megalith import disk, epochs
from megalith.check.resume import is_same_start
from megalith.checkpoint.folder import MANIFEST, DamagedCheckpointError, committed, find_complete, of_run
from megalith.sealed import seal
from megalith.spec import files
from megalith.spec.files import ResolvedRun
from megalith.spec.problem import SpecErrors
from megalith.spec.run import RunSpec


def pinned(resolved: ResolvedRun, folder: Path) -> ResolvedRun:
    """Return the run with the checkpoint that gives it its first weights by name, in place of a folder with several ones. A run that was
    started before keeps the checkpoint that its run folder records, while this checkpoint exists or the run has one of its own."""
    asked = resolved.spec.train.init_from
    if asked is None:
        return resolved
    found = as_recorded(resolved, folder)
    if is_settled(resolved, found, folder):
        return found
    newest = _newest(asked)
    return resolved if newest is None else _with(resolved, newest)


def as_recorded(resolved: ResolvedRun, folder: Path) -> ResolvedRun:
    """Return the run with the first weights that its run folder records, if they are among those that the run file names; otherwise the
    run itself."""
    asked, recorded = resolved.spec.train.init_from, _recorded(folder)
    found = asked is not None and recorded is not None and is_same_start(recorded, asked)
    return _with(resolved, recorded) if found and recorded is not None else resolved


def is_settled(asked: ResolvedRun, found: ResolvedRun, folder: Path) -> bool:
    """Return True if the first weights that the run folder records, as `found` has them, remain the run's: the run has a checkpoint of its
    own, or theirs still exists. `asked`: the run as its file names them."""
    recorded = found is not asked and disk.is_there(Path(found.spec.train.init_from or "") / MANIFEST)
    return recorded or bool(committed(of_run(folder)))


def seals(spec: RunSpec) -> dict[str, str]:
    """Return the digest of the manifest of a run's first weights, by path; empty if there are none. The manifest has the digests of the
    other files."""
    start = spec.train.init_from
    manifest = None if start is None else Path(start) / MANIFEST
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # a run that has its own checkpoints needs it no more
        return {} if manifest is None else seal([manifest])
    return {}


def _recorded(folder: Path) -> str | None:
    file = epochs.newest(folder, files.FILE)
    if not disk.is_file(file):
        return None
    with contextlib.suppress(SpecErrors, AttributeError):  # a file that cannot be read: the comparison of the runs reports it
        return files.read(file, saved=True).resolved.spec.train.init_from
    return None


def _newest(asked: str) -> str | None:
    with contextlib.suppress(FileNotFoundError, DamagedCheckpointError):  # the ranks report it
        return os.path.abspath(find_complete(Path(asked))[0])  # not what links point to, which may change
    return None


def _with(resolved: ResolvedRun, start: str) -> ResolvedRun:
    spec = resolved.spec
    return replace(resolved, spec=spec.model_copy(update={"train": spec.train.model_copy(update={"init_from": start})}))
