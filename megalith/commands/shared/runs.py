"""The run that a command names: read its file, and find what is wrong with it. No torch."""

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megalith.check import all_ranks, check_here, check_resume
from megalith.check import check as find_problems
from megalith.check.own import admit
from megalith.check.resume import check_checkpoint
from megalith.checkpoint.folder import DamagedCheckpointError, committed, of_run, read_manifest
from megalith.commands.shared.arguments import RunRequest
from megalith.machine import capacity
from megalith.machine.describe import processor
from megalith.spec import files
from megalith.spec.files import Resolved
from megalith.spec.plan import AUTO
from megalith.spec.problem import Problem, Severity, SpecErrors
from megalith.spec.run import RunSpec


@dataclass(frozen=True)
class Checked:
    """A run and everything found in it."""

    resolved: Resolved
    problems: list[Problem]
    here: tuple[Problem, ...] = ()
    """Problems of this machine rather than of the run."""

    @property
    def errors(self) -> list[Problem]:
        return [problem for problem in self.problems if problem.severity == "error"]

    def as_json(self) -> dict[str, Any]:
        """Return every value of the run and where each came from."""
        return {"spec": self.resolved.spec.model_dump(mode="json"), "provenance": self.resolved.provenance}


def check(
    request: RunRequest,
    *,
    world: int | None = None,
    look: bool = True,
    here: Severity | None = None,
    count: Callable[[RunSpec], int] = all_ranks,
) -> Checked:
    """Read a run file and find everything that is wrong with it, or unwise.

    `world` is the number of ranks there will be, to compare with the plan. With `look`, files and folders that the run names are looked
    for; a run that its folder already holds does not need what only a first start does. With `here`, also report what this
    machine lacks for the run's ranks (or for `count` ranks), with at most this severity. Raises SpecErrors, with
    everything that was found, if the file cannot be read as a run. Imports the user's own parts that the run names.
    """
    reading = files.read(request.file, overrides=request.overrides, saved=request.saved)
    resolved = reading.resolved
    named = request.run_dir is not None or hasattr(resolved.spec, "name")
    begun = look and named and bool(committed(of_run(request.folder(resolved.spec))))
    if begun and not reading.problems:
        resolved = _with_old_defaults(resolved, request.folder(resolved.spec))
    unfit, sources = admit(resolved.spec, resolved.provenance)
    resolved = replace(resolved, provenance=resolved.provenance | sources)
    found = unfit + find_problems(resolved.spec, world=world, files=look, begun=begun, provenance=resolved.provenance)
    short = (
        []
        if here is None
        else check_here(
            resolved.spec,
            capacity.measure(),
            count=count,
            severity=here,
            provenance=resolved.provenance,
            processor=processor()[0],
        )
    )
    found = sorted([*found, *short], key=lambda problem: problem.severity != "error")
    if reading.problems:
        known = {problem.key for problem in reading.problems}
        faulty = {_table(key) for key in known}  # a default in one may stand for what a faulty key meant
        others = (p for p in found if p.key not in known and (p.source != "default" or _table(p.key) not in faulty))
        raise SpecErrors([*reading.problems, *others])
    checked = Checked(resolved, found, tuple(short))
    return checked if checked.errors else replace(checked, resolved=_decided(resolved))


def _decided(resolved: Resolved) -> Resolved:
    """Return the run with a size for each `segments:auto`: all ranks must recompute alike, so it is decided once, and recorded."""
    spec = resolved.spec
    asked = {"plan": spec.plan} | ({"fallback": spec.fleet.fallback} if spec.fleet.fallback else {})
    if all(plan.recompute != AUTO for plan in asked.values()):
        return resolved
    from megalith.cost import foreseen  # traces blocks, for which torch is imported

    plans = {name: foreseen.of_run(spec.model_copy(update={"plan": plan})).plan for name, plan in asked.items()}
    fleet = spec.fleet.model_copy(update={"fallback": plans.get("fallback")})
    return replace(resolved, spec=spec.model_copy(update={"plan": plans["plan"], "fleet": fleet}))


OLD_DEFAULTS: dict[tuple[str, str], Any] = {("optimizer", "warmup"): 2000}
"""Defaults that earlier versions had, and saved with a run. A run that began with one keeps it unless its file says otherwise."""


def _with_old_defaults(resolved: Resolved, folder: Path) -> Resolved:
    """Return the run with the defaults that it began with, if they differ from today's."""
    if not (folder / files.FILE).is_file():
        return resolved
    spec, provenance = resolved.spec, dict(resolved.provenance)
    try:
        saved = files.read(folder / files.FILE, saved=True).resolved.spec
        for (table, name), value in OLD_DEFAULTS.items():
            key = f"{table}.{name}"
            if provenance[key] == "default" and getattr(getattr(saved, table), name) == value:
                spec = spec.model_copy(update={table: getattr(spec, table).model_copy(update={name: value})})
                provenance[key] = f"default when {folder / files.FILE} was written"
    except (SpecErrors, AttributeError):  # a file that cannot be read: what compares the runs says so
        return resolved
    return replace(resolved, spec=spec, provenance=provenance)


def _table(name: str) -> str:
    return name.rpartition(".")[0]


def refuse(problems: Sequence[Problem], resolved: Resolved | None = None, folder: Path | None = None) -> None:
    """Raise SpecErrors if there are problems: with `resolved` and `folder`, together with why that run cannot resume the one there."""
    if problems:
        more = differences(resolved, folder) if resolved is not None and folder is not None else []
        raise SpecErrors([*problems, *more])


def tell(checked: Checked) -> None:
    """Print what this machine is short of for a run that starts nevertheless: to stderr, a line each."""
    for problem in checked.here:
        print(f"advice: {problem}", file=sys.stderr, flush=True)


def differences(resolved: Resolved, folder: Path) -> list[Problem]:
    """Return why this run cannot resume the one in `folder`, or continue from a checkpoint there, which may be another run's.
    Without a
    checkpoint there is nothing to resume, and any run may start."""
    checkpoints = committed(of_run(folder))
    if not checkpoints:
        return []
    if (folder / files.FILE).is_file():
        saved = files.read(folder / files.FILE, saved=True).resolved.spec  # its cluster's file need not be there any more
        if found := check_resume(saved, resolved.spec, samples=_consumed(checkpoints), provenance=resolved.provenance):
            return found
    for path in checkpoints:
        with suppress(DamagedCheckpointError):  # it is not used, and whoever loads the others says so
            name = f"{path.parent.name}/{path.name}"
            if found := check_checkpoint(name, read_manifest(path).meta, resolved.spec, provenance=resolved.provenance):
                return found
    return []


def _consumed(checkpoints: Sequence[Path]) -> int | None:
    """Return the samples that a run has consumed by its newest checkpoint; None where none can be read."""
    for path in checkpoints:  # the newest first
        with suppress(DamagedCheckpointError, KeyError):
            return int(read_manifest(path).meta["position"]["samples"])
    return None
