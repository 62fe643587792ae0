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
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megalith import __version__

if TYPE_CHECKING:
    from megalith.spec.problem import Problem

BAD_SPECIFICATION = 2

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
        raise typer.Exit(1) from error
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
    show: Annotated[bool, typer.Option("--show", help="Print the whole run: every value and where it came from.")] = False,
    as_json: Json = False,
) -> int:
    """Find everything that is wrong with a run, or unwise, before anything starts.

    Needs no GPU and no torch. Exit status 2 if there are errors.

    Example:  megalith check run.toml --set plan.tensor=4 --ranks 8
    """
    checked = verbs().check(run, overrides=settings or (), world=ranks)
    status = BAD_SPECIFICATION if checked.errors else 0
    if as_json:
        rows = verbs().problem_rows(checked.problems)
        say({"ok": not checked.errors, "problems": rows} | verbs().described(checked.resolved))
        return status
    if show:
        from megalith.spec.files import dump  # see verbs()

        print(dump(checked.resolved))
    say_problems(checked.problems, as_json=False)
    if not checked.errors:
        spec, plan = checked.resolved.spec, checked.resolved.spec.plan
        ranks_of = f"{plan.ranks} rank{'s' * (plan.ranks > 1)}"
        print(
            f"{spec.name} is legal: {ranks_of} (data {plan.data} x tensor {plan.tensor} x pipeline {plan.pipeline}), "
            f"{spec.microbatches} microbatches a step, {spec.train.global_batch * spec.train.seq_len:,} tokens a step, "
            f"{spec.train.steps:,} steps"
        )
    return status


@command(app)
def train(
    run: RunFile,
    settings: Set = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Where the run is kept; one that is there goes on. Default: runs/NAME.")
    ] = None,
    profile: Annotated[str | None, typer.Option(metavar="A:B", help="Trace steps A to B-1 with torch.profiler.")] = None,
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
def parity(
    run: RunFile,
    settings: Set = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps to compare.")] = 3,
    run_dir: Annotated[Path | None, typer.Option(help="Where the ranks' logs go. Default: runs/NAME-parity.")] = None,
    as_json: Json = False,
) -> int:
    """Show that a plan changes nothing: a small model of the run's shape, trained under its plan and in one process, compared.

    Losses, gradients, gradient norm and weights after several steps, in fp32. Needs no data. Exit status 1 on any gap.

    Example:  megalith parity run.toml --set plan.tensor=2
    """
    found = verbs().parity(run, overrides=settings or (), steps=steps, run_dir=run_dir)
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
def report(run_dir: RunFolder, as_json: Json = False) -> None:
    """Show a run in short, and write its report.html again, from the files in its folder; also while it trains.

    Example:  megalith report runs/first
    """
    page = verbs().report(run_dir)
    if as_json:
        say({"ok": True, "report": str(page)})
        return
    Console().print(verbs().summary(run_dir))
    print(f"report: {page}")


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
    first, _, last = (text or "0:1").partition(":")
    if not (first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise typer.BadParameter(f"{text!r} is no range of steps. Write --profile 10:13 for steps 10, 11 and 12.")
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
