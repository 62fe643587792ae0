"""The run that a run folder holds, compared with the run that a command names. No torch."""

import contextlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megalith import disk, epochs
from megalith.check import check_resume
from megalith.check.resume import changed_keys, check_checkpoint, consumed, deal_in
from megalith.checkpoint.folder import DamagedCheckpointError, committed, of_run, read_manifest
from megalith.spec import files
from megalith.spec.files import ResolvedRun
from megalith.spec.problem import Problem, SpecErrors
from megalith.spec.toml import literal

APART = frozenset({"fleet", "launch", "log", "alerts", "validation", "checkpoint", "name"})
"""Keys and tables that do not matter to a run's copies in memory: they belong to the run whatever these values are."""

OLD_DEFAULTS: dict[tuple[str, str], Any] = {("optimizer", "warmup"): 2000}
"""Former defaults, which earlier versions saved with a run. A run that began with a former default keeps it unless its file sets another
value."""


def with_old_defaults(resolved: ResolvedRun, folder: Path) -> ResolvedRun:
    """Return the run with the defaults that it began with, if they differ from today's."""
    file = epochs.newest(folder, files.FILE)
    if not disk.is_file(file):
        return resolved
    spec, provenance = resolved.spec, dict(resolved.provenance)
    try:
        saved = files.read(file, saved=True).resolved.spec
        for (table, name), value in OLD_DEFAULTS.items():
            key = f"{table}.{name}"
            if provenance.get(key) == "default" and getattr(getattr(saved, table), name) == value:
                spec = spec.model_copy(update={table: getattr(spec, table).model_copy(update={name: value})})
                provenance[key] = f"default at the time when {file} was written"
    except (SpecErrors, AttributeError):  # a file that cannot be read: the comparison of the runs reports it
        return resolved
    return replace(resolved, spec=spec, provenance=provenance)


def print_start_over(resolved: ResolvedRun, folder: Path) -> None:
    """Print in a line that a run without a checkpoint starts over, if it was started before with other values, and these values."""
    file = epochs.newest(folder, files.FILE)
    if committed(of_run(folder)) or not disk.is_file(file):
        return
    try:
        reading = files.read(file, saved=True)
        changes = {} if reading.problems else changed_keys(reading.resolved.spec, resolved.spec)
    except (SpecErrors, AttributeError):  # a file that was torn: there is nothing to compare with
        return
    found = [
        f"{key} = {literal(now)} (was {literal(was)})"
        for key, (was, now) in changes.items()
        if key.partition(".")[0] not in APART
    ]
    if found:
        words = f"{folder} has no checkpoint, so this run starts over, with {', '.join(found)}. Copies of the earlier state are removed"
        print(words, file=sys.stderr, flush=True)


def differences(resolved: ResolvedRun, folder: Path) -> list[Problem]:
    """Return the reasons why this run cannot resume the run in `folder`, or continue from the folder's checkpoint, which another run may
    have saved. If the folder has no checkpoint, and never had one, any run may start in it."""
    checkpoints = committed(of_run(folder))
    if not checkpoints:
        return _checkpoints_gone(folder)
    if disk.is_file(file := epochs.newest(folder, files.FILE)):
        saved = files.read(file, saved=True).resolved.spec  # its cluster's file need not be there any more
        meta, provenance = _newest_meta(checkpoints), resolved.provenance
        if found := check_resume(saved, resolved.spec, samples=consumed(meta), deal=deal_in(meta), provenance=provenance):
            return found
    for path in checkpoints:
        with contextlib.suppress(DamagedCheckpointError):  # it is not used, and whoever loads the others says so
            name = f"{path.parent.name}/{path.name}"
            if found := check_checkpoint(name, read_manifest(path).meta, resolved.spec, provenance=resolved.provenance):
                return found
    return []


def _checkpoints_gone(folder: Path) -> list[Problem]:
    """Return the reason not to start over in a folder without checkpoints whose log names some: they may be on a file system of their
    own."""
    from megalith import events

    saved = events.of_kind(events.read(folder), events.Checkpoint)
    if not saved:
        return []
    if committed(of_run(folder)):  # they were being renamed for another owner
        return []
    where = of_run(folder)
    reason = (
        f"holds no checkpoint, but the log of this run says that step {saved[-1].step} was saved there. The run would start over"
    )
    way_out = f"Mount the file system of {where.name} or put the folder back, or start over in another run folder with --run-dir."
    return [Problem("error", str(where), None, reason, way_out)]


def differences_if_readable(resolved: ResolvedRun, folder: Path) -> list[Problem]:
    """Return the `differences` of a run that has invalid values, which are left out."""
    try:
        return differences(resolved, folder)
    except SpecErrors as errors:  # the saved run cannot be read
        return errors.problems


def _newest_meta(checkpoints: Sequence[Path]) -> Mapping[str, Any]:
    """Return the metadata of a run's newest checkpoint; an empty mapping if no checkpoint can be read."""
    for path in checkpoints:  # the newest first
        with contextlib.suppress(DamagedCheckpointError):
            return read_manifest(path).meta
    return {}
