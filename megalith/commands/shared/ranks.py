"""The ranks of a command's run: started on this machine, or this process as one of them. No torch."""

import contextlib
import importlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalith import epochs, events, sealed
from megalith.checkpoint.folder import committed, damaged_text, latest, of_run, read_manifest, unreadable
from megalith.control import answer
from megalith.control.owner import LeaseError, Owner, hold
from megalith.data import manifest
from megalith.fleet import causes
from megalith.fleet.exit_codes import ExitCode
from megalith.fleet.job import Job
from megalith.fleet.tiers import Copy, Tier
from megalith.machine import admission, lifeline
from megalith.schedule.table import FILE as ORDER
from megalith.spec import files
from megalith.spec.files import Resolved
from megalith.spec.run import RunSpec

if TYPE_CHECKING:
    from megalith.control.outcome import Outcome
    from megalith.fleet.environment import Place

TRAIN = "megalith.train.run:main"
"""Entry that each rank of a training calls."""

PRELOAD = ("torch", "torch.distributed.tensor", "torch._dynamo")
"""Modules that every rank needs besides its entry: imported once, before the fork."""


def start(
    resolved: Resolved,
    owner: Owner,
    entry: str,
    arguments: dict[str, Any],
    *,
    tick: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = answer.print_line,
    recover: bool = False,
) -> "Outcome":
    """Start the plan's ranks on this machine and wait until they end. With `recover`, restart them after faults as the run's fleet says.

    Each rank calls `entry` ("module:function") with `arguments`. `owner`: this process, which owns the run folder. `tick` is called
    several times a second, `say` is called with messages for the user. Raises LeaseError if it no longer owns the folder.
    """
    from megalith.control import controller, supervisor  # numpy, which a run that is refused does not need

    spec, folder = resolved.spec, owner.run_dir
    files.save(resolved, folder)
    described, store = job(spec, folder, entry, arguments), store_of(owner)
    if not (recover and spec.fleet.recover):
        return supervisor.run(described, tick=tick, say=say, store=store, owner=owner)
    how: dict[str, Any] = {
        "fleet": spec.fleet,
        "identity": identity(spec),
        "store": store,
        "tick": tick,
        "say": say,
        "owner": owner,
    }
    while True:
        try:
            return controller.run_here(described, **how)
        except LeaseError as error:
            print(error, file=sys.stderr, flush=True)
            owner.regain(seconds=spec.fleet.wait_limit)


def own(folder: Path, place: "Place | None") -> "contextlib.AbstractContextManager[Owner | None]":
    """Own the run folder while the block runs: either as the process that starts the ranks of this machine, or as the first rank,
    which writes the run's notes and commits its checkpoints. None for other ranks. Raises InUseError if another process owns
    it."""
    if place is not None and place.rank > 0:
        return contextlib.nullcontext()
    return _renewed(folder, wide=place is not None and place.local_world < place.world)


@contextlib.contextmanager
def _renewed(folder: Path, *, wide: bool) -> Iterator[Owner]:
    with hold(folder, wide=wide) as owner, owner.renewing():
        yield owner


def join(
    resolved: Resolved, folder: Path, place: "Place", entry: str, arguments: dict[str, Any], *, owner: Owner | None = None
) -> int:
    """Be the rank that torchrun or Slurm started, and return its exit status. Raises an error if the same command would fail again.

    `owner`: this process as the first rank, which owns the run folder.
    """
    if owner is not None:
        files.save(resolved, folder)
        os.environ[epochs.VARIABLE] = str(owner.epoch)
    else:
        _await(resolved, folder, timeout=resolved.spec.launch.start_timeout)
    module, _, function = entry.partition(":")
    if entry == TRAIN:
        arguments = arguments | {"sealed": sealed_files(resolved.spec, folder)}
    try:
        getattr(importlib.import_module(module), function)(**arguments)
    except SystemExit as end:  # a rank that was asked to stop ends so, once the state is saved
        return int(end.code or 0)
    except Exception as error:
        if (status := causes.status(error)) == ExitCode.FAILED:
            raise
        _say_in_a_line(error, place)
        return status
    return 0


def _say_in_a_line(error: Exception, place: "Place") -> None:
    """Print why this rank ends. It lost a peer or has reported a fault, so its stack would only hide the stack that matters."""
    if os.environ.get("MEGALITH_TRACEBACK"):
        traceback.print_exc()
    else:
        first = str(error).strip().partition("\n")[0]
        print(f"rank {place.rank} ends: {type(error).__name__}: {first}", file=sys.stderr, flush=True)


