"""The command line: starts fast and without torch, says every problem plainly, prints JSON for programs."""

import errno
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner, Result

from megalith import __version__, verbs
from megalith.cli import app
from megalith.machine.health import Finding
from tests.patience import PATIENCE
from tests.prepared import hollow_data


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[list[str]]:
    """Every command of a program, as it is typed."""
    for name, one in group.commands.items():
        here = (*path, name)
        yield from commands(one, here) if hasattr(one, "commands") else [[*here]]


COMMANDS = list(commands(get_command(app)))
RUN = """
name = "first"
model.preset = "tiny"
data.path = "data"
train = { steps = 100, global_batch = 64, seq_len = 128 }
optimizer.warmup = 10
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("MEGALITH_TRACEBACK", raising=False)
    Path("run.toml").write_text(RUN)
    hollow_data(Path("data"), "austen")
    return tmp_path


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize(("code", "status"), [(errno.ESTALE, 71), (errno.ENOSPC, 71), (errno.EACCES, 1)])
def test_storage_that_may_be_back_is_worth_another_try(code: int, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(*given: Any, **more: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(verbs, "train", train)
    result = call("train", "run.toml")
    assert result.exit_code == status
    assert os.strerror(code) in result.output


def python(code: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(Path(verbs.__file__).parents[1])}
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


@pytest.mark.parametrize(
    ("arguments", "status"),
    [(["--help"], 0), (["train", "--help"], 0), (["check", "run.toml"], 0), (["check", "run.toml", "--set", "plan.tensor=3"], 2)],
)
def test_help_and_check_do_without_torch(arguments: list[str], status: int):
    done = python(NO_TORCH.format(arguments=arguments, without=HEAVY))
    assert done.returncode == status, done.stderr


def test_refusing_to_train_does_without_torch():
    done = python(NO_TORCH.format(arguments=["train", "run.toml", "--set", "plan.tensor=3"], without=HEAVY))
    assert done.returncode == 2, done.stderr
    assert "does not divide vocab" in done.stderr


def test_help_takes_little_time():
    """Nothing heavy is imported for it: torch alone takes seconds. The best of three, for a machine that has other work."""

    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert python("from megalith.cli import app; app(['--help'])").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(seconds() for _ in range(3)) < 1.2


def test_the_version_is_printed():
    assert call("--version").stdout == f"megalith {__version__}\n"


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_commands_help_has_an_example_and_json(command: list[str]):
    result = call(*command, "--help")
    assert result.exit_code == 0
    assert re.search(rf"Example:  (torchrun .* -m )?megalith(\.cli)? {' '.join(command)}", result.stdout)
    assert "--json" in result.stdout


def test_a_legal_run_is_described():
    result = call("check", "run.toml", "--set", "plan.data=2")
    assert result.exit_code == 0
    assert (
        "first is legal: 2 ranks (data 2 x tensor 1 x pipeline 1), 32 microbatches a step, 8,192 tokens a step" in result.stdout
    )


def test_an_illegal_run_names_every_problem_and_has_no_traceback():
    result = call("check", "run.toml", "--set", "plan.tensor=3", "--set", "train.global_batch=5", "--set", "plan.data=2")
    assert result.exit_code == 2
    for said in ("plan.tensor = 3", "command line", "Use tensor = 1, 2 or 4.", "train.global_batch = 5", "Use 4 or 6."):
        assert said in result.stderr
    assert "nothing was started" in result.stderr
    assert "Traceback" not in result.output


def test_problems_in_reading_the_file_are_said_the_same_way():
    result = call("train", "run.toml", "--set", "train.stepz=1", "--set", "model.preset=tinny")
    assert result.exit_code == 2
    assert "Did you mean train.steps?" in result.stderr
    assert 'Did you mean "tiny"?' in result.stderr


def test_show_prints_every_value_and_its_origin():
    shown = call("check", "run.toml", "--show", "--set", "train.steps=9").stdout
    assert "# command line" in shown
    assert "# preset tiny" in shown
    assert "[optimizer]" in shown


@pytest.mark.parametrize("setting", ["plan.tensor=3", "plan.tensr=3"])
def test_check_speaks_json(setting: str):
    result = call("check", "run.toml", "--json", "--set", setting)
    said = json.loads(result.stdout)
    assert result.exit_code == 2
    assert said["ok"] is False
    assert {"severity", "key", "value", "reason", "way_out", "source"} == set(said["problems"][0])
    assert said["problems"][0]["source"] == "command line"


def test_check_says_the_whole_run_as_json():
    said = json.loads(call("check", "run.toml", "--json").stdout)
    assert said["ok"] is True
    assert said["spec"]["train"]["steps"] == 100
    assert said["provenance"]["model.dim"] == "preset tiny"


def test_markup_in_values_is_printed_as_it_stands():
    assert 'name = "[bold]x[/]"' in call("check", "run.toml", "--show", "--set", 'name="[bold]x[/]"').stdout
    assert "[red]x" in call("check", "run.toml", "--set", "cluster=[red]x").stderr


@pytest.mark.parametrize("as_json", [False, True])
def test_training_ends_with_the_runs_exit_status(monkeypatch: pytest.MonkeyPatch, as_json: bool):
    given: dict[str, Any] = {}

    def train(path: Path, **options: Any) -> verbs.Trained:
        given.update(options, path=path)
        return verbs.Trained(Path("runs/first"), 75, "stopped as asked", Path("runs/first/report.html"))

    monkeypatch.setattr(verbs, "train", train)
    options = ["--run-dir", "here", "--profile", "2:4", "--set", "a=1", "--set", "b=2", *(["--json"] if as_json else [])]
    result = call("train", "run.toml", *options)
    assert result.exit_code == 75
    assert (given["run_dir"], given["profile"], given["overrides"]) == (Path("here"), "2:4", ["a=1", "b=2"])
    if as_json:
        assert json.loads(result.stdout)["code"] == 75
    else:
        assert "stopped as asked" in result.stderr
        assert "report: runs/first/report.html" in result.stdout


def test_an_agent_ends_with_the_runs_exit_status_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(verbs, "agent", lambda path, **_: verbs.Trained(Path("runs/first"), 75, "stopped as asked", None))
    told = call("agent", "run.toml", "--json")
    assert (told.exit_code, json.loads(told.stdout)["code"], json.loads(told.stdout)["ok"]) == (75, 75, False)
    assert "stopped as asked" in call("agent", "run.toml").stderr


@pytest.mark.parametrize("steps", ["3", "5:5", "a:b", "4:2", "0:2"])
def test_a_profile_that_is_no_range_is_a_usage_error(steps: str):
    result = call("train", "run.toml", "--profile", steps)
    assert result.exit_code == 2
    assert "no range of steps" in result.stderr


@pytest.mark.parametrize(("equal", "status"), [(True, 0), (False, 1)])
def test_parity_fails_on_a_gap(monkeypatch: pytest.MonkeyPatch, equal: bool, status: int):
    row = {"quantity": "loss", "gap": 0.25, "limit": 1e-5, "where": "step 1", "equal": equal}
    monkeypatch.setattr(verbs, "parity", lambda path, **options: {"equal": equal, "rows": [row], "steps": options["steps"]})
    result = call("parity", "run.toml", "--steps", "2")
    assert result.exit_code == status
    assert ("NOT equal" in result.stdout) == (not equal)
    assert json.loads(call("parity", "run.toml", "--json", "--steps", "2").stdout)["steps"] == 2


def test_generate_passes_its_choices_on(monkeypatch: pytest.MonkeyPatch):
    given: dict[str, Any] = {}

    def generate(run_dir: Path, **options: Any) -> str:
        given.update(options)
        return "It is a truth"

    monkeypatch.setattr(verbs, "generate", generate)
    result = call("generate", "runs/first", "--prompt", "It is", "--tokens", "5", "--top-k", "3", "--seed", "4", "--greedy")
    assert result.stdout == "It is a truth\n"
    assert given == {
        "prompt": "It is", "tokens": 5, "temperature": 0.8, "top_k": 3, "top_p": None, "seed": 4, "greedy": True, "step": None
    }  # fmt: skip
    assert json.loads(call("generate", "runs/first", "--json").stdout)["text"] == "It is a truth"


def test_a_format_that_is_not_known_is_a_usage_error():
    assert call("export", "runs/first", "--to", "gguf", "--out", "x").exit_code == 2
    assert call("import", "folder", "--from", "gguf", "--out", "x").exit_code == 2


@pytest.mark.parametrize("as_json", [False, True])
def test_a_failure_is_one_line_and_status_1(as_json: bool):
    result = call("report", "nowhere", *(["--json"] if as_json else []))
    assert result.exit_code == 1
    assert "Traceback" not in result.output
    if as_json:
        assert json.loads(result.stdout)["kind"] == "FileNotFoundError"
    else:
        assert "nowhere holds no run.toml" in result.stderr


def test_a_mistake_in_the_program_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch):
    def broken(*_: Any, **__: Any) -> None:
        raise TypeError("ours")

    monkeypatch.setattr(verbs, "report", broken)
    assert isinstance(call("report", "nowhere").exception, TypeError)


def test_a_failures_traceback_can_be_asked_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MEGALITH_TRACEBACK", "1")
    assert isinstance(call("report", "nowhere").exception, FileNotFoundError)


def test_text_becomes_data_that_a_run_can_use():
    """Tokenizer, data, inspection, verification and a check, as a newcomer types them."""
    Path("novels.txt").write_text("\n\n".join(f"It is a truth universally acknowledged, number {n}." for n in range(400)))
    assert "trained: tok" in call("tokenizer", "train", "novels.txt", "--vocab", "300", "--out", "tok").stdout
    prepare = ["novels.txt", "--tokenizer", "tok", "--out", "data/novels", "--split", "line", "--validation", "0.1"]
    assert "training tokens" in call("data", "prepare", *prepare).stdout
    assert json.loads(call("data", "inspect", "data/novels", "--json").stdout)["domains"].keys() == {"novels"}
    assert "novels" in call("data", "inspect", "data/novels").stdout
    assert call("data", "verify", "data/novels").stdout.startswith("intact: data/novels")
    settings = ["--set", "data.path=data/novels", "--set", "train.steps=10"]
    assert call("check", "run.toml", *settings).exit_code == 0
    assert "Did you mean novels?" in call("check", "run.toml", *settings, "--set", "data.weights.novel=1").stderr


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


def proven(outcome: str, name: str = "dense; data 2 shards") -> dict[str, Any]:
    row = {"quantity": "loss", "gap": 0.25, "limit": 1e-5, "where": "step 1", "equal": outcome == "equal"}
    tokens, error = (3, "") if outcome == "tie" else (0, "Traceback\nrank 1 [broke]" if outcome == "failed" else "")
    return {"name": name, "ranks": 2, "outcome": outcome, "tokens_tied": tokens, "rows": [] if error else [row], "error": error}


@pytest.mark.parametrize(
    ("outcomes", "status", "said"),
    [
        (["equal", "equal"], 0, "equal: 2 combinations (seed 7, up to 2 ranks) as in one process"),
        (["equal", "NOT equal"], 1, "NOT equal: 1 of 2 combinations"),
        (["equal", "failed"], 1, "rank 1 [broke]"),
        (["equal", "tie", "equal"], 0, "1 tied, and counts for nothing"),
        (["equal", "tie"], 1, "not shown: there were 1 combinations to compare, and 2 were asked for"),
    ],
    ids=str,
)
def test_draws_fail_on_a_gap_and_do_not_count_ties(monkeypatch: pytest.MonkeyPatch, outcomes: list[str], status: int, said: str):
    def parity_of_draws(count: int, *, seed: int, starting: Any, ended: Any) -> dict[str, Any]:
        for outcome in outcomes:
            starting("dense", 2)
            ended(outcome)
        counts = {word: outcomes.count(word) for word in ("equal", "tie", "NOT equal", "failed")}
        return {
            "equal": counts["equal"] == count,
            "asked": count,
            "seed": seed,
            "outcomes": counts,
            "cases": [*map(proven, outcomes)],
        }

    monkeypatch.setattr(verbs, "parity_of_draws", parity_of_draws)
    result = call("parity", "--random", "2", "--seed", "7")
    assert result.exit_code == status
    assert said in result.stdout
    assert "1/2  dense on 2 ranks: equal" in result.stderr
    assert json.loads(call("parity", "--random", "2", "--json").stdout)["ok"] == (status == 0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run.toml", "--random", "2", "--steps", "1"], "makes no use of RUN.toml or --steps"),
        ([], "Name a run"),
        (["run.toml", "--seed", "2"], "--seed chooses the draws of --random"),
    ],
)
def test_parity_of_a_run_and_of_draws_do_not_mix(arguments: list[str], said: str):
    result = call("parity", *arguments)
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())


SIMULATE = ["simulate", "--cluster", "h100:64", "--days", "5", "--seeds", "2"]


def test_a_simulation_is_a_table_a_picture_and_json():
    result = call(*SIMULATE, "--out", "pictures/goodput.svg")
    assert result.exit_code == 0, result.output
    assert "8 nodes and 1 spare, a checkpoint every 30 minutes, 2 seeds" in result.stdout
    assert "useful" in result.stdout
    assert Path("pictures/goodput.svg").read_text().startswith("<svg xmlns")
    said = json.loads(call(*SIMULATE, "--json").stdout)
    assert sum(said["seconds"].values()) == pytest.approx(5 * 86_400)
    assert f"goodput {said['goodput']:.1%}" in result.stdout


def test_too_few_spares_are_said():
    assert (
        "0 spares are too few"
        in call("simulate", "--cluster", "h100:1024", "--days", "20", "--seeds", "1", "--spares", "0").stdout
    )


@pytest.mark.parametrize(("what", "best"), [("spares", "per_device"), ("intervals", "goodput")])
def test_a_sweep_marks_the_best(what: str, best: str):
    tried = json.loads(call(*SIMULATE, "--sweep", what, "--json").stdout)["tried"]
    shown = next(line for line in call(*SIMULATE, "--sweep", what, "--out", "s.svg").stdout.splitlines() if "best" in line)
    winner = max(tried, key=lambda one: one[best])["value"] / (60 if what == "intervals" else 1)
    assert shown.split()[1] == f"{winner:g}"
    assert Path("s.svg").stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--cluster", "h10:16"], "Did you mean 'h100'?"),
        (["--cluster", "h100", "--days", "0"], "days = 0.0 command line it must be more than 0"),
        (["--cluster", "h100", "--checkpoint-every", "-5"], "checkpoint_every = -5.0 command line it must be more than 0"),
        (["--cluster", "h100", "--profile", "hot"], "it must be 'cold', 'warm' or 'memory'"),
        (["--campaign", "runs", "--days", "3", "--set", "planned=1"], "Leave out --set, --days, or --campaign."),
        (["--cluster", "h100", "--sweep", "spare"], "Use --sweep intervals or spares"),
        (["--cluster", "h100", "--out", "goodput.png"], "ends in .svg"),
        ([], "Give --cluster, a RUN.toml that names one, or --campaign to play one again."),
    ],
)
def test_mistakes_about_a_simulation_are_said_before_it_runs(arguments: list[str], said: str):
    result = call("simulate", *arguments)
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())


@pytest.mark.parametrize(("verdict", "status"), [("ok", 0), ("warn", 0), ("fail", 1)])
def test_the_doctors_status_is_the_worst_finding(monkeypatch: pytest.MonkeyPatch, verdict: Any, status: int):
    findings = [Finding("memory", "ok", "4 GiB", "at least 2 GiB"), Finding("clock", verdict, "off", "at most 1 s", "Set [it]")]
    monkeypatch.setattr(verbs, "doctor", lambda folder, burn_in, ranks: findings)
    result = call("doctor")
    assert result.exit_code == status
    assert "Set [it]" in result.stdout
    assert ("NOT fit" in result.stdout) == (status == 1)
    said = json.loads(call("doctor", "--json").stdout)
    assert (said["ok"], said["worst"], len(said["findings"])) == (status == 0, verdict, 2)


LAUNCH = ["launch", "run.toml", "--engine", "slurm", "--set", "plan.data=4", "--nodes", "2"]


def test_a_launch_file_is_shown_or_written_and_its_command_told():
    shown = call(*LAUNCH)
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.startswith("#!/bin/bash\n#SBATCH --job-name=first\n#SBATCH --nodes=2\n")
    assert "start it with: sbatch first.sbatch" in shown.stderr
    wrote = call(*LAUNCH, "--out", "jobs/")
    assert "start it with: sbatch jobs/first.sbatch" in wrote.stdout
    assert Path("jobs/first.sbatch").read_text() == shown.stdout
    assert json.loads(call(*LAUNCH, "--json").stdout)["text"] == shown.stdout


def test_a_launch_is_handed_to_its_engine_when_asked(monkeypatch):
    handed: list[str] = []
    monkeypatch.setattr(verbs, "submit", lambda command: handed.append(command) or 7)
    result = call(*LAUNCH, "--submit", "--run-dir", "runs/x")
    assert (result.exit_code, handed) == (7, ["sbatch runs/x/first.sbatch"]), result.output
    assert Path("runs/x/first.sbatch").read_text().startswith("#!/bin/bash\n#SBATCH --job-name=first\n")
    assert call("launch", "run.toml", "--engine", "torchrun", "--nodes", "1", "--submit").exit_code == 2


def test_a_launch_file_does_not_replace_another_file_unasked():
    result = call(*LAUNCH, "--out", "run.toml")
    assert result.exit_code == 1
    assert "Use --overwrite" in result.stderr
    assert Path("run.toml").read_text() == RUN
    assert call(*LAUNCH, "--out", "a.sbatch").exit_code == call(*LAUNCH, "--out", "a.sbatch").exit_code == 0
    assert call(*LAUNCH, "--out", "a.sbatch", "--hours", "2").exit_code == 1
    assert call(*LAUNCH, "--out", "a.sbatch", "--hours", "2", "--overwrite").exit_code == 0


def test_all_that_is_wrong_with_a_launch_is_said_at_once():
    result = call(*LAUNCH, "--set", "plan.tensor=3", "--image", "x", "--ranks-per-node", "5")
    assert result.exit_code == 2
    for said in ("plan.tensor = 3", '--image = "x"', "2 nodes of 5 ranks make 10, and the plan has 12"):
        assert said in result.stderr


@pytest.mark.parametrize(("option", "said"), [(["--env", "A"], "--env A=VALUE"), (["--engine", "slrum"], "torchrun or slurm")])
def test_a_launch_that_cannot_be_read_is_a_usage_error(option: list[str], said: str):
    result = call(*LAUNCH, *option)
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())
