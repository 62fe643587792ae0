"""The program `megalith`, made of the commands in `megalith.commands`.

The exit status is 0 if all is done, 1 if something failed, 2 if the run's description or the command line is wrong. Training adds
the statuses in `megalith.fleet.exit_codes`.
"""

import functools
import os
import re
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from megalith import __version__
from megalith.commands import (
    advise,
    agent,
    campaign,
    check,
    clean,
    coordcheck,
    data,
    doctor,
    dryrun,
    evaluate,
    export,
    generate,
    import_,
    init,
    key,
    launch,
    models,
    parity,
    plan,
    quickstart,
    report,
    simulate,
    tokenizer,
    train,
    watch,
)
from megalith.commands.shared.output import lossy_output, readable_errors
from megalith.commands.sites import replay

COMMANDS: dict[str, Callable[..., int | None]] = {
    "init": init.command,
    "models": models.command,
    "quickstart": quickstart.command,
    "check": check.command,
    "train": train.command,
    "resume": train.resume,
    "agent": agent.command,
    "key": key.command,
    "parity": parity.command,
    "dryrun": dryrun.command,
    "generate": generate.command,
    "eval": evaluate.command,
    "export": export.command,
    "import": import_.command,
    "replay": replay.command,
    "report": report.command,
    "watch": watch.command,
    "plan": plan.command,
    "simulate": simulate.command,
    "campaign": campaign.command,
    "doctor": doctor.command,
    "clean": clean.command,
    "launch": launch.command,
    "advise batch": advise.batch,
    "coordcheck": coordcheck.command,
    "data prepare": data.prepare,
    "data inspect": data.inspect,
    "data verify": data.verify,
    "tokenizer train": tokenizer.train,
}
"""Map from each command, as typed, to a function with typer's annotations. The function's docstring is the command's help, and
its return value is the exit status (None: 0)."""

GROUPS = {
    "advise": "Measure which settings suit a run, starting from its checkpoints.",
    "data": "Prepare text for training, and inspect prepared data.",
    "tokenizer": "Make tokenizers.",
}
"""Map from a first word that several commands share to its help text."""

LONG = frozenset({"train", "resume", "replay", "agent", "campaign", "quickstart", "advise batch"})
"""Commands that continue after their output is closed. Other commands end when their output is closed, as programs in a pipe do."""

VERBS = {
    "run": "train",
    "fit": "train",
    "pretrain": "train",
    "finetune": "train",
    "start": "train",
    "continue": "resume",
    "validate": "check",
    "lint": "check",
    "evaluate": "eval",
    "test": "eval",
    "sample": "generate",
    "infer": "generate",
    "inference": "generate",
    "chat": "generate",
    "convert": "import",
    "prepare": "data prepare",
    "preprocess": "data prepare",
    "tokenize": "data prepare",
    "info": "doctor",
    "env": "doctor",
    "new": "init",
    "create": "init",
    "config": "init",
    "presets": "models",
    "list": "models",
    "estimate": "plan",
    "dry-run": "dryrun",
}
"""Map from commands of other programs to the megalith command that does the same."""


class Group(TyperGroup):
    """The commands. Shows, for a command's name in another program, an error that names the megalith command."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        word = args[0] if args else ""
        if word in VERBS and word not in self.commands:
            ctx.fail(f"No such command {word!r}. Use `megalith {VERBS[word]}`.")
        return super().resolve_command(ctx, args)


class Command(TyperCommand):
    """A command. Shows, for an unknown option that is a key of a run file, an error that says how to set this key."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            options = {name for each in self.params for name in each.opts}
            word = str(getattr(error, "option_name", ""))
            settable = type(error).__name__ == "NoSuchOption" and "--set" in options
            if settable and (way_out := _setting(word, clusters="--cluster" in options)):
                ctx.fail(way_out)
            raise


def _setting(option: str, *, clusters: bool) -> str | None:
    """Return advice that names the key of a run file for an unknown option such as "--steps"; None if no key matches. `clusters`:
    the command has the option --cluster NAME:DEVICES, which also sets the number of devices."""
    from megalith.spec.foreign_names import RANKS, meaning  # specifications take 0.2 s to import
    from megalith.spec.validate import keys_named

    word = option.lstrip("-").replace("-", "_")
    found = meaning(word)
    if clusters and found is not None and found.note == RANKS:
        return f"No such option: {option}. Write --cluster NAME:DEVICES, such as --cluster h100:16 for two nodes of eight."
    if found is not None:
        return f"No such option: {option}. " + (
            f"Write --set {found.key}=VALUE: {found.note}".rstrip(": ") if found.key else found.note
        )
    known = keys_named(word)
    return f"No such option: {option}. Write --set {' or --set '.join(f'{key}=VALUE' for key in known)}." if known else None


app = typer.Typer(
    cls=Group,
    name="megalith",
    help="Train large language models, from a laptop's CPU to a cluster: check, train, resume, generate, export.",
    epilog="A first run: megalith quickstart. Help on a command: megalith COMMAND --help.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Train large language models, from a laptop's CPU to a cluster: check, train, resume, generate, export."""
    if version:
        print(f"megalith {__version__}")
        raise typer.Exit


def _run(function: Callable[..., int | None], *, long: bool) -> Callable[..., None]:
    """Return a command that exits with the status that its function returns, and that prints errors without a traceback."""

    @functools.wraps(function)
    def run(**arguments: Any) -> None:
        with ExitStack() as stack:
            if long:
                stack.enter_context(lossy_output())
            stack.enter_context(readable_errors(as_json=arguments["as_json"]))
            raise typer.Exit(function(**arguments) or 0)

    run.__doc__ = re.sub(r"\[(?=[a-z])", r"\\[", function.__doc__ or "")  # a table such as [model] is no markup of rich
    return run


def _add_commands() -> None:
    groups = {name: typer.Typer(help=text, no_args_is_help=True) for name, text in GROUPS.items()}
    for name, group in groups.items():
        app.add_typer(group, name=name)
    for words, function in COMMANDS.items():
        first, _, last = words.rpartition(" ")
        groups.get(first, app).command(last, cls=Command)(_run(function, long=words in LONG))


_add_commands()


def main() -> None:
    """Run the program."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # closed (`>&-`): the next file that is opened would get its number, and what is printed
            os.open(os.devnull, os.O_RDWR)
    sys.exit(app())


if __name__ == "__main__":
    main()
