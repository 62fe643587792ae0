"""`megalith plan`: the best layouts of a model on a cluster, predicted."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from megalith.commands.shared.arguments import Json, Overwrite, Settings
from megalith.commands.shared.output import print_json, progress, write

if TYPE_CHECKING:
    from megalith.planner.plan_result import PlanResult
    from megalith.planner.price import Price
    from megalith.planner.request import PlanRequest


TOP = 5
"""Default number of layouts to show."""


def whole(text: str) -> int:
    """Return 8192, 8k (8 x 1024), 1M (2^20) or 16e6 as a whole number above 0. Raises BadParameter."""
    return _whole(text, 1024, "8192, or 8k (8 x 1024), 1M (2^20), 16e6")


def number(text: str) -> int:
    """Return 8000, 8k (8,000), 1M or 16e6 as a whole number above 0. Raises BadParameter."""
    return _whole(text, 1000, "8000, or 8k (8,000), 1M, 16e6")


def _whole(text: str, thousand: int, such: str) -> int:
    from megalith.spec.quantity import quantity  # specifications take 0.2 s to import

    found = quantity(text, thousand=thousand)
    if found is None or found != int(found):
        raise typer.BadParameter(f"{text!r} is not a whole number above 0. Write {such}.")
    return int(found)


Length = Annotated[int | None, typer.Option(parser=whole, metavar="TOKENS", help="Tokens of a sequence; 8k is 8 x 1024.")]
Batch = Annotated[int | None, typer.Option(parser=whole, metavar="SEQUENCES", help="Sequences a step.")]
BatchTokens = Annotated[
    str | None,
    typer.Option(metavar="TOKENS", help="Tokens a step, rounded to whole sequences: 16M is 16 x 2^20, 16e6 is 16,000,000."),
]
ComputeOptimal = Annotated[
    bool, typer.Option("--compute-optimal", help="Set --tokens by Chinchilla's rule: 20 tokens for each active parameter.")
]
Format = Annotated[
    str | None,
    typer.Option(
        help="Number format of the training: bf16, fp16, fp32, fp8, mxfp8, nvfp4 or mxfp4. Default: the run's, or bf16."
    ),
]
Pareto = Annotated[
    bool,
    typer.Option(
        "--pareto", help="Show the Pareto frontier of time, cost and memory instead, including layouts on fewer devices."
    ),
]
WhatIf = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=VALUE",
        help="Also show the best layout with one change: accelerator, cluster, scale_out, scale_up (GB/s), seq_len, "
        "global_batch, global_batch_tokens, format. May be repeated.",
    ),
]
ForwardOnly = Annotated[
    bool, typer.Option("--forward-only", help="Plan the prefill of long prompts instead of training; default batch: 1 sequence.")
]
Offload = Annotated[
    bool,
    typer.Option(
        "--offload/--no-offload",
        help="Also show layouts with some of the optimizer's state, or of the activations, in host memory or on disk.",
    ),
]
SmallState = Annotated[
    bool,
    typer.Option(
        "--small-state",
        help="Keep the optimizer's moments in 8 bits (optimizer.moments = fp8) and, where that makes a step shorter, gradients in bf16 "
        "and master weights in 24 bits. All of these round.",
    ),
]
Software = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Software to predict: megalith, or, for comparison, another, such as megatron-te or torchtitan. A wrong "
        "name lists all.",
    ),
]
Measured = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FILE|RUN",
        help="Your own measurements: a table (.csv, as megalith/planner/published/measurements.csv) or the folder of a finished "
        "run. The measurements correct predicted times, weighted by their reliability. May be repeated.",
    ),
]
Atlas = Annotated[
    bool,
    typer.Option(
        "--atlas",
        help="Show a map instead: the best layout for each model (--model A,B,...) on up to seven numbers of nodes, from 1 to the "
        "cluster's.",
    ),
]
Guide = Annotated[
    bool,
    typer.Option(
        "--guide",
        help="Explain the way to a plan step by step: fit, batch, throughput, one technique at a time. Asks questions on a terminal.",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write the best layout as a run file (.toml), or with --atlas the map (.html)."),
]


def command(
    run: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RUN.toml|RUN]", help="A run file to plan for; with --explain also a run folder.", show_default=False
        ),
    ] = None,
    settings: Settings = None,
    model: Annotated[str | None, typer.Option(help="A preset, such as llama3.1-405b.")] = None,
    cluster: Annotated[str | None, typer.Option(help="NAME:DEVICES, such as h100:16384, or a cluster file (.toml).")] = None,
    seq_len: Length = None,
    global_batch: Batch = None,
    global_batch_tokens: BatchTokens = None,
    tokens: Annotated[
        str | None, typer.Option(help="Tokens of the whole training, such as 15T; its days, dollars and energy are then shown.")
    ] = None,
    compute_optimal: ComputeOptimal = False,
    format: Format = None,
    top: Annotated[int, typer.Option(min=1, help="Number of layouts to show.")] = TOP,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain",
            help=(
                "Show the cost of each layout with one choice changed; for a finished run, the part of its step that is slower "
                "than predicted."
            ),
        ),
    ] = False,
    pareto: Pareto = False,
    what_if: WhatIf = None,
    measured: Measured = None,
    forward_only: ForwardOnly = False,
    software: Software = "megalith",
    offload: Offload = False,
    small_state: SmallState = False,
    atlas: Atlas = False,
    guide: Guide = False,
    out: Out = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Predict the best layouts of a model on a cluster: speed, memory, idle time, exposed communication. Options override RUN.toml.

    Needs no GPU; needs torch only for model shapes that were not predicted before. Errors of the predictions: docs/planner.md.

    Example:  megalith plan --model llama3.1-405b --cluster h100:16384 --seq-len 8192 --global-batch 2048 --tokens 15T
    """
    from megalith.planner import measured as rows
    from megalith.planner import plan_result, price, request, run_file, varied  # the planner takes long to import

    if explain and run is not None and run.is_dir():
        _explain(run, as_json=as_json)
        return
    if atlas:
        unused = {
            "RUN.toml": run, "--tokens": tokens, "--compute-optimal": compute_optimal, "--top": top != TOP, "--explain": explain,
            "--pareto": pareto, "--what-if": what_if, "--measured": measured, "--forward-only": forward_only, "--offload": offload,
            "--small-state": small_state, "--guide": guide,
        }  # fmt: skip
        if wrong := [name for name, value in unused.items() if value]:
            raise typer.BadParameter(f"--atlas draws a map and does not use {' or '.join(wrong)}. Leave out what is not used.")
        length, batch = seq_len or 8192, global_batch_tokens or (None if global_batch else "4M")
        plan_request = request.PlanRequest(
            cluster=cluster,
            seq_len=length,
            global_batch=global_batch,
            global_batch_tokens=batch,
            format=format,
            software=software,
            overrides=tuple(settings or ()),
        )
        _draw_atlas(
            plan_request, model.split(",") if model else [], out or Path("atlas.html"), overwrite=overwrite, as_json=as_json
        )
        return
    plan_request = request.PlanRequest(
        path=run, model=model, cluster=cluster, seq_len=seq_len, global_batch=global_batch, global_batch_tokens=global_batch_tokens,
        tokens=tokens, compute_optimal=compute_optimal, format=format, forward_only=forward_only, offload=offload,
        small=small_state, software=software, overrides=tuple(settings or ()), out=out is not None,
    )  # fmt: skip
    if guide:
        _walk(plan_request, measured or (), out, overwrite=overwrite, as_json=as_json)
        return
    with _searching() as tick:
        others = [(change, varied.vary(plan_request, change)) for change in what_if or ()]
        wanted = request.resolve(plan_request)
        own = rows.measured(measured or (), software)
        result = plan_result.best_plans(wanted, top=top, why=explain, pareto=pareto, what_ifs=others, measured=own, tick=tick)
    if out is not None:
        write(run_file.as_run(result), out, overwrite=overwrite)
    broken = price.prices_of(result) if explain or result.own else ()
    if as_json:
        found = result.to_json() | {"prices": [one.to_json() for one in broken]}
        print_json({"ok": True} | found | ({"out": str(out)} if out else {}))
        return
    _show(result, broken, pareto=pareto)
    if out is not None:
        print(f"written: {out}")


