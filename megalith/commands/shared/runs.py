"""The run that a command names: reads and checks its file, owns its folder, and starts its ranks on this machine, or runs as one of its
ranks. No torch."""

import contextlib
import importlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalith import disk, epochs, sealed
from megalith.check import all_ranks, check_here
from megalith.check import check as find_problems
from megalith.check.own import admit as admit_parts
from megalith.checkpoint.folder import committed, damaged_text, latest, of_run, read_manifest, unreadable
from megalith.commands.shared import first_weights, saved_run
from megalith.commands.shared.arguments import RunRequest
from megalith.control import stop_response
from megalith.data import manifest
from megalith.fleet import causes
from megalith.fleet.exit_codes import ExitCode
from megalith.fleet.job import Job
from megalith.fleet.tiers import Copy, Tier
from megalith.machine import admission, capacity, parent_watch
from megalith.machine.describe import processor
from megalith.machine.origin import origin
from megalith.schedule.table import FILE as ORDER
from megalith.spec import files
from megalith.spec.files import ResolvedRun
from megalith.spec.plan import AUTO
from megalith.spec.problem import Problem, Severity, SpecErrors
from megalith.spec.run import RunSpec

if TYPE_CHECKING:
    from megalith.control.outcome import Outcome
    from megalith.control.owner import Owner
    from megalith.fleet.environment import Place

TRAIN = "megalith.train.run:main"
"""Function that each rank of a training calls."""

PRELOAD = ("torch", "torch.distributed.tensor", "torch._dynamo", "megalith.spec.cluster:catalogue")
"""Modules, and functions that fill a cache, that every rank needs in addition to its entry: imported and called once, before the fork."""


@dataclass(frozen=True)
class CheckResult:
    """A run and the problems found in it."""

    resolved: ResolvedRun
    problems: list[Problem]
    here: tuple[Problem, ...] = ()
    """Problems of this machine rather than of the run."""

    @property
    def errors(self) -> list[Problem]:
        return [problem for problem in self.problems if problem.severity == "error"]

    def as_json(self) -> dict[str, Any]:
        """Return every value of the run, and the source of each value."""
        return {"spec": self.resolved.spec.model_dump(mode="json"), "provenance": self.resolved.provenance}


def check(
    request: RunRequest,
    *,
    world: int | None = None,
    look: bool = True,
    here: Severity | None = None,
    count: Callable[[RunSpec], int] = all_ranks,
    resumes: bool = False,
) -> CheckResult:
    """Read a run file and find everything in it that is wrong or unwise.

    `world`: number of ranks that will be started, to compare with the plan. With `look`, check that files and folders that the run names
    exist; a run that resumes does not need the inputs of its first start. With `here`, also report resources that this machine lacks for
    the run's ranks (or for `count` ranks); no such problem is more severe than `here`. Raises SpecErrors, with everything that was found,
    if the file cannot be read as a run; with `resumes`, also with the reasons why it cannot resume the run in its folder (`differences`).
    Imports the user's own parts that the run names.
    """
    reading = files.read(request.file, overrides=request.overrides, saved=request.saved)
    resolved = reading.resolved
    named = request.run_dir is not None or hasattr(resolved.spec, "name")
    folder = request.folder(resolved.spec) if named else None
    begun = look and folder is not None and bool(committed(of_run(folder)))
    if begun and folder is not None:
        resolved = saved_run.with_old_defaults(resolved, folder)
    unfit, sources = admit_parts(resolved.spec, resolved.provenance)
    resolved = replace(resolved, provenance=resolved.provenance | sources)
    found = unfit + find_problems(
        resolved.spec, world=world, files=look, begun=begun, provenance=resolved.provenance, folder=folder
    )
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
            folder=folder,
        )
    )
    found = sorted([*found, *short], key=lambda problem: problem.severity != "error")
    if reading.problems:
        if resumes and named:
            found = [*saved_run.differences_if_readable(resolved, request.folder(resolved.spec)), *found]
        known = {problem.key for problem in reading.problems}
        faulty = {_table(key) for key in known}  # a default in one may stand for what a faulty key meant
        others = (p for p in found if p.key not in known and (p.source != "default" or _table(p.key) not in faulty))
        raise SpecErrors([*reading.problems, *others], here=any(problem.severity == "error" for problem in short))
    checked = CheckResult(resolved, found, tuple(short))
    return checked if checked.errors else replace(checked, resolved=_decided(resolved))


