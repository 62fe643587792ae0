"""Arguments in, text or JSON out: the only place that parses arguments and prints.

Exit status: 0 done; 1 something failed; 2 the run's description or the command line is wrong; training adds those of
`megalith.fleet.exit_codes`.
"""

import functools
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megalith import __version__, disk

if TYPE_CHECKING:
    from rich.progress import Progress

    from megalith.planner.answer import Answer
    from megalith.planner.asked import Question
    from megalith.planner.price import Price
    from megalith.rehearse.hangs import Hangs
    from megalith.rehearse.judge import Judgement
    from megalith.rehearse.replay import Replayed
    from megalith.rehearse.simulate import Simulated, Tried
    from megalith.spec.problem import Problem
    from megalith.verbs import Dried

BAD_SPECIFICATION, LOST = 2, 71  # as in fleet.exit_codes

app = typer.Typer(
    name="megalith",
    help="Train large language models, from a laptop's CPU to a cluster: check, train, resume, generate, export.",
    epilog="A first run: make quickstart. Help on a command: megalith COMMAND --help.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(help="Prepare text for training, and look at what was prepared.", no_args_is_help=True)
tokenizer_app = typer.Typer(help="Make tokenizers.", no_args_is_help=True)
app.add_typer(data_app, name="data")
app.add_typer(tokenizer_app, name="tokenizer")

RunFile = Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run: model, plan, data, training.", show_default=False)]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The folder of a run.", show_default=False)]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set a value of the run file, such as train.steps=100. May be repeated."),
]
AtStep = Annotated[int | None, typer.Option("--step", help="The checkpoint of this step. Default: the newest.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")]
Sources = Annotated[
    list[str], typer.Argument(metavar="SOURCE...", help="Files or folders of text, as PATH or DOMAIN=PATH, or bundled:austen.")
]
Split = Annotated[
    str | None,
    typer.Option(help="Where plain text is cut into documents: blank, line, file, heading:REGEX or delimiter:REGEX."),
]
Field = Annotated[str, typer.Option(help="JSON lines: the field that holds the text.")]
Extensions = Annotated[list[str] | None, typer.Option("--extension", help="Folders: only files that end so. May be repeated.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what was made before with other settings.")]


def verbs() -> ModuleType:
    """The functions behind the commands."""
    from megalith import verbs as module  # specifications take 0.2 s to import, which --help need not wait for

    return module


def command(group: typer.Typer, name: str | None = None) -> Callable[[Callable[..., int | None]], Callable[..., None]]:
    """Make a function a command: its docstring is the help, its result the exit status, and what it raises is said plainly."""

    def register(function: Callable[..., int | None]) -> Callable[..., None]:
        @group.command(name)
        @functools.wraps(function)
        def run(**arguments: Any) -> None:
            with plainly(as_json=arguments.get("as_json", False)):
                raise typer.Exit(function(**arguments) or 0)

        return run

    return register


@contextmanager
def plainly(*, as_json: bool) -> Iterator[None]:
    """Say what went wrong without a traceback, where a person can act on it; a mistake in the program keeps its traceback."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        if os.environ.get("MEGALITH_TRACEBACK"):
            raise
        if isinstance(error, typer.Exit):  # a RuntimeError to typer
            raise
        say_failure(str(error) or type(error).__name__, kind=type(error).__name__, as_json=as_json)
        raise typer.Exit(LOST if disk.is_unavailable(error) else 1) from error
    except Exception as error:
        from megalith.spec.problem import SpecErrors  # see verbs()

        if not isinstance(error, SpecErrors):
            raise
        say_problems(error.problems, as_json=as_json)
        raise typer.Exit(BAD_SPECIFICATION) from error


def say(value: Any) -> None:
    """One JSON object on the output."""
    print(json.dumps(asdict(value) if is_dataclass(value) and not isinstance(value, type) else value, indent=1, default=str))


def say_failure(text: str, *, kind: str, as_json: bool) -> None:
    """What failed."""
    if as_json:
        say({"ok": False, "error": text, "kind": kind})
        return
    console = Console(stderr=True, soft_wrap=True)
    console.print(f"[bold red]failed[/]  {escape(text)}", highlight=False)
    console.print("[dim]MEGALITH_TRACEBACK=1 shows where.[/]", highlight=False)


def say_problems(problems: "Sequence[Problem]", *, as_json: bool) -> None:
    """All problems of a run, each with its value, its reason and a way out."""
    errors = [problem for problem in problems if problem.severity == "error"]
    if as_json:
        say({"ok": not errors, "problems": [asdict(problem) for problem in problems]})
        return
    from megalith.spec.toml import literal  # see verbs()

    table = Table(show_header=False, box=None, padding=(0, 2, 1, 0), pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for problem in problems:
        colour = "bold red" if problem.severity == "error" else "yellow"
        value = "" if problem.value is None else f" = {literal(problem.value)}"
        origin = f"  [dim]{escape(problem.source)}[/]" if problem.source else ""
        text = f"[bold]{escape(problem.key + value)}[/]{origin}\n{escape(problem.reason)}.\n{escape(problem.way_out)}"
        table.add_row(f"[{colour}]{problem.severity}[/]", text)
    console = Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else 160)
    console.print(table)
    if errors:
        console.print(f"[bold]{len(errors)} error{'s' * (len(errors) > 1)}[/]: nothing was started.")


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Train large language models, from a laptop's CPU to a cluster: check, train, resume, generate, export."""
    if version:
        print(f"megalith {__version__}")
        raise typer.Exit


