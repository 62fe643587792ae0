"""The program `megalith`, made of the commands in `megalith.commands`.

Exit status: 0 done; 1 something failed; 2 the run's description or the command line is wrong; training adds those of
`megalith.fleet.exit_codes`.
"""

import functools
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Annotated, Any

import typer

from megalith import __version__
from megalith.commands import (
    agent,
    campaign,
    check,
    clean,
    data,
    doctor,
    dryrun,
    export,
    generate,
    import_,
    key,
    launch,
    parity,
    plan,
    report,
    simulate,
    tokenizer,
    train,
    watch,
)
from megalith.commands.output import lossy_output, readable_errors

COMMANDS: dict[str, Callable[..., int | None]] = {
    "check": check.command,
    "train": train.command,
    "agent": agent.command,
    "key": key.command,
    "parity": parity.command,
    "dryrun": dryrun.command,
    "generate": generate.command,
    "export": export.command,
    "import": import_.command,
    "report": report.command,
    "watch": watch.command,
    "plan": plan.command,
    "simulate": simulate.command,
    "campaign": campaign.command,
    "doctor": doctor.command,
    "clean": clean.command,
    "launch": launch.command,
    "data prepare": data.prepare,
    "data inspect": data.inspect,
    "data verify": data.verify,
    "tokenizer train": tokenizer.train,
}
"""As it is typed -> a function with typer's annotations: its docstring is the help, its result the exit status (None: 0)."""

GROUPS = {
    "data": "Prepare text for training, and look at what was prepared.",
    "tokenizer": "Make tokenizers.",
}
"""A first word that several commands share -> its help."""

LONG = frozenset({"train", "agent", "campaign"})
"""Commands whose work goes on when nobody can read their output any more. Others end then, as programs in a pipe do."""

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


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Train large language models, from a laptop's CPU to a cluster: check, train, resume, generate, export."""
    if version:
        print(f"megalith {__version__}")
        raise typer.Exit


def _run(function: Callable[..., int | None], *, long: bool) -> Callable[..., None]:
    """Return a command that exits with the status its function returns, and prints its errors without a traceback."""

    @functools.wraps(function)
    def run(**arguments: Any) -> None:
        with ExitStack() as stack:
            if long:
                stack.enter_context(lossy_output())
            stack.enter_context(readable_errors(as_json=arguments["as_json"]))
            raise typer.Exit(function(**arguments) or 0)

    return run


def _add_commands() -> None:
    """Add all commands to the program."""
    groups = {name: typer.Typer(help=text, no_args_is_help=True) for name, text in GROUPS.items()}
    for name, group in groups.items():
        app.add_typer(group, name=name)
    for words, function in COMMANDS.items():
        first, _, last = words.rpartition(" ")
        groups.get(first, app).command(last)(_run(function, long=words in LONG))


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