def _await(resolved: Resolved, folder: Path, *, timeout: float) -> None:
    """Wait until rank 0 has written this run to the folder, which may hold an older run's file before. Raises TimeoutError."""
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
    fallback, kept = None, sealed_files(spec, folder) if entry == TRAIN else {}
    if spec.fleet.fallback is not None and entry == TRAIN:
        smaller = spec.model_copy(update={"plan": spec.fleet.fallback, "fleet": spec.fleet.model_copy(update={"fallback": None})})
        fallback = replace(job(smaller, folder, entry, arguments | {"shrunk": True}), sealed=kept)
    return Job(
        entry=entry,
        sealed=kept,
        arguments=arguments,
        ranks=spec.ranks,
        fallback=fallback,
        run_dir=folder,
        preload=(*PRELOAD, entry.partition(":")[0]),
        start_timeout=spec.launch.start_timeout,
        silence_timeout=spec.launch.timeout,
        threads=spec.launch.threads,
        burn_in=admission.burn_in(spec.fleet.burn_in, spec.train.device),
        burn_in_timeout=spec.launch.start_timeout + spec.fleet.burn_in,
        keyed=spec.sites is not None,
    )


def sealed_files(spec: RunSpec, folder: Path) -> dict[str, str]:
    """Return the files that a run is computed from, as they are now, with their digests; later reads must find the same content.

    spec.json is taken as the command writes it; the data's shards have digests in its manifest.
    """
    data = Path(spec.data.path)
    plans = [spec.plan, *([spec.fleet.fallback] if spec.fleet.fallback else [])]
    orders = [Path(plan.schedule.removeprefix(ORDER)) for plan in plans if plan.schedule.startswith(ORDER)]
    paths = [data / manifest.FILE, data / manifest.TOKENIZER_FILE, *orders]
    own = sealed.digest(files.spec_text(spec).encode())
    return {str((folder / files.SPEC_FILE).resolve()): own} | sealed.seal(path for path in paths if path.is_file())


def directed_elsewhere(job: Job) -> Job:
    """Return the job of a node whose ranks another process directs. That process knows which description is right, and checks it
    before each start: a node that joins late may have a later run file."""
    kept = {path: digest for path, digest in job.sealed.items() if Path(path).name != files.SPEC_FILE}
    return replace(job, sealed=kept, fallback=job.fallback and replace(job.fallback, sealed=kept))


def identity(spec: RunSpec) -> str:
    """Return what a run computes, as text, including a digest of its data: other data may lie at the same path. Copies in memory
    belong to a run only if their identity is its own."""
    data = Path(spec.data.path) / manifest.FILE
    samples = sealed.digest(data.read_bytes()) if data.is_file() else ""
    return spec.model_dump_json(exclude={"fleet", "launch", "log", "alerts", "validation", "checkpoint", "name"}) + samples


def checkpoints(folder: Path) -> tuple[Copy, ...]:
    """Return a run's checkpoints as copies of its state, without those of steps that a rewind has undone. If no manifest can
    be read, return all of them: the run must see that none is usable, and not start over."""
    steps = [int(path.name.removeprefix("step-")) for path in committed(of_run(folder))]
    newest = latest(of_run(folder))
    last = max(steps, default=0) if newest is None else read_manifest(newest).step
    return tuple(Copy(Tier.STORE, step) for step in steps if step <= last)


def store_of(owner: Owner) -> "Callable[[], tuple[Copy, ...]]":
    """Return a function that lists a run's `checkpoints`. It logs each one with an unusable manifest, once."""
    told = set[Path]()

    def look() -> tuple[Copy, ...]:
        for path, why in unreadable(of_run(owner.run_dir)):
            if path not in told:
                told.add(path)
                log = events.EventLog(owner.run_dir, epoch=owner.epoch)
                log.write(events.Problem("warning", damaged_text(path, [why])))
                log.close()
        return checkpoints(owner.run_dir)

    return look


def admit(spec: RunSpec, folder: Path) -> None:
    """Check this machine briefly before ranks are first started on it, and print the resources that are short. Raises UnfitError
    if it is unfit."""
    if spec.fleet.looks_before_start:
        admission.admit(folder)


def end_with_torchrun(place: "Place | None") -> None:
    """Have this process end with the torchrun that started it.

    torchrun ends its processes only when it ends normally. If it is killed, its ranks would live on and write to the run folder
    beside
    those of the next start.
    """
    if place is not None and place.kind == "torchrun":
        lifeline.die_with_parent(os.getppid())
