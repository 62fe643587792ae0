"""`megalith launch`: write the file with which an engine (Slurm, Kubernetes, ...) starts a run."""

import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from megalith.commands.shared.arguments import Json, Overwrite, RunFile, RunRequest, Settings, one_of
from megalith.commands.shared.output import print_json, print_problems, problem_rows, write

if TYPE_CHECKING:
    from megalith.fleet.engines import Artefact
    from megalith.spec.problem import Problem


def command(
    run: RunFile,
    engine: Annotated[str, typer.Option(help="slurm, k8s, ray, torchrun or local.", show_default=False)],
    settings: Settings = None,
    run_dir: Annotated[Path | None, typer.Option(help="Run folder on the machines. Default: runs/NAME.")] = None,
    nodes: Annotated[int | None, typer.Option(help="Number of nodes. Default: as many nodes as the run's cluster needs.")] = None,
    ranks_per_node: Annotated[int | None, typer.Option(help="Ranks on each node, instead of --nodes.")] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option(min=0, help="GPUs of each node. Default: one GPU for each rank if the run is for GPUs.")
    ] = None,
    cpus_per_node: Annotated[int | None, typer.Option(min=1, help="Processors to request on each node.")] = None,
    hours: Annotated[
        float | None, typer.Option(min=0.0, help="slurm: time limit; before it is reached, the run saves and is queued again.")
    ] = None,
    partition: Annotated[str | None, typer.Option(help="slurm: partition.")] = None,
    account: Annotated[str | None, typer.Option(help="slurm: account.")] = None,
    image: Annotated[str | None, typer.Option(help="k8s: container image with Megalith.")] = None,
    namespace: Annotated[str | None, typer.Option(help="k8s: namespace of the JobSet.")] = None,
    volume: Annotated[str | None, typer.Option(help="k8s: a PersistentVolumeClaim that all pods mount at /shared.")] = None,
    workdir: Annotated[str | None, typer.Option(help="Working directory on the machines.")] = None,
    restarts: Annotated[
        int | None, typer.Option(min=0, help="Number of times that the engine may restart the whole job. Default: 20.")
    ] = None,
    grace: Annotated[
        int | None,
        typer.Option(min=1, help="Seconds that the engine gives the run to save before it ends the run. Default: 300."),
    ] = None,
    environment: Annotated[list[str] | None, typer.Option("--env", metavar="NAME=VALUE", help="May be repeated.")] = None,
    show: Annotated[bool, typer.Option("--print", help="Print the launch file; this is the default without --out.")] = False,
    out: Annotated[
        str | None, typer.Option(metavar="PATH", help="Write the launch file to this path, or into this folder.")
    ] = None,
    submit: Annotated[
        bool,
        typer.Option(
            "--submit",
            help="Submit the launch file to the engine. With --submit and without --out, the file is in the run folder.",
        ),
    ] = False,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> int:
    """Print the file with which an engine starts a run (Slurm batch script, Kubernetes JobSet, Ray job, ...). Only --submit starts the run.

    The run is checked first; exit status 2 if the run or its launch settings are wrong.

    Example:  megalith launch run.toml --engine slurm --nodes 2 --hours 24 --submit
    """
    from megalith.fleet.engines import ENGINES  # specifications take 0.2 s to import
    from megalith.spec import files

    one_of("--engine", engine, *ENGINES)
    if submit and engine == "torchrun":
        raise typer.BadParameter("--submit: torchrun has no queue to submit to. Use --out, and start the file on every node.")
    options = {
        "nodes": nodes, "ranks_per_node": ranks_per_node, "gpus_per_node": gpus_per_node, "cpus_per_node": cpus_per_node,
        "hours": hours, "partition": partition, "account": account, "image": image, "namespace": namespace, "volume": volume,
        "workdir": workdir, "restarts": restarts, "grace": grace, "environment": _variables(environment),
    }  # fmt: skip
    request = RunRequest(run, settings or (), run_dir)
    artefact, advice = launch(request, engine=engine, options=options)
    folder = request.folder(files.load(run, overrides=request.overrides).spec) if submit else None
    launched = _placed(artefact, f"{folder}/" if folder and out is None else out)
    if launched.path:
        write(launched.text, launched.path, overwrite=overwrite or launched.path.parent == folder)
    if as_json:
        print_json(launched.as_json() | {"problems": problem_rows(advice)})
    else:
        _show(launched, advice, text=show, submit=submit)
    return hand_over(launched.submit) if submit else 0


