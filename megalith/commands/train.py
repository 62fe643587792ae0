"""`megalith train`: train a run, or resume it."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from megalith.commands.shared.arguments import Json, RunFile, RunFolder, RunRequest, Settings
from megalith.commands.shared.output import print_json

if TYPE_CHECKING:
    from megalith.control.owner import Owner
    from megalith.events import Event
    from megalith.fleet.environment import Place
    from megalith.report.live import LiveLine
    from megalith.spec.files import ResolvedRun
    from megalith.spec.run import RunSpec


Profile = Annotated[
    str | None, typer.Option(metavar="A:B", help="Trace steps A to B-1 with torch.profiler; the first step is 1.")
]


@dataclass(frozen=True)
class TrainResult:
    """How a training run ended. `code` is the exit status (`fleet.exit_codes`), `message` a summary for the user.

    `report`: path of the report page, None if it could not be written. Ranks other than 0 have no report and no message. `unshown`:
    sentences about failed output, which does not end the run. `left`: sentences about copies of the state that stay on this machine.
    `raised`: the first exception that `on_event` raised.
    """

    run_dir: Path
    code: int
    message: str
    report: Path | None
    unshown: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    raised: Exception | None = None


def command(
    run: RunFile,
    settings: Settings = None,
    run_dir: Annotated[Path | None, typer.Option(help="Run folder; an existing run is resumed. Default: runs/NAME.")] = None,
    profile: Profile = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Also serve the live page of the run (see megalith watch), from a separate process.")
    ] = False,
    branch: Annotated[
        Path | None,
        typer.Option(
            metavar="CHECKPOINT",
            help="Branch: begin with the whole state of another run's checkpoint, and decay the learning rate; needs --decay.",
        ),
    ] = None,
    decay: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="UPDATES", help="Number of updates over which a branch's learning rate decays to its minimum."
        ),
    ] = None,
    as_json: Json = False,
) -> int:
    """Train a run, or resume it: the same command continues from the newest checkpoint.

    Starts the ranks of this machine itself; under torchrun or srun this process is one of the ranks.

    Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP (a terminal that closes; not under nohup) save and stop.

    Example:  megalith train run.toml --set train.steps=1000 --run-dir runs/first

    Decay a copy of a run in progress:  megalith train run.toml --branch runs/first --decay 2000 --run-dir runs/first-2000

    On two machines:  torchrun --nnodes 2 --nproc-per-node 8 -m megalith.cli train run.toml
    """
    own = settings or ()
    if (branch is None) != (decay is None):
        raise typer.BadParameter("--branch CHECKPOINT and --decay UPDATES must be given together.")
    if branch is not None and decay is not None:
        from megalith.commands.branch import settings as of_branch  # specifications take 0.2 s to import
        from megalith.spec import files

        spec = files.read(run, overrides=own).resolved.spec  # a faulty run may have no name; its problems are reported later
        folder = RunRequest(run, own, run_dir).folder(spec) if run_dir or hasattr(spec, "name") else None
        own = (*of_branch(branch, decay, folder), *own)
    return _train_and_show(RunRequest(run, own, run_dir), profile, watch=watch, as_json=as_json)


def resume(
    run_dir: RunFolder,
    settings: Settings = None,
    profile: Profile = None,
    as_json: Json = False,
) -> int:
    """Resume the run in a folder from its newest checkpoint. `megalith train` with the same run file does the same.

    Example:  megalith resume runs/first --set train.steps=2000
    """
    return _train_and_show(RunRequest.in_folder(run_dir, settings or ()), profile, as_json=as_json)


def _train_and_show(request: RunRequest, profile: str | None, *, as_json: bool, watch: bool = False) -> int:
    """Train a run, print how it ended, and return the exit status."""
    console = Console(stderr=as_json)
    trained = train(request, console=console, profile=_steps(profile), watch=watch)
    show(trained, as_json=as_json)
    if trained.report is not None and not as_json:
        _summarize(trained, trained.report, console)
    return trained.code


def _summarize(trained: TrainResult, page: Path, console: Console) -> None:
    from megalith.fleet.exit_codes import ORDERLY
    from megalith.report import tables  # drawing

    if trained.code in ORDERLY:  # after a failure the cause stays in sight
        try:
            console.print(tables.summary(trained.run_dir))
        except Exception as error:  # whatever the events hold: the run's exit status is its own
            print(f"the run could not be summarized: {error or type(error).__name__}", file=sys.stderr)
    print(f"report: {page}")


def train(
    request: RunRequest,
    *,
    console: Console,
    profile: str | None = None,
    watch: bool = False,
    on_event: "Callable[[Event], None] | None" = None,
) -> TrainResult:
    """Train the run of a run file, or resume it from its folder.

    Under torchrun or Slurm this process becomes one of the ranks. Otherwise the ranks are started on this machine, `console`
    shows their progress, and `on_event` gets each event soon after it is logged. `profile` = "A:B" traces steps A to B - 1 with
    torch.profiler. `watch`: also serve the live page. Raises SpecErrors before anything starts. If another process owns the run
    folder, raises InUseError before anything is written.
    """
    from megalith.check import all_ranks
    from megalith.commands.shared import runs, saved_run, siblings
    from megalith.fleet import environment

    place = environment.find()
    runs.end_with_torchrun(place)
    checked = runs.check(
        request,
        world=place.world if place else None,
        here="error",
        count=lambda spec: place.local_world if place else all_ranks(spec),
        resumes=True,
    )
    resolved, spec = checked.resolved, checked.resolved.spec
    folder = request.folder(spec)
    runs.refuse(checked.errors, resolved, folder, here=checked.here)
    arguments = {"run_dir": str(folder.resolve())} | ({"profile": profile} if profile else {})
    with runs.own(folder, place) as owner:
        runs.refuse(saved_run.differences(resolved, folder))
        if place is None or place.local_rank == 0:
            runs.print_advice(checked)
            runs.admit(spec, folder)
        if owner is not None:
            saved_run.print_start_over(resolved, folder)
        if owner is None:
            assert place is not None
            return TrainResult(folder, runs.join(resolved, folder, place, runs.TRAIN, arguments), "", None)
        with siblings.running(request, spec, folder) as others:
            trained = _followed(resolved, owner, place, arguments, console, others.poll, watch=watch, on_event=on_event)
            return replace(trained, left=(*trained.left, *others.finish(trained.code, patience=spec.launch.timeout)))


def _followed(
    resolved: "ResolvedRun",
    owner: "Owner",
    place: "Place | None",
    arguments: dict[str, Any],
    console: Console,
    look: Callable[[], None],
    *,
    watch: bool,
    on_event: "Callable[[Event], None] | None",
) -> TrainResult:
    """Train in the run folder that this process owns. `console` shows the progress; with `watch`, so does the live page. If this process
    starts the ranks, it calls `look` often; an exception in `look` ends the ranks."""
    from megalith.commands.shared import runs

    folder = owner.run_dir
    here = range(place.local_world) if place is not None else ()
    errors = lambda rank: place is not None and rank not in here  # noqa: E731  # others print their own errors here
    shown: dict[str, Any] = {"errors": errors, "watch": watch, "on_event": on_event, "epoch": owner.epoch}
    with followed(folder, resolved.spec, console, **shown) as (live_line, tick):
        if place is None:

            def tick_and_look() -> None:
                tick()
                look()

            outcome = runs.start(
                resolved, owner, runs.TRAIN, arguments, tick=tick_and_look, notify=live_line.print_line, recover=True
            )
            code, message = outcome.code, outcome.message()
        else:
            with _called_often(tick):
                code = runs.join(resolved, folder, place, runs.TRAIN, arguments, owner=owner)
            message = f"ended with status {code}" if code else "finished"
    return ended(folder, code, message, live_line)


LOOK_SECONDS = 0.1
"""Least time between two looks at a run's log: the caller watches ranks 50 times a second, and each look opens files, perhaps on a network
file system."""


@contextmanager
def followed(
    folder: Path,
    spec: "RunSpec",
    console: Console,
    *,
    errors: Callable[[int | None], bool],
    watch: bool = False,
    on_event: "Callable[[Event], None] | None" = None,
    epoch: int = 0,
) -> "Iterator[tuple[LiveLine, Callable[[], None]]]":
    """Show a run's progress on `console`, and feed its log to alerts, other tools and, with `watch`, the live page.

    Yields the live status line, and a function that must be called often while the run trains. `errors` tells of which ranks logged errors
    are shown. `epoch`: the number in the file names of the run folder's owner.
    """
    from megalith.report.live import LiveLine  # drawing, for the one process that people watch
    from megalith.watch.helpers import WatchHelpers

    with (
        WatchHelpers(folder, serves=watch, alerts=spec.alerts, log=spec.log, epoch=epoch) as helpers,
        LiveLine(folder, spec.train.steps, console, errors=errors, on_event=on_event) as live_line,
    ):
        looked = -LOOK_SECONDS

        def tick() -> None:
            nonlocal looked
            if time.monotonic() - looked >= LOOK_SECONDS:
                live_line.poll()
                helpers.poll()
                looked = time.monotonic()

        yield live_line, tick


def ended(folder: Path, code: int, message: str, live_line: "LiveLine") -> TrainResult:
    """Write the report, and return how the training ended."""
    from megalith.commands import clean, report
    from megalith.fleet.exit_codes import ORDERLY

    page, why = report.report_if_any(folder)
    left = () if code in ORDERLY else tuple(clean.left_by(folder))
    live = f"the live status line failed at least once: {live_line.failed}" if live_line.failed else ""
    return TrainResult(folder, code, message, page, tuple(filter(None, (live, why))), left, live_line.raised)


def show(trained: TrainResult, *, as_json: bool) -> None:
    """Print how a training ended."""
    if as_json:
        print_json({"ok": trained.code == 0} | asdict(replace(trained, raised=None)) | _numbers(trained.run_dir))
    elif trained.message:
        Console(stderr=trained.code != 0, soft_wrap=True, highlight=False).print(escape(trained.message))
        print(f"run folder: {trained.run_dir}")
        for text in (*trained.unshown, *trained.left):
            print(text, file=sys.stderr)


def _numbers(run_dir: Path) -> dict[str, Any]:
    """Return the run's results in numbers. If the run's events cannot be read, return the error; the exit status stays the same."""
    from megalith.report import summary  # drawing

    try:
        return asdict(summary.of_folder(run_dir))
    except Exception as error:  # whatever the events hold
        return {"unread": f"{type(error).__name__}: {error}"}


def _steps(text: str | None) -> str | None:
    """Return the range of steps A:B unchanged if it is valid. Raises a usage error for any other text."""
    first, _, last = (text or "1:2").partition(":")
    if not (first.isdecimal() and last.isdecimal() and 0 < int(first) < int(last)):
        raise typer.BadParameter(
            f"{text!r} is not a range of steps. Write --profile 10:13 for steps 10 to 12; the first step is 1."
        )
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