@contextmanager
def _searching() -> Iterator[Callable[[int, int], None]]:
    """Yield a function that shows a search on a progress bar. The function's arguments are the number of model parts traced so far, and
    the number of parts to trace."""
    with progress() as bar:
        task = bar.add_task("searching", total=None, counts="")
        bar.refresh()

        def tick(done: int, total: int) -> None:
            if done < total:
                bar.update(task, completed=done, total=total, counts="parts", description="tracing new parts", refresh=True)
            else:
                bar.update(task, completed=0, total=None, counts="", description="searching", refresh=True)

        yield tick


def _show(found: "PlanResult", broken: "Sequence[Price]", *, pareto: bool) -> None:
    """Print layouts."""
    from megalith.report import plans  # drawing

    console, narrow = Console(highlight=False, soft_wrap=True), Console(highlight=False)
    for line in (*found.request.notes, plans.heading(found)):
        console.print(escape(line))
    if answer := "" if pareto else plans.best(found):
        console.print(f"[bold]{escape(answer)}[/]\n")
    narrow.print(plans.frontier(found.frontier) if pareto else plans.table(found))
    console.print(escape(plans.legend(found)), style="dim")
    if trainings := plans.trainings(found):
        console.print(escape(trainings))
    if found.site_plans is not None:
        narrow.print("", plans.sites(found.site_plans), sep="\n")
        console.print(
            "waits: share of each step spent waiting for the slowest site. The layouts above are for site sites.site (default: 0).",
            style="dim",
        )
    if across := plans.across(found.linked):
        console.print(escape(across))
    if found.phases:
        narrow.print("", plans.phases(found), sep="\n")
    if found.neighbours:
        narrow.print("", plans.reasons(found), sep="\n")
    if broken:
        narrow.print("", plans.prices(broken), sep="\n")
    if found.what_ifs:
        narrow.print("", plans.what_ifs(found), sep="\n")
    if found.gains is not None:
        narrow.print("", plans.gains(found.gains), sep="\n")
        console.print(escape(plans.recipe_advice(found.gains)), style="dim")