@command(app)
def check(
    run: RunFile,
    settings: Set = None,
    ranks: Annotated[int | None, typer.Option(help="Ranks there will be, to compare with the plan.")] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Where the run is kept: one that is there goes on. Default: runs/NAME.")
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="Print the whole run: every value and where it came from.")] = False,
    price: Annotated[
        bool, typer.Option("--price", help="And what each broken rule of the plan costs on the run's cluster, predicted.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Find everything that is wrong with a run, or unwise, before anything starts.

    Needs no GPU and no torch. Exit status 2 if there are errors.

    Example:  megalith check run.toml --set plan.tensor=4 --ranks 8
    """
    checked = verbs().check(run, overrides=settings or (), world=ranks, run_dir=run_dir)
    status = BAD_SPECIFICATION if checked.errors else 0
    prices = verbs().prices(run, overrides=settings or ()) if price and not checked.errors else ()
    if as_json:
        rows = verbs().problem_rows(checked.problems)
        priced = {"prices": [one.to_json() for one in prices]} if price else {}
        say({"ok": not checked.errors, "problems": rows} | priced | verbs().described(checked.resolved))
        return status
    if show:
        from megalith.spec.files import dump  # see verbs()

        print(dump(checked.resolved))
    say_problems(checked.problems, as_json=False)
    if price and not checked.errors:
        show_prices(prices)
    if not checked.errors:
        spec, plan = checked.resolved.spec, checked.resolved.spec.plan
        ranks_of = f"{plan.ranks} rank{'s' * (plan.ranks > 1)}"
        print(
            f"{spec.name} is legal: {ranks_of} (data {plan.data} x tensor {plan.tensor} x pipeline {plan.pipeline}), "
            f"{spec.microbatches} microbatches a step, {spec.train.global_batch * spec.train.seq_len:,} tokens a step, "
            f"{spec.train.steps:,} steps"
        )
    return status


def show_prices(rows: "Sequence[Price]") -> None:
    """What broken rules cost."""
    from megalith.report import plans  # drawing, which only this needs

    console = Console(highlight=False)
    console.print(plans.prices(rows) if rows else "No rule of the plan that has a price in time is broken.")


@command(app)
def train(
    run: RunFile,
    settings: Set = None,
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
    trained = verbs().train(run, console=console, overrides=settings or (), run_dir=run_dir, profile=steps_of(profile))
    if as_json:
        say({"ok": trained.code == 0} | asdict(trained))
        return trained.code
    if trained.message:
        Console(stderr=trained.code != 0, soft_wrap=True, highlight=False).print(escape(trained.message))
        print(f"run folder: {trained.run_dir}")
    if trained.report is not None:
        console.print(verbs().summary(trained.run_dir))
        print(f"report: {trained.report}")
    return trained.code


@command(app)
def agent(
    run: RunFile,
    settings: Set = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Where the run is kept, the same on all machines. Default: runs/NAME.")
    ] = None,
    machine: Annotated[str | None, typer.Option(help="This machine's name in the run. Default: its host name.")] = None,
    as_json: Json = False,
) -> int:
    """Be one machine of a run on many: torchrun or srun starts one such process a node, which starts the ranks itself.

    fleet.nodes machines train; fleet.spares more wait warm, and one takes the place of a machine that is lost. The engine's first process
    directs the run. MEGALITH_MEETING=tcp://HOST:PORT lets a machine join a run that goes on.

    Example:  torchrun --nnodes 3 --nproc-per-node 1 -m megalith.cli agent run.toml --set fleet.nodes=2 --set fleet.spares=1
    """
    console = Console(stderr=as_json)
    trained = verbs().agent(run, console=console, overrides=settings or (), run_dir=run_dir, machine=machine)
    if as_json:
        say({"ok": trained.code == 0} | asdict(trained))
        return trained.code
    if trained.message:
        Console(stderr=trained.code != 0, soft_wrap=True, highlight=False).print(escape(trained.message))
        print(f"run folder: {trained.run_dir}")
    return trained.code


@command(app)
def parity(
    run: Annotated[
        Path | None, typer.Argument(metavar="[RUN.toml]", help="The run whose plan is shown.", show_default=False)
    ] = None,
    settings: Set = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps to compare. Default: 3.", show_default=False)] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Where the ranks' logs go. Default: runs/NAME-parity.")] = None,
    random: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Instead of a run: N combinations drawn at random.", show_default=False)
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of the draws; the same seed draws the same. Default: 0.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> int:
    """Show that a plan changes nothing: a small model of the run's shape, trained under its plan and in one process, compared.

    Losses, gradients, gradient norm and weights after several steps, in fp32. Needs no data. Exit status 1 on any gap.

    With --random, combinations of models, data, context, tensor, pipeline and expert parallelism and recomputation, on up to 8 ranks.

    Example:  megalith parity run.toml --set plan.tensor=2

    Any combination:  megalith parity --random 20 --seed 7
    """
    if random is not None:
        unused = {"RUN.toml": run, "--set": settings, "--steps": steps, "--run-dir": run_dir}
        if wrong := [name for name, value in unused.items() if value is not None]:
            raise typer.BadParameter(f"--random draws runs of its own and makes no use of {' or '.join(wrong)}. Leave one out.")
        return parity_of_draws(random, seed or 0, as_json=as_json)
    if run is None:
        raise typer.BadParameter("Name a run, as in `megalith parity run.toml`, or draw some: `megalith parity --random 20`.")
    if seed is not None:
        raise typer.BadParameter("--seed chooses the draws of --random N; a run file has its own seed: --set train.seed=1.")
    found = verbs().parity(run, overrides=settings or (), steps=steps or 3, run_dir=run_dir)
    if as_json:
        say({"ok": found["equal"]} | found)
    else:
        table = Table("quantity", "worst gap", "limit", "where", "")
        for row in found["rows"]:
            verdict = "[green]equal[/]" if row["equal"] else "[bold red]NOT equal[/]"
            table.add_row(row["quantity"], f"{row['gap']:.2g}", f"{row['limit']:g}", row["where"], verdict)
        Console(highlight=False).print(table)
        print("equal: the plan changes nothing" if found["equal"] else "NOT equal: the plan changes the result")
    return 0 if found["equal"] else 1


def parity_of_draws(count: int, seed: int, *, as_json: bool) -> int:
    """Prove combinations drawn at random, with a bar on the error stream; the exit status."""
    done = {"equal": 0, "tie": 0, "NOT equal": 0, "failed": 0}
    with progress() as bar:
        task = bar.add_task("starting", total=count, counts="")
        bar.refresh()

        def ended(outcome: str) -> None:
            done[outcome] += 1
            counts = ", ".join(f"{number} {word}" for word, number in done.items() if number or word == "equal")
            bar.update(task, advance=outcome != "tie", counts=counts, refresh=True)
            if bar.disable:
                print(outcome, file=sys.stderr)

        def starting(name: str, ranks: int) -> None:
            name = f"{name} on {counted(ranks, 'rank')}"
            bar.update(task, description=escape(name), refresh=True)
            if bar.disable:
                print(f"{sum(done.values()) + 1}/{count}  {name}: ", end="", file=sys.stderr, flush=True)

        found = verbs().parity_of_draws(count, seed=seed, starting=starting, ended=ended)
    if as_json:
        say({"ok": found["equal"]} | found)
        return 0 if found["equal"] else 1
    wrong = [case for case in found["cases"] if case["outcome"] != "equal"]
    if wrong:
        Console(highlight=False).print(table_of_gaps(wrong))
    equal, ties = found["outcomes"]["equal"], found["outcomes"]["tie"]
    if ties:
        print(f"{ties} tied, and {'counts' if ties == 1 else 'count'} for nothing: tokens had two experts too close to call")
    if found["equal"]:
        ranks = counted(max(case["ranks"] for case in found["cases"]), "rank")
        print(f"equal: {counted(equal, 'combination')} (seed {seed}, up to {ranks}) as in one process")
    elif found["outcomes"]["NOT equal"] or found["outcomes"]["failed"]:
        print(f"NOT equal: {equal} of {count} combinations (seed {seed}) train like one process")
    else:
        print(f"not shown: there were {equal} combinations to compare, and {count} were asked for. Use a smaller --random.")
    return 0 if found["equal"] else 1


def table_of_gaps(cases: Sequence[dict[str, Any]]) -> Table:
    """Cases that are not equal, and why."""
    table = Table("combination", "ranks", "", "why", show_lines=True)
    for case in cases:
        gaps = [f"{r['quantity']}: {r['gap']:.2g}, limit {r['limit']:g} ({r['where']})" for r in case["rows"] if not r["equal"]]
        if case["outcome"] == "tie":
            gaps = [f"{case['tokens_tied']} tokens had experts too close to call"]
        why = case["error"].strip().splitlines()[-6:] or gaps
        colour = "yellow" if case["outcome"] == "tie" else "bold red"
        table.add_row(escape(case["name"]), str(case["ranks"]), f"[{colour}]{case['outcome']}[/]", escape("\n".join(why)))
    return table


def progress() -> "Progress":
    """A bar on the error stream, if someone watches: how much is done, counts in words, time left, what is done now.

    It is drawn at each update only: a thread that draws would be forked with the ranks.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # few commands draw

    console = Console(stderr=True)
    counts, name = TextColumn("{task.fields[counts]}"), TextColumn("{task.description}")
    columns = (BarColumn(20), MofNCompleteColumn(), counts, TextColumn("left"), TimeRemainingColumn(), name)
    hidden = not console.is_terminal
    return Progress(*columns, console=console, auto_refresh=False, disable=hidden, speed_estimate_period=3600, transient=True)


@command(app)
def dryrun(
    run: RunFile,
    settings: Set = None,
    world: Annotated[int | None, typer.Option(min=1, help="Ranks there will be, to compare with the plan.")] = None,
    rank: Annotated[int, typer.Option(min=0, help="The rank to be.")] = 0,
    draw: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw memory over the step by category: .svg, or .html with all tables as a page."),
    ] = None,
    as_json: Json = False,
) -> int:
    """Be one rank of a run of any size, without the others, a GPU or data: what it holds, sends and computes in a step.

    The trainer's own code runs, on tensors without data; beside what it counts stands what the planner's figures predict. Exit status
    2 if it does not fit the cluster's device.

    Example:  megalith dryrun recipes/llama3.1-405b-16k.toml --world 16384 --rank 8000
    """
    if draw is not None and draw.suffix not in (".svg", ".html"):
        raise typer.BadParameter(f"--draw {draw} is neither a picture nor a page. Use a name that ends in .svg or .html.")
    dried = verbs().dryrun(run, overrides=settings or (), world=world, rank=rank)
    if draw is not None:
        write(drawn(dried, run.stem, draw), draw, overwrite=True)
    if as_json:
        rows = verbs().problem_rows(dried.problems)
        beside = [line.to_json() for line in dried.lines]
        say({"ok": not dried.problems, "problems": rows, "limit": dried.limit, "beside": beside} | asdict(dried.run))
    else:
        show_dried(dried)
        if dried.problems:
            say_problems(dried.problems, as_json=False)
    return BAD_SPECIFICATION if dried.problems else 0


def drawn(dried: "Dried", name: str, out: Path) -> str:
    """The picture or the page of a dry run, by the name of the file it is for."""
    from megalith.report import dried as report  # drawing, which few ask for

    if out.suffix == ".html":
        return report.page(name, dried.run, {line.name: line for line in dried.lines}, dried.limit, dried.problems)
    return report.course(dried.run.counted.course)


def show_dried(dried: "Dried") -> None:
    """Memory, messages and work of a dry run beside what is predicted of it."""
    from megalith.report import dried as tables  # see verbs()
    from megalith.report import units

    run, counted, console = dried.run, dried.run.counted, Console(highlight=False)
    console.print(tables.heading(run))
    lines = {line.name: line for line in dried.lines}
    console.print(tables.memory(counted.memory, lines, dried.limit), "", tables.traffic(lines), "", tables.work(lines), sep="\n")
    console.print(f"Other operations move {units.memory(counted.work.moved)}.")
    console.print(f"found out in {units.duration(run.seconds)} with {units.memory(run.resident)} of memory")


@command(app)
def generate(
    run_dir: RunFolder,
    prompt: Annotated[str, typer.Option(help="Text to go on from.")] = "",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to write.")] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="Below 1 safer, above 1 wilder; 0: the likeliest.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(min=1, help="Choose among this many likeliest tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Choose among the likeliest of this probability.")] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same text.")] = 0,
    greedy: Annotated[bool, typer.Option("--greedy", help="Always take the likeliest token.")] = False,
    step: AtStep = None,
    as_json: Json = False,
) -> None:
    """Let a trained model write.

    Example:  megalith generate runs/first --prompt "It is a truth" --tokens 80 --top-k 40
    """
    chosen = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed, "greedy": greedy, "step": step}
    text = verbs().generate(run_dir, prompt=prompt, tokens=tokens, **chosen)
    say({"ok": True, "prompt": prompt, "text": text}) if as_json else print(text)


