"""The ranks of a command's run: started on this machine, or this process as one of them. No torch."""

import importlib
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalith.checkpoint.folder import committed, latest, read_manifest
from megalith.fleet import causes
from megalith.fleet.exit_codes import ExitCode
from megalith.fleet.job import Job
from megalith.fleet.tiers import Copy, Tier
from megalith.machine import admission, lifeline
from megalith.spec import files
from megalith.spec.files import Resolved
from megalith.spec.problem import Problem
from megalith.spec.run import RunSpec

if TYPE_CHECKING:
    from megalith.control.outcome import Outcome
    from megalith.fleet.environment import Place

TRAIN = "megalith.train.run:main"
"""What each rank of a training calls."""

PRELOAD = ("torch", "torch.distributed.tensor", "torch._dynamo")
"""What every rank needs besides its entry: imported once, before they are forked."""


def start(
    resolved: Resolved,
    folder: Path,
    entry: str,
    arguments: dict[str, Any],
    *,
    tick: Callable[[], None] | None,
    recover: bool = False,
) -> "Outcome":
    """Start the plan's ranks on this machine and wait until they end. With `recover`, restart them after faults as the run's fleet says.

    Each rank calls `entry` ("module:function") with `arguments`. `tick` is called several times a second.
    """
    from megalith.control import controller, supervisor  # numpy, which a run that is refused does not need

    spec = resolved.spec
    files.save(resolved, folder)
    described = job(spec, folder, entry, arguments)
    if not (recover and spec.fleet.recover):
        return supervisor.run(described, tick=tick)
    return controller.run_here(described, fleet=spec.fleet, identity=identity(spec), store=lambda: checkpoints(folder), tick=tick)


def join(resolved: Resolved, folder: Path, place: "Place", entry: str, arguments: dict[str, Any]) -> int:
    """Be the rank that torchrun or Slurm started, and return its exit status. Raises an error if the same command would fail again."""
    if place.rank == 0:
        files.save(resolved, folder)
    else:
        _await(resolved, folder, timeout=resolved.spec.launch.start_timeout)
    module, _, function = entry.partition(":")
    try:
        getattr(importlib.import_module(module), function)(**arguments)
    except SystemExit as end:  # a rank that was asked to stop ends so, once the state is saved
        return int(end.code or 0)
    except Exception as error:
        if (status := causes.status(error)) == ExitCode.FAILED:
            raise
        traceback.print_exc()
        return status
    return 0


def _await(resolved: Resolved, folder: Path, *, timeout: float) -> None:
    """Wait until rank 0 has written this very run: an older one may lie in the folder. Raises TimeoutError."""
    text, path, end = files.dump(resolved), folder / files.FILE, time.monotonic() + timeout
    while not (path.is_file() and path.read_text(encoding="utf-8") == text):
        if time.monotonic() > end:
            raise TimeoutError(
                f"rank 0 has not written this run to {path} within launch.start_timeout = {timeout:g} s. "
                "All ranks need the same run folder on a shared file system, and the same command."
            )
        time.sleep(0.05)


def job(spec: RunSpec, folder: Path, entry: str, arguments: dict[str, Any]) -> Job:
    """Return the job of all ranks of a run, and of those of its smaller plan, if it has one to fall back to."""
    fallback = None
    if spec.fleet.fallback is not None and entry == TRAIN:
        smaller = spec.model_copy(update={"plan": spec.fleet.fallback, "fleet": spec.fleet.model_copy(update={"fallback": None})})
        fallback = job(smaller, folder, entry, arguments | {"shrunk": True})
    return Job(
        entry=entry,
        arguments=arguments,
        ranks=spec.plan.ranks,
        fallback=fallback,
        run_dir=folder,
        preload=(*PRELOAD, entry.partition(":")[0]),
        start_timeout=spec.launch.start_timeout,
        silence_timeout=spec.launch.timeout,
        threads=spec.launch.threads,
        burn_in=admission.burn_in(spec.fleet.burn_in, spec.train.device),
        burn_in_timeout=spec.launch.start_timeout + spec.fleet.burn_in,
    )


def identity(spec: RunSpec) -> str:
    """Return what a run computes, as text. Copies in memory belong to a run only if their identity is its own."""
    return spec.model_dump_json(exclude={"fleet", "launch", "log", "validation", "checkpoint", "name"})


def checkpoints(folder: Path) -> tuple[Copy, ...]:
    """Return a run's checkpoints as copies of its state, without those of steps that it was sent back before."""
    newest = latest(folder / "checkpoints")
    if newest is None:
        return ()
    last = read_manifest(newest).step
    steps = (int(path.name.removeprefix("step-")) for path in committed(folder / "checkpoints"))
    return tuple(Copy(Tier.STORE, step) for step in steps if step <= last)


def too_many(spec: RunSpec) -> list[Problem]:
    """Return the problem that a run has more ranks than one machine should start, if it does."""
    cores = os.cpu_count() or 1
    if spec.plan.ranks <= max(16, 2 * cores):
        return []
    reason = f"data x tensor x pipeline = {spec.plan.ranks} ranks are too many for this machine of {cores} cores"
    way_out = "Start one `megalith train` a rank with torchrun or srun on more machines, or use a smaller plan."
    return [Problem("error", "plan.data", spec.plan.data, reason, way_out)]


def admit(spec: RunSpec, folder: Path) -> None:
    """Check this machine briefly before ranks are first started on it, and print what is short. Raises UnfitError if it is unfit."""
    if spec.fleet.looks_before_start:
        admission.admit(folder)


def end_with_torchrun(place: "Place | None") -> None:
    """Have this process end with the torchrun that started it.

    torchrun ends its processes only when it ends in order. If it is killed, its ranks would live on and write to the run folder beside
    those of the next start.
    """
    if place is not None and place.kind == "torchrun":
        lifeline.die_with_parent(os.getppid())
