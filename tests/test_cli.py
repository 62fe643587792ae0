"""The program starts fast and without torch, and every command shows an example."""

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import megalith
from megalith import __version__
from megalith.cli import COMMANDS, VERBS
from tests.commands.calling import call, write_run
from tests.patience import PATIENCE


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    write_run()
    return tmp_path


def python(code: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(Path(megalith.__file__).parents[1])}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, env=environment, check=False
    )


NO_TORCH = """
import sys
from megalith.cli import app
try:
    app({arguments})
except SystemExit as end:
    status = end.code
assert not {without} & set(sys.modules), "imported"
sys.exit(status)
"""


HEAVY = {"torch", "numpy"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "status"),
    [(["--help"], 0), (["train", "--help"], 0), (["check", "run.toml"], 0), (["check", "run.toml", "--set", "plan.tensor=3"], 2)],
)
def test_help_and_check_do_without_torch(arguments: list[str], status: int):
    done = python(NO_TORCH.format(arguments=arguments, without=HEAVY))
    assert done.returncode == status, done.stderr


@pytest.mark.slow
def test_refusing_to_train_does_without_torch():
    done = python(NO_TORCH.format(arguments=["train", "run.toml", "--set", "plan.tensor=3"], without=HEAVY))
    assert done.returncode == 2, done.stderr
    assert "does not divide vocab" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["simulate", "--cluster", "h100:16", "--days", "1", "--seeds", "1"],
        ["doctor", "--burn-in", "0"],
        ["launch", "run.toml", "--engine", "slurm", "--nodes", "1"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_what_needs_no_ranks_does_without_torch(arguments: list[str]):
    done = python(NO_TORCH.format(arguments=arguments, without={"torch"}))
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["--help"], ["export", "--help"], ["data", "prepare", "--help"]], ids=" ".join)
def test_help_reads_no_specification(arguments: list[str]):
    """Specifications are not imported, since that takes 0.2 s."""
    done = python(NO_TORCH.format(arguments=arguments, without=HEAVY | {"megalith.spec.run"}))
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_help_takes_little_time():
    """No heavy module is imported for the help; torch alone takes seconds. The processor time is compared with that of another program
    that prints its help with typer, so the machine's speed and load affect both."""

    def seconds(code: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert python(code).returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    other = "import typer; app = typer.Typer(); app.command()(lambda: None); app(['--help'])"
    assert min(seconds("from megalith.cli import app; app(['--help'])") / seconds(other) for _ in range(3)) < 2.5


def test_the_version_is_printed():
    assert call("--version").stdout == f"megalith {__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_commands_help_has_an_example_and_json(command: str):
    result = call(*command.split(), "--help")
    assert result.exit_code == 0
    assert re.search(rf"Example:  (torchrun .* -m )?megalith(\.cli)? {command}", result.stdout)
    assert "--json" in result.stdout
    assert set((COMMANDS[command].__doc__ or "").split()) <= set(result.stdout.split()), "words such as [model] are no markup"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "run.toml", "--steps", "10"], "Write --set train.steps=VALUE."),
        (["train", "run.toml", "--learning-rate", "1e-3"], "Write --set optimizer.lr=VALUE"),
        (["check", "run.toml", "--tp", "2"], "Write --set plan.tensor=VALUE"),
        (["train", "run.toml", "--output-dir", "x"], "--run-dir FOLDER"),
        (["check", "run.toml", "--gpus", "8"], "Write --set plan.data=VALUE"),
        (["simulate", "--nodes", "2048"], "Write --cluster NAME:DEVICES"),
        (["fit", "run.toml"], "Use `megalith train`"),
        (["sample"], "Use `megalith generate`"),
        (["generat"], "generate"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_words_of_other_programs_are_told_those_of_this_one(arguments: list[str], said: str):
    result = call(*arguments)
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.replace("│", " ").split())


def test_words_of_other_programs_name_commands_that_there_are_and_take_none_away():
    assert set(VERBS.values()) <= set(COMMANDS)
    assert not set(VERBS) & {words.partition(" ")[0] for words in COMMANDS}


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands_and_options(shell: str):
    words = {"bash": "megalith tr", "zsh": "megalith tr", "fish": "megalith tr"}[shell]
    extra = {"COMP_WORDS": words, "COMP_CWORD": "1", "_TYPER_COMPLETE_ARGS": words, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    environment = os.environ | extra | {"_MEGALITH_COMPLETE": f"complete_{shell}"}
    code = "import sys; sys.argv[0] = 'megalith'; from megalith.cli import app; app(prog_name='megalith')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, env=environment, check=False
    )
    assert "train" in done.stdout, done
    assert "parity" not in done.stdout