@command(app)
def export(
    run_dir: RunFolder,
    out: Annotated[Path, typer.Option(help="The folder to write.", show_default=False)],
    to: Annotated[str, typer.Option(help="Format: hf (Hugging Face transformers).")] = "hf",
    dtype: Annotated[str, typer.Option(help="Numbers: fp32 (as trained, nothing lost) or bf16 (half the size).")] = "fp32",
    step: AtStep = None,
    as_json: Json = False,
) -> None:
    """Write a run's weights for other programs.

    Example:  megalith export runs/first --to hf --out exported
    """
    one_of("--to", to, "hf")
    one_of("--dtype", dtype, "fp32", "bf16")
    folder = verbs().export(run_dir, out=out, dtype=dtype, step=step)
    say({"ok": True, "folder": str(folder)}) if as_json else print(f"exported: {folder}")


@command(app, "import")
def import_(
    source: Annotated[Path, typer.Argument(metavar="DIR", help="A folder with config.json and safetensors.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The checkpoint to write.", show_default=False)],
    from_: Annotated[str, typer.Option("--from", help="Format: hf (Hugging Face transformers).")] = "hf",
    as_json: Json = False,
) -> None:
    """Make a checkpoint of other programs' weights; a run starts from it with train.init_from.

    Example:  megalith import Llama-3.2-1B --from hf --out checkpoints/llama
    """
    one_of("--from", from_, "hf")
    folder = verbs().import_(source, out=out)
    said = f"imported: {folder}\nA run starts from it with --set train.init_from={folder}"
    say({"ok": True, "folder": str(folder)}) if as_json else print(said)


