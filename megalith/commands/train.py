"""`megalith train`: train a run, or resume it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from megalith.commands.arguments import Json, RunFile, RunRequest, Settings
from megalith.commands.output import print_json


@dataclass(frozen=True)
class Trained:
    """How a training run ended. `code` is the exit status (`fleet.exit_codes`), `message` what a person should read.

    `report` is None where none could be written, and on all ranks but the first, which also have no message.
    """

    run_dir: Path
    code: int
    message: str
    report: Path | None


def command(
    run: RunFile,
    settings: Settings = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Where the run is kept; one that is there goes on. Default: runs/NAME.")
    ] = None,
    profile: Annotated[
        str | None, typer.Option(metavar="A:B", help="Trace steps A to B-1 with torch.profiler; the first is 1.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Train, or go on training: the same command resumes from the newest checkpoint.

    Starts the ranks of this machine itself; under torchrun or srun this process is one of the ranks.

    Ctrl-C, SIGTERM and SIGUSR1 save and stop.

    Example:  megalith train run.toml --set train.steps=1000 --run-dir runs/first

    On two machines:  torchrun --nnodes 2 --nproc-per-node 8 -m megalith.cli train run.toml
    """
    console = Console(stderr=as_json)
    trained = train(RunRequest(run, settings or (), run_dir), console=console, profile=_steps(profile))
    show(trained, as_json=as_json)
    if trained.report is not None and not as_json:
        from megalith.report import tables  # drawing

        console.print(tables.summary(trained.run_dir))
        print(f"report: {trained.report}")
    return trained.code


def train(request: RunRequest, *, console: Console, profile: str | None = None) -> Trained:
    """Train what a run file describes, or resume the run that its folder holds.

    Under torchrun or Slurm this process becomes its rank. Otherwise the ranks are started on this machine, and `console` shows their
    progress. `profile` = "A:B" traces steps A to B - 1 with torch.profiler. Raises SpecErrors before anything starts.
    """
    from megalith.commands import ranks, report, runs
    from megalith.fleet import environment
    from megalith.spec.problem import SpecErrors

    place = environment.find()
    ranks.end_with_torchrun(place)
    checked = runs.check(request, world=place.world if place else None)
    resolved, spec = checked.resolved, checked.resolved.spec
    folder = request.folder(spec)
    if problems := [*checked.errors, *runs.differences(resolved, folder), *([] if place else ranks.too_many(spec))]:
        raise SpecErrors(problems)
    if place is None or place.local_rank == 0:
        ranks.admit(spec, folder)
    arguments = {"run_dir": str(folder.resolve())} | ({"profile": profile} if profile else {})
    if place is not None and place.rank > 0:
        return Trained(folder, ranks.join(resolved, folder, place, ranks.TRAIN, arguments), "", None)
    from megalith.report.live import Follow  # drawing, for the one process that people watch

    with Follow(folder, spec.train.steps, console) as follow:
        if place is None:
            outcome = ranks.start(resolved, folder, ranks.TRAIN, arguments, tick=follow.poll, recover=True)
            code, message = outcome.code, outcome.message()
        else:
            with _called_often(follow.poll):
                code = ranks.join(resolved, folder, place, ranks.TRAIN, arguments)
            message = f"ended with status {code}" if code else "finished"
    return Trained(folder, code, message, report.report_if_any(folder))


def show(trained: Trained, *, as_json: bool) -> None:
    """Print how a training ended."""
    if as_json:
        print_json({"ok": trained.code == 0} | asdict(trained))
    elif trained.message:
        Console(stderr=trained.code != 0, soft_wrap=True, highlight=False).print(escape(trained.message))
        print(f"run folder: {trained.run_dir}")


def _steps(text: str | None) -> str | None:
    """Return a range of steps, A:B. Raises a usage error for anything else."""
    first, _, last = (text or "1:2").partition(":")
    if not (first.isdecimal() and last.isdecimal() and 0 < int(first) < int(last)):
        raise typer.BadParameter(f"{text!r} is no range of steps. Write --profile 10:13 for steps 10, 11 and 12; the first is 1.")
    return text


@contextmanager
def _called_often(function: Callable[[], None]) -> Iterator[None]:
    """Call `function` twice a second while the block runs."""
    done = threading.Event()

    def loop() -> None:
        while not done.wait(0.5):
            function()

    thread = threading.Thread(target=loop, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
