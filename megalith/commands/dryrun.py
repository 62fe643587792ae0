"""`megalith dryrun`: run one rank of a run of any size, without the other ranks."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from megalith.commands.shared.arguments import Json, RunFile, RunRequest, Settings
from megalith.commands.shared.output import BAD_SPECIFICATION, print_json, print_problems, problem_rows, write

if TYPE_CHECKING:
    from megalith.cost.predicted import Comparison
    from megalith.prove.dryrun import DryRun
    from megalith.spec.problem import Problem


@dataclass(frozen=True)
class DryRunReport:
    """Counted memory, messages and computation of one rank, beside the planner's predictions. `limit`: bytes of the cluster's device, None
    if unknown."""

    run: "DryRun"
    lines: "tuple[Comparison, ...]"
    limit: int | None
    problems: "list[Problem]"
    phase: str = ""
    """The phase of the run that the step belongs to; empty if there is only one."""


def command(
    run: RunFile,
    settings: Settings = None,
    world: Annotated[
        int | None, typer.Option(min=1, help="Number of ranks that will be started, to compare with the plan.")
    ] = None,
    rank: Annotated[int, typer.Option(min=0, help="The rank to run.")] = 0,
    draw: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Draw memory over the step by category into this file: .svg, or .html with all tables."
        ),
    ] = None,
    as_json: Json = False,
) -> int:
    """Run one rank of a run of any size, without the other ranks, a GPU or data: count its memory, messages and computation in a step.

    The trainer's own code runs on fake tensors (shapes without values). The planner's prediction is shown beside each count. In a run
    with phases, counts a step of the phase with the highest predicted memory. Exit status 2 if the rank does not fit the cluster's
    device.

    Example:  megalith dryrun recipes/llama3.1-405b-16k.toml --world 16384 --rank 8000
    """
    if draw is not None and draw.suffix not in (".svg", ".html"):
        raise typer.BadParameter(f"--draw {draw} names neither a picture nor a page. Use a name that ends in .svg or .html.")
    result = dryrun(RunRequest(run, settings or ()), world=world, rank=rank)
    if draw is not None:
        write(_drawn(result, run.stem, draw), draw, overwrite=True)
    if as_json:
        rows, beside = problem_rows(result.problems), [line.to_json() for line in result.lines]
        print_json(
            {"ok": not rows, "problems": rows, "limit": result.limit, "beside": beside, "phase": result.phase}
            | asdict(result.run)
        )
    else:
        _show(result)
        if result.problems:
            print_problems(result.problems, as_json=False)
    return BAD_SPECIFICATION if result.problems else 0


def dryrun(request: RunRequest, *, world: int | None = None, rank: int = 0) -> DryRunReport:
    """Count the memory, messages and computation of rank `rank` in a step, without the other ranks and without data.

    `world`: number of ranks that will be started, to compare with the plan. Raises SpecErrors for a plan with problems and for a rank that
    is not in the plan.
    """
    from megalith.commands.shared import runs
    from megalith.spec import cluster
    from megalith.spec.problem import Problem, SpecErrors

    checked = runs.check(request, world=world, look=False)
    spec, errors = checked.resolved.spec, checked.errors
    if not 0 <= rank < spec.plan.ranks:
        last = spec.plan.ranks - 1
        errors.append(Problem("error", "--rank", rank, f"the plan has ranks 0 to {last}", f"Use --rank 0 to {last}."))
    if errors:
        raise SpecErrors(errors)
    limit = None if spec.cluster == "local" else cluster.load(spec.cluster).accelerator.memory
    from megalith.cost.predicted import predict, workload_of  # needs torch, which a plan that is refused does not
    from megalith.planner.compared import compare
    from megalith.prove import dryrun as dry
    from megalith.prove import fits
    from megalith.spec.phases import Phases, during

    phases = [(predict(workload_of(during(spec, phase)), rank=rank), phase) for phase in Phases.of(spec).shapes]
    predicted, worst = max(phases, key=lambda one: sum(one[0].memory.values()))
    words = f"from sample {worst.first:,} on, {worst.words}" if len(phases) > 1 else ""
    step = during(spec, worst)
    run = dry.dryrun(step, rank=rank)
    problem = fits.does_not_fit(step, run.counted.memory, limit) if limit else None
    return DryRunReport(run, compare(predicted, run.counted), limit, [problem] if problem else [], words)


def _drawn(result: DryRunReport, name: str, out: Path) -> str:
    """Return the page of a dry run if the name `out` ends in .html, else the picture."""
    from megalith.report import dryrun as report  # drawing

    if out.suffix == ".html":
        return report.page(name, result.run, {line.name: line for line in result.lines}, result.limit, result.problems)
    return report.memory_timeline(result.run.counted.memory_timeline)


def _show(result: DryRunReport) -> None:
    """Print memory, messages and computation of a dry run beside their predictions."""
    from megalith.report import dryrun as tables  # drawing
    from megalith.report import units

    run, counted, console = result.run, result.run.counted, Console(highlight=False)
    console.print(tables.heading(run))
    if result.phase:
        console.print(f"the phase with the highest memory: {result.phase}")
    lines = {line.name: line for line in result.lines}
    console.print(tables.memory(counted.memory, lines, result.limit), "", tables.traffic(lines), "", tables.work(lines), sep="\n")
    console.print(f"Other operations move {units.memory(counted.work.moved)}.")
    console.print(f"computed in {units.duration(run.seconds)} with {units.memory(run.resident)} of memory")