@command(app)
def report(
    run_dir: RunFolder,
    trace: Annotated[
        bool, typer.Option("--trace", help="Also write trace.json: the pipeline, predicted and measured, for ui.perfetto.dev.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show a run in short, and write its report.html again, from the files in its folder; also while it trains.

    Example:  megalith report runs/first --trace
    """
    page = verbs().report(run_dir)
    traced = verbs().trace(run_dir) if trace else None
    if as_json:
        say({"ok": True, "report": str(page)} | ({"trace": str(traced)} if traced else {}))
        return
    Console().print(verbs().summary(run_dir))
    print(f"report: {page}" + (f"\ntrace: {traced}" if traced else ""))


def whole(text: str) -> int:
    """8192, 8k (8 x 1024), 1M (2^20) or 16e6 as a whole number above 0. Raises BadParameter."""
    from megalith.planner.asked import quantity  # see verbs()

    number = quantity(text, thousand=1024)
    if number is None or number != int(number):
        raise typer.BadParameter(f"{text!r} is no whole number above 0. Write 8192, or 8k (8 x 1024), 1M (2^20), 16e6.")
    return int(number)


@command(app)
def plan(
    run: Annotated[Path | None, typer.Argument(metavar="[RUN.toml]", help="A run to plan for.", show_default=False)] = None,
    settings: Set = None,
    model: Annotated[str | None, typer.Option(help="A preset, such as llama3.1-405b.")] = None,
    cluster: Annotated[str | None, typer.Option(help="h100:16384 and the like, or a TOML file of a cluster.")] = None,
    seq_len: Annotated[
        int | None, typer.Option(parser=whole, metavar="TOKENS", help="Tokens of a sequence; 8k is 8 x 1024.")
    ] = None,
    global_batch: Annotated[int | None, typer.Option(parser=whole, metavar="SEQUENCES", help="Sequences a step.")] = None,
    global_batch_tokens: Annotated[
        str | None, typer.Option(metavar="TOKENS", help="Or tokens a step, to whole sequences: 16M is 16 x 2^20, 16e6 is exact.")
    ] = None,
    tokens: Annotated[str | None, typer.Option(help="Of the whole training, such as 15T: for days, dollars and energy.")] = None,
    compute_optimal: Annotated[
        bool, typer.Option("--compute-optimal", help="Or as many tokens as Chinchilla's rule says: 20 a parameter.")
    ] = False,
    format: Annotated[
        str | None, typer.Option(help="bf16, fp32, or predicted only: fp16, fp8, mxfp8, fp4. Default: the run's, or bf16.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="How many layouts to show.")] = 10,
    explain: Annotated[bool, typer.Option("--explain", help="What each neighbour of the best layout would cost.")] = False,
    pareto: Annotated[
        bool,
        typer.Option(
            "--pareto", help="Instead: layouts, also on fewer devices, that nothing beats in time, cost and memory at once."
        ),
    ] = False,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="And the best layout if one thing were otherwise: accelerator, cluster, scale_out, scale_up (GB/s), seq_len, "
            "global_batch, global_batch_tokens, format. May be repeated.",
        ),
    ] = None,
    forward_only: Annotated[
        bool, typer.Option("--forward-only", help="No training, but the prefill of long prompts; 1 sequence, if nothing is said.")
    ] = False,
    offload: Annotated[
        bool,
        typer.Option(
            help="Also layouts with some of the optimizer's state in host memory: predicted only, the trainer has none."
        ),
    ] = True,
    atlas: Annotated[
        bool,
        typer.Option(
            "--atlas", help="Instead: a map of the best layouts by model (--model A,B,...) and nodes, up to the cluster's."
        ),
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the best layout as a run to this file (.toml); the map (.html).")
    ] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Predict the best layouts of a model on a cluster: speed, memory, what waits and what is exposed. Options override RUN.toml.

    Needs no GPU; torch only for shapes that were not predicted before. How far off it is: docs/planner.md.

    Example:  megalith plan --model llama3.1-405b --cluster h100:16384 --seq-len 8192 --global-batch 2048 --tokens 15T
    """
    from megalith.planner.asked import Question  # see verbs()

    if atlas:
        length, batch = seq_len or 8192, global_batch_tokens or (None if global_batch else "4M")
        asked = Question(cluster=cluster, seq_len=length, global_batch=global_batch, global_batch_tokens=batch, format=format)
        show_atlas(asked, model.split(",") if model else [], out or Path("atlas.html"), overwrite=overwrite, as_json=as_json)
        return
    question = Question(
        path=run, model=model, cluster=cluster, seq_len=seq_len, global_batch=global_batch, global_batch_tokens=global_batch_tokens,
        tokens=tokens, compute_optimal=compute_optimal, format=format, forward_only=forward_only, offload=offload,
        overrides=tuple(settings or ()), out=out is not None,
    )  # fmt: skip
    with progress() as bar:
        task = bar.add_task("searching", total=None, counts="")
        bar.refresh()

        def tick(done: int, total: int) -> None:
            if done < total:
                bar.update(task, completed=done, total=total, counts="parts", description="tracing what is new", refresh=True)
            else:
                bar.update(task, completed=0, total=None, counts="", description="searching", refresh=True)

        answered = verbs().plan(question, top=top, why=explain, pareto=pareto, what_ifs=what_if or (), tick=tick)
    if out is not None:
        write(verbs().plan_as_run(answered), out, overwrite=overwrite)
    broken = verbs().prices_of(answered) if explain or answered.own else ()
    if as_json:
        found = answered.to_json() | {"prices": [one.to_json() for one in broken]}
        say({"ok": True} | found | ({"out": str(out)} if out else {}))
        return
    show_planned(answered, broken, pareto=pareto)
    if out is not None:
        print(f"written: {out}")


def show_atlas(question: "Question", models: list[str], out: Path, *, overwrite: bool, as_json: bool) -> None:
    """Draw the map, square by square."""
    if out.exists() and not overwrite:
        raise FileExistsError(f"{out} is there already. Use --overwrite, or another --out.")
    with progress() as bar:
        task = bar.add_task("searching", total=None, counts="searched")

        def tick(name: str) -> None:
            bar.update(task, advance=1, description=escape(name), refresh=True)

        found = verbs().atlas(question, models, tick=tick)
    drawn = verbs().draw_atlas(found, out)
    say({"ok": True, "out": str(drawn)} | found.to_json()) if as_json else print(f"drawn: {drawn}")


def show_planned(found: "Answer", broken: "Sequence[Price]", *, pareto: bool) -> None:
    """Layouts on the terminal."""
    from megalith.report import plans  # drawing, which only this needs

    console, narrow = Console(highlight=False, soft_wrap=True), Console(highlight=False)
    for line in (*found.asked.notes, plans.heading(found)):
        console.print(escape(line))
    narrow.print(plans.frontier(found.frontier) if pareto else plans.table(found.found.choices, found.own))
    console.print(escape(plans.legend(found)), style="dim")
    if whole := plans.trainings(found):
        console.print(escape(whole))
    if found.neighbours:
        narrow.print("", plans.reasons(found), sep="\n")
    if broken:
        narrow.print("", plans.prices(broken), sep="\n")
    if found.what_ifs:
        narrow.print("", plans.what_ifs(found), sep="\n")


@command(app)
def simulate(
    run: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RUN.toml]", help="A run: its fleet table, checkpoints, state, step and cluster.", show_default=False
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Set a value of the simulation (see below), or of RUN.toml. May be repeated."
        ),
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="h100:16384 and the like, or a TOML file of a cluster.", show_default=False)
    ] = None,
    campaign: Annotated[
        Path | None, typer.Option(help="Instead: a campaign's folder, whose faults are played again.", show_default=False)
    ] = None,
    latencies: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Of a campaign, or a run with faults: what its log says recovery takes, instead of --profile."
        ),
    ] = None,
    days: Annotated[float | None, typer.Option(help="How long the run takes. Default: 30.", show_default=False)] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How often it is played, each time with other faults.")] = 20,
    spares: Annotated[
        int | None, typer.Option(help="Nodes of a site besides those that train. Default: one for every 128.", show_default=False)
    ] = None,
    checkpoint_every: Annotated[
        float | None,
        typer.Option(
            metavar="MINUTES", help="Between checkpoints in the shared store. Default: the run's, or 30.", show_default=False
        ),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(help="How fast recovery is assumed to be: cold, warm or memory. Default: warm.", show_default=False),
    ] = None,
    sites: Annotated[
        int | None, typer.Option(help="Share the nodes out among so many sites, joined by outer steps.", show_default=False)
    ] = None,
    sweep: Annotated[str | None, typer.Option(help="Try out a range: intervals (between checkpoints) or spares.")] = None,
    out: Annotated[Path | None, typer.Option(help="Draw the result into this file (.svg).")] = None,
    as_json: Json = False,
) -> None:
    """Play a long run on a large cluster through, with the faults that such clusters have, and say where its time goes.

    Needs no GPU; torch only to predict a step of RUN.toml that was not predicted before (--set step_seconds=12 says it).

    Keys of --set: step_seconds, state_bytes and storage (bytes/s of the store, for the time that checkpoints take), planned (stops a day),
    outer (wait, skip), outer_every and outer_seconds (between sites), interruptions (a device-hour), fleet.KEY as in a run file,
    reliability.KEY as in a cluster's (racks, switches, lemon nodes, repairs), latencies.KEY. All of them: docs/reliability.md.

    Example:  megalith simulate --cluster h100:16384 --days 54 --profile memory --checkpoint-every 5

    How many spares pay:  megalith simulate --cluster h100:16384 --days 54 --sweep spares --out spares.svg

    A run of yours:  megalith simulate run.toml --cluster h100:1024 --set storage=2e11 --set fleet.verify_every=100

    Racks, switches and lemon nodes:  megalith simulate --cluster clusters/h100-16k-outages.toml --set reliability.rack_outages=0.5

    Four sites:  megalith simulate --cluster h100:16384 --sites 4 --set outer_every=600 --set outer_seconds=30 --set outer=skip

    Latencies that were measured:  megalith simulate --cluster h100:16384 --latencies runs/NAME-campaign

    A campaign's goodput, from its list of faults and the latencies in its log:  megalith simulate --campaign runs/NAME-campaign
    """
    given = {
        "days": days, "fleet.spares": spares, "checkpoint_every": checkpoint_every, "profile": profile, "sites": sites,
    }  # fmt: skip
    options = {key: value for key, value in given.items() if value is not None}
    words = [f"--{key.removeprefix('fleet.').replace('_', '-')}" for key in options]
    if campaign is not None:
        said = {"RUN.toml": run, "--cluster": cluster, "--set": settings, "--sweep": sweep, "--out": out}
        if idle := [*(name for name, value in said.items() if value is not None), *words]:
            raise typer.BadParameter(f"--campaign plays a campaign as it was. Leave out {', '.join(idle)}, or --campaign.")
        replayed = verbs().replay(campaign, like=latencies)
        say({"ok": True} | replayed.as_json()) if as_json else show_replayed(replayed)
        return
    if run is None and cluster is None:
        raise typer.BadParameter("Give --cluster, a RUN.toml that names one, or --campaign to play one again.")
    if sweep is not None:
        one_of("--sweep", sweep, "intervals", "spares")
    if out is not None and out.suffix != ".svg":
        raise typer.BadParameter(f"--out {out} is no name of a picture. Use one that ends in .svg.")
    from megalith.rehearse.prepare import Wanted  # see verbs()

    prepared = verbs().scenario(Wanted(cluster, run, latencies, options, tuple(settings or ())))
    with progress() as bar:
        task = bar.add_task("simulating", total=seeds, counts="lives")

        def begun(total: int) -> None:
            bar.update(task, total=total, refresh=True)

        def tick() -> None:
            bar.update(task, advance=1, refresh=True)

        if sweep is None:
            found = verbs().simulate(prepared.scenario, seeds=seeds, tick=tick)
        else:
            found = verbs().try_out(prepared.scenario, sweep, seeds=seeds, begun=begun, tick=tick)
    drawn = verbs().draw_goodput(found, out, what=sweep or "") if out else None
    if as_json:
        best = {"best": asdict(verbs().best_of(found, sweep))} if sweep else {}
        what = {"sweep": sweep, "tried": [asdict(one) for one in found], **best} if sweep else found.as_json()
        say({"ok": True} | what | {"notes": prepared.notes} | ({"picture": str(drawn)} if drawn else {}))
        return
    for note in prepared.notes:
        print(note)
    show_tried(found, sweep) if sweep else show_simulated(found)
    if drawn:
        print(f"drawn: {drawn}")