def check_as_resumed(request: RunRequest, *, world: int | None = None, here: Severity | None = None) -> CheckResult:
    """Find also why the run cannot resume the run in its folder, as `train` does (see `check`, `saved_run.differences`)."""
    checked = check(request, world=world, here=here, resumes=True)
    more = saved_run.differences(checked.resolved, request.folder(checked.resolved.spec))
    return replace(checked, problems=[*more, *checked.problems])


def _decided(resolved: ResolvedRun) -> ResolvedRun:
    """Replace each `segments:auto` by a size. All ranks must recompute the same segments, so the size is decided once, and recorded."""
    spec = resolved.spec
    asked = {"plan": spec.plan} | ({"fallback": spec.fleet.fallback} if spec.fleet.fallback else {})
    if all(plan.recompute != AUTO for plan in asked.values()):
        return resolved
    from megalith.cost import predicted  # traces blocks, for which torch is imported

    plans = {name: predicted.workload_of(spec.model_copy(update={"plan": plan})).plan for name, plan in asked.items()}
    fleet = spec.fleet.model_copy(update={"fallback": plans.get("fallback")})
    return replace(resolved, spec=spec.model_copy(update={"plan": plans["plan"], "fleet": fleet}))


def _table(name: str) -> str:
    return name.rpartition(".")[0]


def refuse(
    problems: Sequence[Problem],
    resolved: ResolvedRun | None = None,
    folder: Path | None = None,
    *,
    here: Sequence[Problem] = (),
) -> None:
    """Raise SpecErrors if there are problems. With `resolved` and `folder`, add the reasons why run `resolved` cannot resume the run in
    `folder`. `here`: problems of this machine, which may be among `problems`."""
    if problems:
        more = saved_run.differences(resolved, folder) if resolved is not None and folder is not None else []
        raise SpecErrors([*problems, *more], here=any(problem in here for problem in problems))


def print_advice(checked: CheckResult) -> None:
    """Print the resources that this machine lacks for a run that starts nevertheless: to stderr, a line each."""
    for problem in checked.here:
        print(f"advice: {problem}", file=sys.stderr, flush=True)


# --- ranks ---


