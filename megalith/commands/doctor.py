"""`megalith doctor`: check that this machine, or all machines of a job, are fit to train on."""

import platform
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megalith.commands.shared.arguments import Json, Overwrite, Settings
from megalith.commands.shared.output import print_json, write
from megalith.report.units import counted

if TYPE_CHECKING:
    from megalith.machine.health import Finding
    from megalith.spec.run import RunSpec

COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red"}
VERDICTS = {"ok": "fit to train on", "warn": "fit to train on, with warnings", "fail": "NOT fit to train on"}


def command(
    run: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RUN.toml]",
            help="A run file: also check the folders in which the run keeps state and activations.",
            show_default=False,
        ),
    ] = None,
    settings: Settings = None,
    folder: Annotated[Path, typer.Option(help="Folder that runs will write to.")] = Path(),
    burn_in: Annotated[
        float, typer.Option(min=0.0, metavar="SECONDS", help="Burn-in time for each data type, on each GPU or the CPU; 0: none.")
    ] = 1.0,
    ranks: Annotated[
        int,
        typer.Option(
            min=0, help="Check collectives and links among this many processes: NCCL if each process has a GPU, otherwise gloo."
        ),
    ] = 0,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.toml",
            help="Instead of checking, measure the speeds that predictions need, and write a cluster file. --ranks processes measure "
            "at once (default: one for each GPU, or 1).",
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0.0, help="With --calibrate: duration of each of about thirty measurements.")
    ] = 1.0,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> int:
    """Describe this machine, and check whether it is fit to train: memory, disk, network, clock, GPUs, reproducible results.

    With RUN.toml, and state or activations of this run on disk, the command also checks the folder of these files: whether it can be
    written, past the page cache, how much space is free, and whether it is as fast as the run's cluster file says.

    GPUs are queried through nvidia-smi and DCGM if these are installed. Exit status 1 if anything fails; warnings do not count. Without a
    burn-in and --ranks no torch is needed. Under torchrun or srun, with one process for each GPU, the command checks all machines, and
    collectives and links among all ranks; rank 0 prints the findings.

    With --calibrate FILE.toml the command does not check, but measures the speed of matrix products, attention, memory and collectives,
    and writes a cluster file. Predictions for this cluster file use the measured speeds.

    Example:  megalith doctor --folder runs --burn-in 60 --ranks 8
    """
    from megalith.fleet import environment
    from megalith.machine.describe import describe
    from megalith.machine.health import worst

    if calibrate is not None:
        _calibrate(calibrate, ranks, seconds, overwrite=overwrite, as_json=as_json)
        return 0
    findings = doctor(folder, burn_in=burn_in, ranks=ranks, spec=_spec(run, settings or ()))
    verdict = worst(findings)
    place = environment.find()
    if place is None or place.rank == 0:
        if as_json:
            rows = [one.as_json() for one in findings]
            print_json({"ok": verdict != "fail", "worst": verdict, "machine": describe().as_json(), "findings": rows})
        else:
            console = Console(highlight=False)
            console.print(_described(describe().rows()))
            console.print(_table(findings))
            print(VERDICTS[verdict])
    return 1 if verdict == "fail" else 0


def doctor(folder: Path, *, burn_in: float = 1.0, ranks: int = 0, spec: "RunSpec | None" = None) -> "list[Finding]":
    """Check whether this machine is fit to train on; `folder` is where a run would write. `spec`: a run whose folders of state and
    activations on disk are checked too.

    `burn_in`: seconds of matrix products on every GPU, or on the processor if there is no GPU, for each data type; 0: none. `ranks`:
    number of processes on this machine that check collectives and the links between them; 0: none. Without ranks and burn-in, torch is
    not needed. A process that a launcher started as a rank checks collectives and links with the other ranks, and all return the findings
    of all machines.
    """
    from megalith.fleet import environment
    from megalith.machine import gpus, health

    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file. Give the folder that runs will write to.")
    place = environment.find()
    first = place is None or place.local_rank == 0
    own = [*health.doctor(folder), *gpus.doctor()] if first else []
    if spec is not None and first:
        own += _files_of(spec, folder, ranks=place.local_world if place is not None else None)
    if place is None and not burn_in and not ranks:
        return own
    from megalith.prove import doctor as burner  # needs torch

    if place is not None:
        return burner.check_place(place, own, burn_in_seconds=burn_in)
    if ranks:
        own += burner.check_ranks(ranks)  # first: they are forked, and a process that has used a GPU cannot be
    for device in burner.devices() if burn_in else ():
        own += [replace(one, check=f"{one.check}, {device}") for one in burner.burn_in(device, seconds=burn_in)]
    return own