def show_replayed(found: "Replayed") -> None:
    """A campaign and its simulation side by side."""
    table = Table("what time went to", "recorded", "predicted")
    for what, *seconds in found.rows():
        table.add_row(what, *(f"{value:.1f} s" for value in seconds))
    Console(highlight=False).print(table)
    print(f"latencies: {found.figures.latencies.source}")
    print(f"goodput {found.recorded.share:.1%} recorded, {found.goodput:.1%} predicted: {found.gap:+.1%}")


def show_simulated(found: "Simulated") -> None:
    """A simulation on the terminal."""
    plan, (low, high) = found.scenario, found.band
    sites = f"{plan.sites} sites, each of " if plan.sites > 1 else ""
    print(
        f"{plan.name}: {plan.days:g} days, {sites}{counted(plan.nodes, 'node')} and {counted(plan.fleet.spares, 'spare')}, "
        f"a checkpoint every {plan.store_every / 60:.3g} minutes, {counted(len(found.lives), 'seed')}"
    )
    table = Table("what time went to", "share", "hours")
    for column in table.columns[1:]:
        column.justify = "right"
    rows = found.rows()
    for what, seconds, share in rows:
        table.add_row(what, f"{share:.2%}", f"{seconds / 3600:,.1f}")
    Console(highlight=False).print(table)
    faults, restarts, stops, unseen = (
        found.mean(count)
        for count in (
            lambda life: sum(life.faults.values()), lambda life: life.restarts, lambda life: life.stops, lambda life: life.undetected
        )
    )  # fmt: skip
    print(f"goodput {found.goodput:.1%} (seeds: {low:.1%} to {high:.1%}); {found.per_device:.1%} of all devices, spares included")
    print(
        f"on average {faults:,.1f} faults, {restarts:,.1f} restarts, {stops:,.1f} stops for a person, {unseen:,.1f} never noticed"
    )
    print(f"latencies: {plan.latencies.source}")
    missing = sum(share for what, _, share in rows if what in ("waiting for nodes", "waiting for a person"))
    if missing > 0.02:
        print(f"{missing:.0%} of the time went to waiting: {plan.fleet.spares} spares are too few. --sweep spares tries more.")