def _explain(run: Path, *, as_json: bool) -> None:
    """Print a finished run's step beside its prediction, and changes to try. Raises SpecErrors if the run cannot be predicted."""
    from megalith.planner.slowdown import slowdown
    from megalith.report import plans  # drawing
    from megalith.spec.base import AbsentError
    from megalith.spec.problem import Problem, SpecErrors

    try:
        found = slowdown(run)
    except (OSError, ValueError, AbsentError) as error:
        way_out = "Give the folder of a run with `cluster` in its run file and some finished steps."
        raise SpecErrors([Problem("error", "RUN", str(run), str(error), way_out, "command line")]) from error
    if as_json:
        print_json({"ok": True} | found.to_json())
        return
    console = Console(highlight=False)
    console.print(escape(plans.slower(found)), plans.terms(found), sep="\n")
    if found.tries:
        console.print(plans.tries(found))


def _walk(plan_request: "PlanRequest", measured: Sequence[Path], out: Path | None, *, overwrite: bool, as_json: bool) -> None:
    """Print a step-by-step explanation of a plan, after asking for values that no option gave. Raises SpecErrors if no layout fits, or
    the request is wrong."""
    from megalith.planner import measured as rows
    from megalith.planner import request, run_file
    from megalith.planner.walk import walk
    from megalith.report.walk import pages  # drawing
    from megalith.spec.problem import Problem, SpecErrors

    if plan_request.forward_only:
        reason = "the guide leads to a plan for training, but --forward-only plans a prefill"
        raise SpecErrors([Problem("error", "--guide", None, reason, "Leave out --guide or --forward-only.", "command line")])
    if sys.stdin.isatty() and not as_json:
        plan_request = _interview(plan_request)
    with _searching() as tick:
        found = walk(request.resolve(plan_request), measured=rows.measured(measured, plan_request.software), tick=tick)
    if found.result is not None and out is not None:
        write(run_file.as_run(found.result), out, overwrite=overwrite)
    if not as_json:
        console = Console(highlight=False)
        for page in pages(found):
            console.print(page)
    if found.result is None:
        raise SpecErrors(found.problems)
    if as_json:
        print_json({"ok": True} | found.to_json() | ({"out": str(out)} if out else {}))
    elif out is not None:
        print(f"written: {out}\nnext: megalith check {out}")


def _interview(plan_request: "PlanRequest") -> "PlanRequest":
    """Ask for the model, devices, sequence length and tokens that no option or run file gave; an empty answer takes the default."""
    if plan_request.path is not None:
        return plan_request
    model = plan_request.model or typer.prompt("Model, such as llama3.1-8b or 8b (`megalith models` lists them)")
    cluster = plan_request.cluster or typer.prompt("Devices, such as 8xh100, or a cluster file")
    asked = replace(plan_request, model=model, cluster=cluster)
    if plan_request.seq_len is None:
        length = typer.prompt("Tokens of a sequence, such as 8k (empty: the model's context, at most 8k)", "", show_default=False)
        asked = replace(asked, seq_len=whole(length) if length else None)
    if plan_request.global_batch is None and plan_request.global_batch_tokens is None:
        batch = typer.prompt("Tokens of a step, such as 4M (empty: 4M)", "", show_default=False)
        asked = replace(asked, global_batch_tokens=batch or None)
    if plan_request.tokens is None and not plan_request.compute_optimal:
        tokens = typer.prompt("Tokens of the whole training, such as 15T (empty: 20 a parameter)", "", show_default=False)
        asked = replace(asked, tokens=tokens or None, compute_optimal=not tokens)
    return asked


def _draw_atlas(plan_request: "PlanRequest", models: list[str], out: Path, *, overwrite: bool, as_json: bool) -> None:
    """Write a map of the best layouts by model and nodes as one HTML page. Raises FileExistsError."""
    from megalith.planner import atlas
    from megalith.report import atlas as pages  # drawing

    if out.exists() and not overwrite:
        raise FileExistsError(f"{out} already exists. Use --overwrite, or another --out.")
    with progress() as bar:
        task = bar.add_task("searching", total=None, counts="searched")

        def tick(name: str) -> None:
            bar.update(task, advance=1, description=escape(name), refresh=True)

        found = atlas.atlas(plan_request, models or atlas.MODELS, tick=tick)
    write(pages.page(found), out, overwrite=True)
    print_json({"ok": True, "out": str(out)} | found.to_json()) if as_json else print(f"drawn: {out}")
