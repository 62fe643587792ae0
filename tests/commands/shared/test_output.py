"""Problems and failures are printed plainly, or as JSON."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import typer

from megalith.commands import report, train
from megalith.commands.shared.output import print_json, print_problems, readable_errors
from megalith.spec.problem import Problem, SpecErrors
from tests.commands.calling import call


@pytest.mark.parametrize(("code", "status"), [(errno.ESTALE, 71), (errno.ENOSPC, 71), (errno.EACCES, 1)])
def test_storage_that_may_be_back_is_worth_another_try(code: int, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any, **more: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(train, "train", fails)
    result = call("train", "run.toml")
    assert result.exit_code == status
    assert os.strerror(code) in result.output


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


def test_markup_in_values_is_printed_as_it_stands():
    assert 'name = "[bold]x[/]"' in call("check", "run.toml", "--show", "--set", 'name="[bold]x[/]"').stdout
    assert "[red]x" in call("check", "run.toml", "--set", "cluster=[red]x").stderr


@pytest.mark.parametrize("as_json", [False, True])
def test_a_failure_is_one_line_and_status_1(as_json: bool):
    result = call("report", "nowhere", *(["--json"] if as_json else []))
    assert result.exit_code == 1
    assert "Traceback" not in result.output
    if as_json:
        assert json.loads(result.stdout)["kind"] == "FileNotFoundError"
    else:
        assert "nowhere is not a folder" in result.stderr
        assert "MEGALITH_TRACEBACK" not in result.stderr


def test_a_mistake_in_the_program_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch):
    def broken(*_: Any, **__: Any) -> None:
        raise TypeError("ours")

    monkeypatch.setattr(report, "report", broken)
    assert isinstance(call("report", "nowhere").exception, TypeError)


def test_a_failures_traceback_can_be_asked_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MEGALITH_TRACEBACK", "1")
    assert isinstance(call("report", "nowhere").exception, FileNotFoundError)


def test_errors_of_the_system_name_the_file_and_a_way_out(tmp_path: Path):
    (tmp_path / "file").touch()
    result = call(
        "launch", "run.toml", "--engine", "slurm", "--nodes", "1", "--out", str(tmp_path / "file" / "x"), "--set", "cluster=cpu"
    )
    assert result.exit_code == 1
    assert "Errno" not in result.output
    assert "file: Not a directory. A part of the path is a file." in result.stderr or "file: File exists" in result.stderr


def test_an_engine_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nowhere")
    result = call("launch", "run.toml", "--engine", "slurm", "--nodes", "1", "--submit", "--run-dir", "there")
    assert result.exit_code == 1
    assert "sbatch is not installed here" in result.stderr and "MEGALITH_TRACEBACK" not in result.stderr


def test_json_has_null_for_what_is_no_number(capsys: pytest.CaptureFixture[str]):
    print_json({"loss": float("nan"), "rows": [(1, float("inf"))]})
    assert json.loads(capsys.readouterr().out) == {"loss": None, "rows": [[1, None]]}


LONG = Problem("error", "train.steps", 3, "word " * 40, "Use " + "more " * 40, "command line")


def test_problems_in_a_pipe_are_not_padded_and_lines_stay_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.delenv("COLUMNS")
    print_problems([LONG, LONG], as_json=False)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 9
    assert not [line for line in lines if line != line.rstrip() and "word" not in line and "more" not in line]


@pytest.mark.parametrize("columns", [60, 80])
def test_problems_fit_the_columns_that_are_asked_for(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("COLUMNS", str(columns))
    print_problems([LONG], as_json=False)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 6 and max(map(len, lines)) <= columns


def test_a_name_of_a_hub_is_told_to_be_downloaded_first():
    result = call("import", "Qwen/Qwen3-0.6B", "--out", "there")
    assert result.exit_code == 1
    assert "hf download Qwen/Qwen3-0.6B --local-dir FOLDER" in result.stderr
    assert "hf download" not in call("import", "nowhere", "--out", "there").stderr


@pytest.mark.parametrize(
    ("rank", "local_rank", "here", "lists"), [(0, 0, False, True), (3, 1, False, False), (2, 0, False, True), (3, 1, True, False)]
)
def test_of_all_ranks_that_a_launcher_started_one_lists_the_problems(
    rank: int, local_rank: int, here: bool, lists: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Problems of a machine are listed by the machine's first rank, since the run's first rank may be on another machine."""
    _launched(monkeypatch, RANK=rank, WORLD_SIZE=4, LOCAL_RANK=local_rank, LOCAL_WORLD_SIZE=2)
    with pytest.raises(typer.Exit) as end, readable_errors(as_json=False):
        raise SpecErrors([Problem("error", "plan.zero", 9, "it must be 3 or less", "Use 3.")], here=here)
    assert end.value.exit_code == 2
    said = capsys.readouterr().err
    assert ("it must be 3 or less" in said) == lists
    assert lists or said == f"rank {rank} ends: the run has problems, which another rank lists\n"


def test_a_rank_of_another_launcher_fails_in_few_lines_with_the_place(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _launched(monkeypatch, RANK=1, WORLD_SIZE=2)
    with pytest.raises(typer.Exit) as end, readable_errors(as_json=False):
        raise ArithmeticError("\n".join(["step 2: not finite", *map(str, range(100))]))
    assert end.value.exit_code == 1
    first, cause, *rest = capsys.readouterr().err.splitlines()
    assert (first, cause) == ("rank 1 failed", "ArithmeticError: step 2: not finite")
    assert len(rest) <= 8 and "Traceback" not in rest and any("test_output.py" in line for line in rest)


def _launched(monkeypatch: pytest.MonkeyPatch, **variables: int) -> None:
    for name, value in {"MASTER_ADDR": "h", "MASTER_PORT": 1, **variables}.items():
        monkeypatch.setenv(name, str(value))