def show_tried(found: "Sequence[Tried]", what: str) -> None:
    """What was tried out, on the terminal; the best stands out."""
    scale, heading = (60, "minutes between checkpoints") if what == "intervals" else (1, "spare nodes")
    best = verbs().best_of(found, what)
    table = Table(heading, "goodput", "seeds", "of all devices, spares included", "")
    for one in found:
        low, high = one.band
        value = f"{one.value / scale:g}"
        table.add_row(value, f"{one.goodput:.1%}", f"{low:.1%} to {high:.1%}", f"{one.per_device:.1%}", "best" * (one is best))
    Console(highlight=False).print(table)


def counted(number: int, noun: str) -> str:
    """1 node, 2 nodes."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


@command(app)
def campaign(
    run: RunFile,
    count: Annotated[int, typer.Option("--faults", min=1, help="Faults, in the mix of Llama 3's table.")] = 24,
    seed: Annotated[int, typer.Option(help="Of the list of faults; the same seed gives the same list.")] = 0,
    settings: Set = None,
    out: Annotated[Path | None, typer.Option(help="Where both runs go; emptied first. Default: runs/NAME-campaign.")] = None,
    supervisor_kills: Annotated[int, typer.Option(min=0, help="Besides, kill the supervisor itself so often.")] = 0,
    agent_kills: Annotated[
        int,
        typer.Option(min=0, help="Give each node an agent of its own, as on many machines, and kill so many of these besides."),
    ] = 0,
    median: Annotated[
        float | None, typer.Option(min=0.0, metavar="SECONDS", help="Not passed if recovery takes longer in the median.")
    ] = None,
    most: Annotated[
        float | None, typer.Option(min=0.0, metavar="SECONDS", help="Not passed if it takes longer at the 99th percentile.")
    ] = None,
    minutes: Annotated[float | None, typer.Option(min=0.0, help="Not passed if both runs take longer.")] = None,
    silence: Annotated[
        float | None, typer.Option(min=0.0, metavar="TIMES", help="Not passed if a hang lasts longer, in times of its limit.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Hurt a run on purpose, and show that it ends as if nothing had happened.

    Trains twice, about three steps a fault: without faults, and with processes killed and stopped, bits flipped, connections torn, nodes
    and checkpoints lost. Passed, if no person was needed, the end state is equal bit for bit, no sample was lost or repeated, hangs had
    the limits that the run's pace gives, and the right rank was blamed. Exit status 1 if not. Speeds are about the machine as well: they
    are held against it only if --median, --most, --minutes or --silence ask for them.

    Example:  megalith campaign run.toml --faults 24 --seed 1 --set fleet.nodes=2 --set fleet.spares=1
    """
    from megalith.rehearse.judge import Aims  # see verbs()

    aims = Aims(median, most, minutes, silence)
    found = verbs().campaign(
        run, count=count, seed=seed, overrides=settings or (), out=out, supervisor_kills=supervisor_kills, agent_kills=agent_kills,
        aims=aims,
    )  # fmt: skip
    if as_json:
        say(found.as_json())
        return 0 if found.passed else 1
    console = Console(highlight=False)
    console.print(table_of_faults(found))
    for line in words_of_campaign(found):
        print(line)
    return 0 if found.passed else 1