@dataclass(frozen=True)
class LaunchResult:
    """The text of a launch file and its path, which is None if the file is not written. `submit`: the command that hands `file` to its
    engine."""

    file: str
    path: Path | None
    text: str
    submit: str

    def as_json(self) -> dict[str, Any]:
        return {"ok": True, "file": str(self.path or self.file), "text": self.text, "submit": self.submit}


def launch(request: RunRequest, *, engine: str, options: Mapping[str, Any] | None = None) -> "tuple[Artefact, list[Problem]]":
    """Return the file with which an engine starts a run, and advice. `options`: see `fleet.engines.given`.

    Raises SpecErrors with all problems of the run and of the launch options. Data that is missing on this machine gives only advice,
    because the data may exist on the run's machines.
    """
    from megalith.check.sites import launched_alone
    from megalith.commands.shared import runs
    from megalith.fleet import engines
    from megalith.spec.problem import SpecErrors

    checked = runs.check(request, look=False)
    spec, errors = checked.resolved.spec, [*checked.errors, *launched_alone(checked.resolved.spec)]
    here = [one for one in runs.check(request).errors if one not in errors]
    advice = [replace(one, severity="advice", reason=f"seen from this machine, {one.reason}") for one in here]
    try:
        chosen, more = engines.given(
            spec, engine, run_file=str(request.file), run_dir=str(request.folder(spec)),
            overrides=tuple(request.overrides), **(options or {}),
        )  # fmt: skip
    except SpecErrors as found:
        raise SpecErrors([*errors, *(one for one in found.problems if one not in errors)]) from None
    if errors:
        raise SpecErrors(errors)
    return engines.emit(engine, spec, chosen), [*advice, *more]


def hand_over(command: str) -> int:
    """Submit a launch to its engine. Return the exit status of the engine's command. Raises FileNotFoundError if the command is
    missing."""
    words = shlex.split(command)
    if shutil.which(words[0]) is None:
        raise FileNotFoundError(
            f"{words[0]} is not installed here, so nothing was submitted. Install {words[0]}, or run this command on a "
            f"machine that has it: {command}"
        )
    return subprocess.run(words, check=False).returncode


def _variables(settings: list[str] | None) -> dict[str, str] | None:
    """Return NAME=VALUE settings as a mapping; None if there are none. Raises a usage error for any other text."""
    if wrong := [text for text in settings or () if "=" not in text]:
        raise typer.BadParameter(f"--env {wrong[0]} has no value. Write --env {wrong[0]}=VALUE.")
    return {name: value for name, _, value in (text.partition("=") for text in settings)} if settings else None


def _placed(artefact: "Artefact", out: str | None) -> LaunchResult:
    """Return a launch file (such as a Slurm script) with its text and submit command, which name the file by the path to which it is
    written: `out`, or a file in the folder `out`."""
    path = None if out is None else Path(out, artefact.file if out.endswith("/") or Path(out).is_dir() else "")
    submit = artefact.submit.replace(artefact.file, shlex.quote(str(path))) if path else artefact.submit
    return LaunchResult(artefact.file, path, artefact.text.replace(artefact.submit, submit), submit)


def _show(launched: LaunchResult, advice: "Sequence[Problem]", *, text: bool, submit: bool) -> None:
    """Print a launch file's text (if asked, or if it is not written to a file), advice, and how to start it."""
    if text or not launched.path:
        print(launched.text, end="")
    if advice:
        print_problems(advice, as_json=False)
    said = f"written: {launched.path}" if launched.path else f"not written. Add --out {launched.file}"
    start = "" if submit else f"\nstart it with: {launched.submit}"
    Console(stderr=launched.path is None, soft_wrap=True, highlight=False).print(escape(f"{said}{start}"))