def _spec(run: Path | None, settings: Sequence[str]) -> "RunSpec | None":
    """Return the run in a file; None if no file is given. Raises SpecErrors for a faulty run, or a usage error for settings without a
    file."""
    if run is None:
        if settings:
            raise typer.BadParameter(
                "--set sets a value of a run file. Give the run file, too: megalith doctor RUN.toml --set KEY=VALUE"
            )
        return None
    from megalith.check.own import load_admitted  # specifications take 0.2 s to import
    from megalith.spec.problem import Problem, SpecErrors

    problems: list[Problem] = []
    resolved = load_admitted(run, settings, problems)
    if resolved is None:
        raise SpecErrors(problems)
    return resolved.spec


def _files_of(spec: "RunSpec", folder: Path, *, ranks: int | None) -> "Iterator[Finding]":
    """Check the folders in which this machine's ranks keep state and activations. `folder`: the run's; `ranks`: how many of them this
    machine has, if that is known; else as many as the cluster file says, or one for each GPU, or one."""
    from megalith.check.case import Case
    from megalith.check.here import folders_of_files
    from megalith.machine import capacity, state_disk

    case = Case(spec, None, files=False, folder=folder)
    devices = (capacity.find_gpus()[0] or 1) if case.cluster is None else case.cluster.host_devices
    here = ranks or min(spec.ranks, devices)
    rate = case.cluster.host.disk_bandwidth if case.cluster is not None else None
    for key, named, least in folders_of_files(case):
        yield from state_disk.check_folder(key, Path(named) if named else folder, room=here * least, rate=rate)


def _calibrate(out: Path, ranks: int, seconds: float, *, overwrite: bool, as_json: bool) -> None:
    """Measure this machine and write its cluster file. Raises FileExistsError if the file exists, ValueError under a launcher or if the
    file's name does not end in .toml."""
    from megalith.fleet import environment
    from megalith.machine import capacity
    from megalith.prove.calibrate import calibrate, text  # needs torch

    if environment.find() is not None:
        raise ValueError("--calibrate measures one machine and starts its own ranks. Run the command without torchrun or srun.")
    if out.suffix != ".toml":
        raise ValueError(
            f"--calibrate {out}: a cluster file is TOML, and is recognised by its name. Use a name that ends in .toml."
        )
    if out.exists() and not overwrite:
        raise FileExistsError(f"--calibrate {out}: the file exists already. Use --overwrite, or another name.")
    found = calibrate(ranks or capacity.find_gpus()[0] or 1, seconds=seconds)
    write(text(found, host=platform.node()), out, overwrite=True)
    if as_json:
        print_json({"ok": True, "out": str(out)} | found.to_json())
    else:
        at_work = counted(found.cluster.count, "rank")
        print(f'written: {out}\nnext: cluster = "{out}" in a run file whose plan has {at_work}, or megalith plan --cluster {out}')


def _described(rows: Sequence[tuple[str, str]]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, escape(value))
    return table


def _table(findings: "Sequence[Finding]") -> Table:
    """Return a table of findings, with limits and suggested remedies."""
    table = Table("", "check", "found", "limit", "what to do")
    for one in findings:
        table.add_row(f"[{COLOURS[one.verdict]}]{one.verdict}[/]", one.check, escape(one.value), one.limit, escape(one.way_out))
    return table