def table_of_faults(found: "Judgement") -> Table:
    """What became of each kind of fault."""
    table = Table(
        box=SIMPLE_HEAD,
        padding=(0, 1),
        pad_edge=False,
        caption="In seconds: found after, on again after that, and the most of these.",
    )
    table.add_column("fault", max_width=22)
    table.add_column("handled", no_wrap=True)
    table.add_column("seen as", max_width=12)
    table.add_column("blamed", no_wrap=True)
    for heading in ("found", "on again", "most"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in found.rows:
        right, of = row.blamed
        times = (row.detection, row.recovery, row.slowest)
        table.add_row(
            row.title, f"{row.handled}/{row.injected}", row.seen_as, f"{right}/{of}" if of else "nobody",
            *("" if value is None else f"{value:.2f}" for value in times),
        )  # fmt: skip
    return table


def words_of_campaign(found: "Judgement") -> Iterator[str]:
    """A campaign in sentences."""
    if found.recovery_median is not None and found.recovery_p99 is not None:
        yield f"recovery after detection: median {found.recovery_median:.2f} s, 99th percentile {found.recovery_p99:.2f} s"
    yield from _words_of_hangs(found.hangs)
    yield (
        f"{counted(found.steps, 'step')}, {counted(found.generations, 'start')}, {found.lost_steps} steps done again; "
        f"{found.seconds:.0f} s, {found.seconds_without:.0f} s without faults"
    )
    if found.supervisor_restarts:
        each = ", ".join(f"{seconds:.1f} s" for seconds in found.supervisor_restarts)
        yield f"supervisor killed and started again by the same command, until its first step (not a recovery of the run's own): {each}"
    yield from _words_of_false_alarms(found)
    for kind, why in found.aimed.items():
        yield f"aimed: {kind} comes only {why}" if not why.startswith("all steps") else f"{kind}: {why}"
    for kind, why in found.left_out.items():
        yield f"left out: {kind} ({why})"
    for one in found.asked:
        value = "nothing to measure" if one.found is None else f"{one.found:.2f}{one.unit}"
        yield f"asked: {one.title} {one.most:g}{one.unit} at most: {value}"
    for problem in found.problems:
        yield f"not met: {problem}"
    if found.hidden:
        yield f"{counted(found.hidden, 'fault')} within another fault's incident: the run went on from both, blame is not counted for them"
    verdict = "passed" if found.passed else "NOT passed"
    right, of = found.blamed
    others = f" ({found.among} of them named with another node)" if found.among else ""
    aims = "" if found.asked else "; no speed was asked"
    yield f"{verdict}: {found.handled} of {found.injected} faults handled, {right} of {of} blamed right{others}{aims}"


def _words_of_hangs(hangs: "Hangs") -> Iterator[str]:
    """How long hangs were silent, and what their limits were."""
    if hangs.most is None:
        return
    limits = "" if hangs.limits is None else f" (limits {hangs.limits[0]:.2f} to {hangs.limits[1]:.2f} s)"
    late = f"; {hangs.late} found late: ranks, or who watches them, got no processor" if hangs.late else ""
    yield f"hangs: {hangs.found}, silence at most {hangs.most:.2f} of its limit{limits}{late}"
    if hangs.elsewhere:
        yield f"hangs: {hangs.elsewhere} of them not in a running step, where other limits hold: {hangs.elsewhere_limit:.2f} s at most"


def _words_of_false_alarms(found: "Judgement") -> Iterator[str]:
    """Each with what it cost."""
    for one in found.false_alarms:
        who = (
            f"rank {one.rank} on {one.node}" if one.rank is not None else f"node {one.node}" if one.node is not None else "nobody"
        )
        cost = (
            "not recovered from" if one.seconds is None else f"{one.seconds:.2f} s, {counted(one.lost_steps, 'step')} done again"
        )
        yield f"false alarm: {one.cause} at step {one.step}, {who} ({one.reason}): {cost}"
    if not found.false_alarms:
        yield "no false alarm"
    elif found.same_end:
        yield f"{counted(len(found.false_alarms), 'false alarm')}, none of which changed the result: the end is that without faults"


@command(app)
def doctor(
    folder: Annotated[Path, typer.Option(help="Where runs will write.")] = Path(),
    burn_in: Annotated[
        float, typer.Option(min=0.0, metavar="SECONDS", help="Compute that long for each data type, on every GPU; 0: not at all.")
    ] = 1.0,
    ranks: Annotated[
        int,
        typer.Option(min=0, help="Check collectives and links among so many processes: by NCCL with a GPU for each, else gloo."),
    ] = 0,
    as_json: Json = False,
) -> int:
    """Check whether this machine is fit to train on: memory, disk, network, clock, GPUs, and whether it computes the same twice.

    GPUs are asked through nvidia-smi and DCGM where these are installed. Exit status 1 if anything fails; warnings do not count. Without
    a burn-in and --ranks no torch is needed. Under torchrun or srun, one process a GPU, all machines are checked, collectives and links
    among all ranks as well; the first process says what was found.

    Example:  megalith doctor --folder runs --burn-in 60 --ranks 8
    """
    from megalith.fleet import environment  # see verbs()
    from megalith.machine.health import worst

    findings = verbs().doctor(folder, burn_in=burn_in, ranks=ranks)
    verdict = worst(findings)
    place = environment.find()
    if place is not None and place.rank > 0:
        return 1 if verdict == "fail" else 0
    if as_json:
        say({"ok": verdict != "fail", "worst": verdict, "findings": [one.as_json() for one in findings]})
        return 1 if verdict == "fail" else 0
    colours = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    table = Table("", "check", "found", "limit", "what to do")
    for one in findings:
        table.add_row(f"[{colours[one.verdict]}]{one.verdict}[/]", one.check, escape(one.value), one.limit, escape(one.way_out))
    Console(highlight=False).print(table)
    said = {"ok": "fit to train on", "warn": "fit to train on, with warnings", "fail": "NOT fit to train on"}
    print(said[verdict])
    return 1 if verdict == "fail" else 0


@command(app)
def launch(
    run: RunFile,
    engine: Annotated[str, typer.Option(help="slurm, k8s, ray, torchrun or local.", show_default=False)],
    settings: Set = None,
    run_dir: Annotated[Path | None, typer.Option(help="Where the run is kept, on the machines. Default: runs/NAME.")] = None,
    nodes: Annotated[int | None, typer.Option(help="Nodes. Default: what the run's cluster needs.")] = None,
    ranks_per_node: Annotated[int | None, typer.Option(help="Or the ranks of each node.")] = None,
    gpus_per_node: Annotated[int | None, typer.Option(min=0, help="Default: one a rank, if the run is for GPUs.")] = None,
    cpus_per_node: Annotated[int | None, typer.Option(min=1, help="Processors of each node to ask for.")] = None,
    hours: Annotated[
        float | None, typer.Option(min=0.0, help="slurm: time limit; before it ends the run saves and queues.")
    ] = None,
    partition: Annotated[str | None, typer.Option(help="slurm: where to queue.")] = None,
    account: Annotated[str | None, typer.Option(help="slurm: who pays.")] = None,
    image: Annotated[str | None, typer.Option(help="k8s: container image with Megalith.")] = None,
    namespace: Annotated[str | None, typer.Option(help="k8s: where the JobSet is made.")] = None,
    volume: Annotated[str | None, typer.Option(help="k8s: a claim that all pods mount at /shared.")] = None,
    workdir: Annotated[str | None, typer.Option(help="Folder on the machines that paths are relative to.")] = None,
    restarts: Annotated[int | None, typer.Option(min=0, help="Of the whole job, by the engine. Default: 20.")] = None,
    grace: Annotated[int | None, typer.Option(min=1, help="Seconds to save before the end. Default: 300.")] = None,
    environment: Annotated[list[str] | None, typer.Option("--env", metavar="NAME=VALUE", help="May be repeated.")] = None,
    show: Annotated[bool, typer.Option("--print", help="Print what would be written. So without --out.")] = False,
    out: Annotated[str | None, typer.Option(metavar="PATH", help="Write it to this file, or into this folder.")] = None,
    submit: Annotated[
        bool, typer.Option("--submit", help="Hand it to the engine; written to the run folder if --out is not given.")
    ] = False,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> int:
    """Write what an engine needs to start a run: a batch script, a JobSet, a job. Only --submit starts it.

    The run is checked first; exit status 2 if it, or how it is launched, is wrong.

    Example:  megalith launch run.toml --engine slurm --nodes 2 --hours 24 --submit
    """
    from megalith.fleet.engines import ENGINES  # see verbs()

    one_of("--engine", engine, *ENGINES)
    if submit and engine == "torchrun":
        raise typer.BadParameter("--submit: nothing takes a script for torchrun. Use --out, and start it on every node.")
    options = {
        "nodes": nodes, "ranks_per_node": ranks_per_node, "gpus_per_node": gpus_per_node, "cpus_per_node": cpus_per_node,
        "hours": hours, "partition": partition, "account": account, "image": image, "namespace": namespace, "volume": volume,
        "workdir": workdir, "restarts": restarts, "grace": grace, "environment": variables_of(environment),
    }  # fmt: skip
    artefact, advice = verbs().launch(run, engine=engine, overrides=settings or (), run_dir=run_dir, options=options)
    if submit and out is None:
        out = f"{run_dir or Path('runs') / artefact.file.partition('.')[0]}/"
    path = None if out is None else Path(out, artefact.file if out.endswith("/") or Path(out).is_dir() else "")
    command = artefact.submit.replace(artefact.file, str(path)) if path else artefact.submit
    text = artefact.text.replace(artefact.submit, command)
    if path:
        write(text, path, overwrite=overwrite or (submit and path.parent == run_dir))
    if as_json:
        rows = verbs().problem_rows(advice)
        say({"ok": True, "file": str(path) if path else artefact.file, "text": text, "submit": command, "problems": rows})
        return verbs().submit(command) if submit else 0
    if show or not path:
        print(text, end="")
    if advice:
        say_problems(advice, as_json=False)
    said = f"written: {path}" if path else f"not written. Add --out {artefact.file}"
    start = "" if submit else f"\nstart it with: {command}"
    Console(stderr=path is None, soft_wrap=True, highlight=False).print(escape(f"{said}{start}"))
    return verbs().submit(command) if submit else 0


def variables_of(settings: list[str] | None) -> dict[str, str] | None:
    """NAME=VALUE, as often as there are. Raises a usage error for anything else."""
    if wrong := [text for text in settings or () if "=" not in text]:
        raise typer.BadParameter(f"--env {wrong[0]} has no value. Write --env {wrong[0]}=VALUE.")
    return {name: value for name, _, value in (text.partition("=") for text in settings)} if settings else None


def write(text: str, path: Path, *, overwrite: bool) -> None:
    """Write a file that people will look for; one that holds something else is left alone unless told otherwise."""
    if not overwrite and path.exists() and path.read_text(encoding="utf-8", errors="replace") != text:
        raise FileExistsError(f"{path} is there already and holds something else. Use --overwrite, or another --out.")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


@command(data_app, "prepare")
def data_prepare(
    sources: Sources,
    tokenizer: Annotated[str, typer.Option(help="A tokenizer.json, a folder with one, or bytes.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The folder to write.", show_default=False)],
    split: Split = None,
    field: Field = "text",
    extensions: Extensions = None,
    validation: Annotated[float, typer.Option(min=0.0, max=0.99, help="Share of each domain's documents to hold out.")] = 0.01,
    shard_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a shard.")] = 100_000_000,
    seed: Annotated[int, typer.Option(help="Chooses the held-out documents.")] = 0,
    end_of_text: Annotated[str | None, typer.Option(help="The token that ends a document.")] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Turn text into shards of tokens. Each source, or DOMAIN=PATH, is a domain that a run can weigh.

    Example:  megalith data prepare novels=texts/ code=src/ --tokenizer data/tokenizer --out data/mixed
    """
    manifest = verbs().prepare_data(
        sources,
        tokenizer=tokenizer,
        out=out,
        end_of_text=end_of_text,
        reading=reading(split, field, extensions),
        options={"validation": validation, "shard_tokens": shard_tokens, "seed": seed, "overwrite": overwrite},
        progress=not as_json,
    )
    if as_json:
        say({"ok": True, "folder": str(out), "sha256": manifest.sha256, "manifest": manifest.model_dump(mode="json")})
        return
    for name, domain in manifest.domains.items():
        print(f"{name}: {domain.train.tokens:,} training tokens, {domain.validation.tokens:,} held out")
    print(f"prepared: {out}")


@command(data_app, "inspect")
def data_inspect(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Prepared data.", show_default=False)],
    samples: Annotated[int, typer.Option(min=0, help="Documents of each domain to show the beginning of.")] = 3,
    as_json: Json = False,
) -> None:
    """Show what prepared data holds: tokens, documents and their lengths, by domain.

    Example:  megalith data inspect data/austen
    """
    found = verbs().inspect_data(folder, samples=samples)
    if as_json:
        say({"ok": True} | found)
        return
    table = Table("domain", "split", "tokens", "documents", "bytes a token", "median document")
    for name, domain in found["domains"].items():
        for part in ("train", "validation"):
            row = domain[part]
            density, median = row["bytes_per_token"], row["document_tokens"].get("median")
            counts = (f"{row['tokens']:,}", f"{row['documents']:,}")
            table.add_row(name, part, *counts, f"{density:.2f}" if density else "-", f"{median:,.0f} tokens" if median else "-")
    console = Console(highlight=False)
    vocab, digest = found["tokenizer"]["vocab_size"], found["manifest_sha256"]
    console.print(f"{found['folder']}: a vocabulary of {vocab:,} tokens, manifest {digest}", soft_wrap=True)
    console.print(table)
    for name, domain in found["domains"].items():
        for text in domain["train"]["samples"]:
            console.print(f"[bold]{escape(name)}[/]  {escape(' '.join(text.split()))[:200]}")


@command(data_app, "verify")
def data_verify(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Prepared data.", show_default=False)], as_json: Json = False
) -> None:
    """Read all prepared data again and compare it with its digests; a damaged file is named.

    Example:  megalith data verify data/austen
    """
    manifest = verbs().verify_data(folder, progress=not as_json)
    say({"ok": True, "sha256": manifest.sha256}) if as_json else print(f"intact: {folder}, manifest {manifest.sha256}")


@command(tokenizer_app, "train")
def tokenizer_train(
    sources: Sources,
    vocab: Annotated[int, typer.Option(help="Tokens, such as 4096 for a few megabytes of text.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The folder to write tokenizer.json to.", show_default=False)],
    split: Split = None,
    field: Field = "text",
    extensions: Extensions = None,
    min_frequency: Annotated[int, typer.Option(min=1, help="Pairs seen less often are not merged.")] = 2,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Learn a byte-level BPE vocabulary from text.

    Example:  megalith tokenizer train bundled:austen --vocab 4096 --out data/tokenizer
    """
    learned = verbs().train_tokenizer(
        sources,
        vocab_size=vocab,
        out=out,
        reading=reading(split, field, extensions),
        min_frequency=min_frequency,
        overwrite=overwrite,
        progress=not as_json,
    )
    say({"ok": True} | learned) if as_json else print(f"trained: {out}, {learned['vocab_size']:,} tokens")


def reading(split: str | None, field: str, extensions: list[str] | None) -> dict[str, Any]:
    """How files become documents, as `data.manifest.Reading` takes it."""
    return {"split": split, "field": field, "extensions": tuple(extensions) if extensions else None}


def steps_of(text: str | None) -> str | None:
    """A range of steps, A:B. Raises a usage error for anything else."""
    first, _, last = (text or "1:2").partition(":")
    if not (first.isdecimal() and last.isdecimal() and 0 < int(first) < int(last)):
        raise typer.BadParameter(f"{text!r} is no range of steps. Write --profile 10:13 for steps 10, 11 and 12; the first is 1.")
    return text


def one_of(option: str, value: str, *known: str) -> None:
    """Raises a usage error for a value that is not known."""
    if value not in known:
        raise typer.BadParameter(f"{option} {value!r} is not known. Use {option} {' or '.join(known)}.")


def main() -> None:
    """The program."""
    sys.exit(app())


if __name__ == "__main__":
    main()
