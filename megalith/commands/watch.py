"""`megalith watch`: show runs on a live page in a browser of this machine; write the page to a file, or its data as JSON."""

import contextlib
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megalith.commands.shared.output import print_json

if TYPE_CHECKING:
    from megalith.spec.alerts import AlertsSpec
    from megalith.watch.scaling_law import ScalingLaw
    from megalith.watch.source import Source


NOTICED = 0.5
"""Maximum seconds until a signal is handled. If another thread receives the signal, the main thread is not woken from its sleep."""
YIELDS = 10
"""Niceness of the process that watches, so that ranks on the same processors take precedence."""


def command(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="Folders of runs.", show_default=False)],
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1. Default: a free one.", min=0, max=65535)] = 0,
    act: Annotated[
        bool,
        typer.Option("--act", help="Also print an address whose page can control the run: save now, stop, quarantine a node."),
    ] = False,
    alerts: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN.toml",
            help="Also send alerts, as this run file defines them. `megalith train` sends its alerts by itself.",
            allow_dash=True,
        ),
    ] = None,
    law: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="RUN_DIR",
            help="Draw the loss beside a scaling law that is fitted to the runs that --law names. May be repeated.",
        ),
    ] = None,
    page: Annotated[
        bool, typer.Option("--page/--no-page", help="With --no-page: only send alerts, until all runs have ended.")
    ] = True,
    out: Annotated[Path | None, typer.Option(help="Write the page as it is now to this file, and end.")] = None,
    as_json: Annotated[
        str | None, typer.Option("--json", metavar="PANEL", help="Print the data of one panel as one JSON object, and end.")
    ] = None,
    ask: Annotated[
        list[str] | None,
        typer.Option("--ask", metavar="KEY=VALUE", help="Parameter of the panel of --json, such as row=memory. May be repeated."),
    ] = None,
) -> None:
    """Show runs live on one page: their health, predictions and measurements, every rank, and slow ranks.

    Works on runs in progress, here or on another machine, and on finished runs. Whoever has the printed address can see the page.

    Example:  megalith watch runs/first runs/second

    With the loss that smaller runs predict:  megalith watch runs/large --law runs/s --law runs/m --law runs/l

    For programs:  megalith watch runs/first --json rank-heatmap --ask row=memory
    """
    from megalith.watch import panels  # numpy
    from megalith.watch.source import Source

    if as_json is not None and as_json not in panels.PANELS:
        raise typer.BadParameter(f"--json {as_json!r} is not a panel. Use one of {', '.join(panels.PANELS)}.")
    if not page and alerts is None:
        raise typer.BadParameter("--no-page shows nothing. Give the run file with [alerts] too: --alerts RUN.toml.")
    rules = None if alerts is None else _rules(alerts)
    fitted = _law(law) if law else None
    sources = [Source(folder) for folder in runs]
    try:
        for source in sources:
            source.law = fitted
        if as_json is not None or out is not None:
            _at_once(sources, as_json, out, {key: value for key, _, value in (pair.partition("=") for pair in ask or ())})
        elif not page and rules is not None:
            _follow(sources, rules, told=str(alerts) == "-")
        else:
            _serve(sources, port, act=act, rules=rules)
    finally:
        for source in sources:
            source.close()


def _at_once(sources: "list[Source]", panel: str | None, out: Path | None, asked: dict[str, str]) -> None:
    """Read all logs to their end, then write the page or print the panel of each run."""
    from megalith.watch import panels, server

    for source in sources:
        while source.poll():
            pass
        source.await_prediction()
    if out is not None:
        server.write(sources, out)
        if panel is None:  # else standard output is for the JSON
            print(f"page: {out}")
    if panel is not None:
        found = [panels.panel(source, panel, asked) for source in sources]
        print_json(found[0] if len(found) == 1 else {"runs": found})


def _law(runs: Sequence[Path]) -> "ScalingLaw":
    """Return the scaling law fitted to runs. Raises ValueError if there are too few runs or steps."""
    from megalith.watch.scaling_law import of_runs
    from megalith.watch.source import Source

    with contextlib.ExitStack() as stack:
        sources = [stack.enter_context(contextlib.closing(Source(folder, predicts=False))) for folder in runs]
        for source in sources:
            while source.poll():
                pass
        return of_runs(sources)


def _order(source: "Source", wanted: Mapping[str, Any]) -> str:
    """Write a user's order from the page into the run's folder. Raises ValueError if the run has no controller that would carry out the
    order."""
    from megalith.control import orders

    if source.setting("fleet", "recover") is False:
        raise ValueError(
            "With fleet.recover = false the run has no controller that can carry out orders. To save and stop, send SIGTERM to "
            "the command that runs the training."
        )
    orders.write(source.run_dir, str(wanted["what"]), str(wanted.get("node", "")))
    return "Ordered. The run's controller reads the order within a second while steps run, and logs it under incidents."


def _rules(file: Path) -> "AlertsSpec":
    """Return the [alerts] table of a run file; for "-", read the table from standard input, into which the training command writes it.
    The copy of the run file in the run folder is not used: somebody else may have written it, and alerts run commands. Raises ValueError
    if the file defines no alerts."""
    from megalith.spec.alerts import AlertsSpec
    from megalith.spec.files import load

    if str(file) == "-":
        line = b""
        while not line.endswith(b"\n") and (one := os.read(0, 1)):  # what follows is waited for, so nothing may be read ahead
            line += one
        return AlertsSpec.model_validate_json(line)
    found = load(file).spec.alerts
    if not (found.run or found.post):
        raise ValueError(f"{file} sends no alerts. Set run = COMMAND or post = ADDRESS in the run file's table [alerts].")
    return found


def _follow(sources: "list[Source]", rules: "AlertsSpec", *, told: bool) -> None:
    """Send alerts until all runs or the training command have ended, or until Ctrl-C or SIGTERM."""
    from megalith.watch import follower

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.nice(YIELDS)
    with contextlib.suppress(KeyboardInterrupt):
        follower.follow(sources, rules, parent=0 if told else None)


def _serve(sources: "list[Source]", port: int, *, act: bool, rules: "AlertsSpec | None") -> None:
    from megalith.watch.server import Server

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.nice(YIELDS)
    with (
        contextlib.suppress(KeyboardInterrupt),
        contextlib.closing(Server(sources, port=port, order=_order if act else None, rules=rules)) as server,
    ):
        server.start()
        print(f"watching {', '.join(source.name for source in sources)}: {server.address}", flush=True)
        print("Whoever has this address can see the page. To see the page from another machine, first run there: ssh -L "
        f"{server.port}:127.0.0.1:{server.port} this-one. Ctrl-C stops the page, not the run.", flush=True)  # fmt: skip
        if act:
            print(f"whoever has this address can also control the run: {server.acting_address}", flush=True)
        while True:
            time.sleep(NOTICED)