def start(
    resolved: ResolvedRun,
    owner: "Owner",
    entry: str,
    arguments: dict[str, Any],
    *,
    tick: Callable[[], None] = lambda: None,
    notify: Callable[[str], None] = stop_response.print_line,
    recover: bool = False,
) -> "Outcome":
    """Start the plan's ranks on this machine and wait until they end. With `recover`, restart the ranks after faults, as the run's
    [fleet] table defines.

    Each rank calls `entry` ("module:function") with `arguments`. `owner`: this process as the owner of the run folder. `tick` is called
    several times a second, `notify` with messages for the user. Raises LeaseError if this process no longer owns the folder.
    """
    from megalith.control import controller, supervisor  # numpy, which a run that is refused does not need
    from megalith.control.owner import LeaseError, TakenError

    folder = owner.run_dir
    resolved = first_weights.pinned(resolved, folder) if entry == TRAIN else resolved
    spec = resolved.spec
    files.save(resolved, folder, origin(), epoch=owner.epoch)
    described, store = job(spec, folder, entry, arguments), store_of(owner)
    if not (recover and spec.fleet.recover):
        return supervisor.run(described, tick=tick, notify=notify, store=store, owner=owner)
    how: dict[str, Any] = {
        "fleet": spec.fleet,
        "identity": identity(spec),
        "store": store,
        "tick": tick,
        "notify": notify,
        "owner": owner,
    }
    while True:
        try:
            return controller.run_here(described, **how)
        except TakenError:
            raise
        except LeaseError as error:
            limit, began = spec.fleet.wait_limit, time.monotonic()
            print(
                f"{error}. Waiting until it can be renewed, for at most {limit:g} s (fleet.wait_limit)",
                file=sys.stderr,
                flush=True,
            )
            owner.regain(seconds=limit)
            print(f"the lease of {folder} is renewed again, after {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)


def own(folder: Path, place: "Place | None") -> "contextlib.AbstractContextManager[Owner | None]":
    """Own the run folder while the block runs. The owner is the process that starts the ranks of this machine, or else rank 0, which writes
    the log and commits checkpoints. Yields None on other ranks. Raises InUseError if another process owns the folder."""
    if place is not None and place.rank > 0:
        return contextlib.nullcontext()
    return _renewed(folder, wide=place is not None and place.local_world < place.world)


@contextlib.contextmanager
def _renewed(folder: Path, *, wide: bool) -> "Iterator[Owner]":
    from megalith.control.owner import hold  # a run that is only checked has no owner

    with hold(folder, wide=wide) as owner, owner.renewing():
        yield owner


def join(
    resolved: ResolvedRun, folder: Path, place: "Place", entry: str, arguments: dict[str, Any], *, owner: "Owner | None" = None
) -> int:
    """Run as the rank that torchrun or Slurm started, and return the exit status. Raises the rank's exception if a restart would not
    help; of several ranks with the same exception, one raises it, and the others print a line.

    `owner`: rank 0 as the owner of the run folder; None on other ranks.
    """
    if owner is not None:
        resolved = first_weights.pinned(resolved, folder) if entry == TRAIN else resolved
        files.save(resolved, folder, origin(), epoch=owner.epoch)
        os.environ[epochs.VARIABLE] = str(owner.epoch)
    else:
        resolved = _await(resolved, folder, timeout=resolved.spec.launch.start_timeout)
    module, _, function = entry.partition(":")
    if entry == TRAIN:
        arguments = arguments | {"sealed": sealed_files(resolved.spec, folder)} | _first(resolved.spec)
    try:
        getattr(importlib.import_module(module), function)(**arguments)
    except SystemExit as end:  # a rank that was asked to stop ends so, once the state is saved
        return int(end.code or 0)
    except Exception as error:
        if (status := causes.status(error)) == ExitCode.FAILED and _first_to_say(error, folder, place):
            raise
        _say_in_a_line(error, place, repeats=status == ExitCode.FAILED)
        return status
    return 0


def _first_to_say(error: Exception, folder: Path, place: "Place") -> bool:
    """True unless another rank has logged the same error before this one did, since this process began. Each rank appends its error to the
    log before it ends, so the log has one order for all."""
    import psutil

    from megalith import events

    text, began = f"{type(error).__name__}: {error}", psutil.Process().create_time()
    said: list[int | None] = []
    with disk.if_available():
        logged = (event for event in events.read(folder) if isinstance(event, events.Problem) and event.severity == "error")
        said += [event.rank for event in logged if event.message == text and event.time >= began]
    return not said or said[0] == place.rank


def _say_in_a_line(error: Exception, place: "Place", *, repeats: bool) -> None:
    """Print in one line why this rank ends. The rank lost a peer, has reported a fault, or repeats another rank's error, so its own stack
    trace would only distract from the cause."""
    if os.environ.get("MEGALITH_TRACEBACK"):
        traceback.print_exc()
    else:
        first = "another rank has the same error" if repeats else str(error).strip().partition("\n")[0]
        print(f"rank {place.rank} ends: {type(error).__name__}: {first}", file=sys.stderr, flush=True)


def _await(resolved: ResolvedRun, folder: Path, *, timeout: float) -> ResolvedRun:
    """Wait until rank 0 has written this run's file to the folder, which may still hold an older run's file, and return the run with the
    first weights that rank 0 chose. Raises TimeoutError."""
    end = time.monotonic() + timeout
    while True:
        path = epochs.newest(folder, files.FILE)
        found = first_weights.as_recorded(resolved, folder)
        settled = found is resolved or first_weights.is_settled(resolved, found, folder)
        if settled and disk.is_file(path) and _are_equal(path.read_text(encoding="utf-8"), files.dump(found)):
            return found
        if time.monotonic() > end:
            raise TimeoutError(
                f"rank 0 has not written this run's file to {path} within launch.start_timeout = {timeout:g} s. "
                "All ranks need the same run folder on a shared file system, and the same command."
            )
        time.sleep(0.05)


def _are_equal(run: str, other: str) -> bool:
    """True if two run files are equal but for the epoch in a name of a run file: a rank may read the run file that rank 0 has just written
    under another name, and values then have another origin."""
    return epochs.without_numbers(run, files.FILE) == epochs.without_numbers(other, files.FILE)


def job(spec: RunSpec, folder: Path, entry: str, arguments: dict[str, Any]) -> Job:
    """Return the job for all ranks of a run. The job's `fallback` is the job for the smaller plan `fleet.fallback`, if the run has one."""
    fallback, kept = None, sealed_files(spec, folder) if entry == TRAIN else {}
    arguments = arguments | (_first(spec) if entry == TRAIN else {})
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


def _first(spec: RunSpec) -> dict[str, Any]:
    """Return the argument of `train.run.main` that names the digest of the first weights; empty if there are none."""
    return {"first": found} if (found := first_weights.seals(spec)) else {}


def sealed_files(spec: RunSpec, folder: Path) -> dict[str, str]:
    """Return the current digests of the files that determine a run's result; later reads must find the same content.

    The digest of spec.json is the digest of the content that this command writes. The data's manifest has the digests of its shards.
    """
    data = Path(spec.data.path)
    plans = [spec.plan, *([spec.fleet.fallback] if spec.fleet.fallback else [])]
    orders = [Path(plan.schedule.removeprefix(ORDER)) for plan in plans if plan.schedule.startswith(ORDER)]
    paths = [data / manifest.FILE, data / manifest.TOKENIZER_FILE, *orders]
    own = sealed.digest(files.spec_text(spec).encode())
    return {str(epochs.newest(folder, files.SPEC_FILE).resolve()): own} | sealed.seal(
        path for path in paths if disk.is_file(path)
    )


def directed_elsewhere(job: Job) -> Job:
    """Return the job of a node whose ranks another process directs. The digest of spec.json is left out: the directing process checks it
    before each start, and a node that joins late may have a later run file."""
    kept = {path: digest for path, digest in job.sealed.items() if not epochs.is_named(path, files.SPEC_FILE)}
    return replace(job, sealed=kept, fallback=job.fallback and replace(job.fallback, sealed=kept))


def identity(spec: RunSpec) -> str:
    """Return a text that identifies a run's computation, including a digest of its data. Copies in memory belong to a run only if they have
    the same identity."""
    data = Path(spec.data.path) / manifest.FILE
    samples = sealed.digest(data.read_bytes()) if disk.is_file(data) else ""
    return spec.model_dump_json(exclude=set(saved_run.APART)) + samples


def checkpoints(folder: Path) -> tuple[Copy, ...]:
    """Return a run's checkpoints as copies of its state, except checkpoints of steps that a rewind has undone. If no manifest can be
    read, return all checkpoints, so that the run fails instead of starting from the beginning."""
    steps = [int(path.name.removeprefix("step-")) for path in committed(of_run(folder))]
    newest = latest(of_run(folder))
    last = max(steps, default=0) if newest is None else read_manifest(newest).step
    return tuple(Copy(Tier.STORE, step) for step in steps if step <= last)


def store_of(owner: "Owner") -> "Callable[[], tuple[Copy, ...]]":
    """Return a function that lists a run's `checkpoints`. The function logs each checkpoint with an unusable manifest once."""
    from megalith import events  # a run that is only checked logs nothing

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
    """Check this machine briefly before the first start of ranks on it, and print resources that are low. Raises UnfitError if the
    machine is unfit."""
    if spec.fleet.looks_before_start:
        admission.admit(folder)


def end_with_torchrun(place: "Place | None") -> None:
    """Make this process end when the torchrun that started it ends.

    torchrun stops its workers only if it ends normally. If torchrun is killed, its ranks would continue to write to the run folder,
    together with the ranks of the next start.
    """
    if place is not None and place.kind == "torchrun":
        parent_watch.die_with_parent(os.getppid())
