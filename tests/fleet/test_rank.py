"""A rank's exit after the end of its entry."""

import json
import os

import pytest

from megalith.fleet.exit_codes import ExitCode
from megalith.fleet.heartbeat import Heartbeat
from megalith.fleet.rank import Assignment, call, resolve


class SizedError(RuntimeError):
    exit_code = 41


def raises(kind: str, code: int | str | None = None) -> None:
    kinds = {"exit": SystemExit(code), "value": ValueError("wrong"), "sized": SizedError("own status")}
    raise kinds[kind]


@pytest.fixture
def assignment(tmp_path):
    def make(entry: str, **arguments: object) -> Assignment:
        (tmp_path / "ranks").mkdir(exist_ok=True)
        return Assignment(
            entry, arguments, 2, 1, {"EXTRA": "1", "RANK": "9"}, str(tmp_path), "1f", [], 0, f"{tmp_path}/ranks", 1, here=[0, 1]
        )

    return make


@pytest.mark.parametrize(
    ("kind", "code", "status", "phase"),
    [
        ("exit", None, ExitCode.FINISHED, "stopped"),
        ("exit", 75, ExitCode.STOPPED, "stopped"),
        ("exit", 7, 7, "failed"),
        ("exit", "text", ExitCode.FAILED, "failed"),
        ("value", None, ExitCode.FAILED, "failed"),
        ("sized", None, 41, "failed"),
    ],
)
def test_what_is_raised_decides_the_exit_status(assignment, capsys, kind, code, status, phase):
    job, beats = assignment("tests.fleet.test_rank:raises", kind=kind, code=code), Heartbeat.find({})
    assert call(job, 1, beats) == status
    assert beats.read().phase == phase
    assert job.error(1).exists() == (phase == "failed")


def test_an_error_is_written_down_with_its_place(assignment, capsys):
    job = assignment("tests.fleet.test_rank:raises", kind="sized")
    call(job, 1, Heartbeat.find({}))
    record = json.loads(job.error(1).read_text())
    assert (record["type"], record["message"], record["phase"]) == ("tests.fleet.test_rank.SizedError", "own status", "run")
    assert "in raises" in record["traceback"]
    assert record["traceback"] in capsys.readouterr().err


def test_an_entry_that_does_not_exist_fails_while_importing(assignment, capsys):
    job = assignment("tests.fleet.no_such_module:f")
    assert call(job, 0, Heartbeat.find({})) == ExitCode.FAILED
    assert json.loads(job.error(0).read_text())["phase"] == "import"


def test_a_rank_knows_its_place_whatever_the_job_says(assignment, tmp_path):
    variables = assignment("a:b").variables(1)
    assert {name: variables[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "EXTRA")} == {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "EXTRA": "1",
    }
    assert variables["MEGALITH_STORE"] == f"file://{tmp_path}/ranks/store-1f"


def test_an_assignment_survives_its_file(assignment, tmp_path):
    job = assignment("a:b", numbers=[1, 2.5], nested={"x": None})
    job.save(tmp_path / "job.json")
    assert Assignment.load(tmp_path / "job.json") == job


def test_an_entry_is_found_by_name():
    assert resolve("os:getpid") is os.getpid
