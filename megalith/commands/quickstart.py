"""`megalith quickstart`: a first run, from text to a report."""

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from megalith.commands.shared.arguments import Json, Settings
from megalith.commands.shared.output import print_json

RECIPE = Path("recipes", "quickstart.toml")


def command(
    settings: Settings = None,
    run_dir: Annotated[Path, typer.Option(help="The folder of the run.")] = Path("runs/quickstart"),
    as_json: Json = False,
) -> int:
    """Train a small Llama on six novels of Jane Austen, generate text, and write a report: three minutes on two cores.

    Writes below the current directory: data/quickstart and runs/quickstart. Prints each command before it runs. Run the command again to
    resume after an interruption.

    Example:  megalith quickstart --set train.steps=600
    """
    for arguments in steps(recipe(), run_dir, settings or ()):
        print(f"$ megalith {shlex.join(arguments)}", file=sys.stderr if as_json else sys.stdout, flush=True)
        output = sys.stderr.fileno() if as_json else None
        done = subprocess.run([sys.executable, "-m", "megalith.cli", *arguments], check=False, stdout=output)
        if done.returncode:
            if as_json:
                print_json({"ok": False, "failed": arguments, "code": done.returncode})
            return done.returncode
    if as_json:
        print_json({"ok": True, "run_dir": str(run_dir), "report": str(run_dir / "report.html")})
    return 0


def steps(recipe: Path, run_dir: Path, settings: "list[str] | tuple[()]" = ()) -> list[list[str]]:
    """Return the arguments of each command of a first run, without the program's name."""
    tokenizer, tokens = "data/quickstart/tokenizer", "data/quickstart/tokens"
    sets = [word for setting in settings for word in ("--set", setting)]
    return [
        ["tokenizer", "train", "bundled:austen", "--vocab", "4096", "--out", tokenizer],
        ["data", "prepare", "bundled:austen", "--tokenizer", tokenizer, "--validation", "0.05", "--out", tokens],
        ["train", str(recipe), "--run-dir", str(run_dir), *sets],
        ["generate", str(run_dir), "--prompt", "It was a truth", "--tokens", "80"],
        ["report", str(run_dir)],
    ]


def recipe() -> Path:
    """Return the run file of the first run, from the installed package or from the source tree. Raises FileNotFoundError."""
    package = Path(__file__).parents[1]
    for root in (package, package.parent):
        if (root / RECIPE).is_file():
            return root / RECIPE
    raise FileNotFoundError(f"{package / RECIPE} is missing from the package. Install Megalith again.")
