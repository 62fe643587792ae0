"""What training starts, refuses, resumes and prints."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from megalith.commands import ranks, runs
from megalith.commands import train as training
from megalith.commands.arguments import RunRequest
from megalith.control import supervisor
from megalith.fleet import environment
from megalith.fleet.environment import Place
from megalith.fleet.exit_codes import ExitCode
from megalith.machine import admission
from megalith.machine.health import Finding
from megalith.spec import files
from megalith.spec.problem import SpecErrors
from tests.commands.calling import call


def train(run: Path, *overrides: str, run_dir: Path | None = None, profile: str | None = None) -> training.Trained:
    return training.train(RunRequest(run, overrides, run_dir), console=Console(quiet=True), profile=profile)


def test_training_starts_the_plans_ranks_in_the_run_folder(run: Path, jobs: list[supervisor.Job]):
    trained = train(run, profile="3:5")
    (job,) = jobs
    assert (job.ranks, job.entry, job.run_dir) == (4, "megalith.train.run:main", Path("runs/first"))
    assert job.arguments == {"run_dir": str(Path("runs/first").resolve()), "profile": "3:5"}
    assert (job.threads, job.start_timeout, job.silence_timeout) == (1, 30.0, 600.0)
    assert job.problems() == []
    assert "megalith.train.run" in job.preload
    assert (trained.code, trained.message) == (ExitCode.FINISHED, "finished")
    assert files.load("runs/first/run.toml").spec == files.load(run).spec


def test_training_leaves_a_report(run: Path, jobs: list[supervisor.Job]):
    trained = train(run)
    assert trained.report is not None
    assert trained.report.parent == Path("runs/first")
    assert trained.report.is_file()


def test_nothing_starts_and_nothing_is_written_when_the_run_is_wrong(run: Path, jobs: list[supervisor.Job]):
    with pytest.raises(SpecErrors) as caught:
        train(run, "plan.tensor=3", "train.global_batch=5")
    assert {"plan.tensor", "train.global_batch"} <= {problem.key for problem in caught.value.problems}
    assert jobs == []
    assert not Path("runs").exists()


def test_more_ranks_than_a_machine_should_start_are_refused(run: Path, jobs: list[supervisor.Job]):
    with pytest.raises(SpecErrors, match="too many for this machine"):
        train(run, "plan.data=1024", "train.global_batch=1024")
    assert jobs == []


def begun(folder: str) -> None:
    Path(folder, "checkpoints/step-00000010").mkdir(parents=True)


def test_a_run_folder_with_a_checkpoint_is_gone_on_with_by_the_same_run_only(run: Path, jobs: list[supervisor.Job]):
    train(run)
    begun("runs/first")
    with pytest.raises(SpecErrors) as caught:
        train(run, "optimizer.lr=1", "train.seed=5", "train.steps=200")
    assert {problem.key for problem in caught.value.problems} == {"optimizer.lr", "train.seed"}
    assert len(jobs) == 1


def test_a_resumed_run_may_have_another_plan_and_length(run: Path, jobs: list[supervisor.Job]):
    train(run)
    begun("runs/first")
    train(run, "plan.data=4", "plan.pipeline=1", "train.steps=200")
    assert [job.ranks for job in jobs] == [4, 4]
    assert files.load("runs/first/run.toml").spec.train.steps == 200


def test_a_fine_tuned_run_goes_on_without_what_it_began_with(run: Path, jobs: list[supervisor.Job]):
    with pytest.raises(SpecErrors, match="no such checkpoint"):
        train(run, "train.init_from=gone")
    begun("elsewhere")
    train(run, "train.init_from=gone", run_dir=Path("elsewhere"))
    assert runs.check(RunRequest(run, ["train.init_from=gone"], Path("elsewhere"))).errors == []
    assert len(jobs) == 1


def test_a_run_that_never_saved_may_be_started_over_differently(run: Path, jobs: list[supervisor.Job]):
    train(run)
    train(run, "optimizer.lr=1")
    assert len(jobs) == 2


def place(rank: int) -> Place:
    return Place(rank, 4, rank, 4, "torchrun", "tcp://localhost:1", "g")


def test_under_a_launcher_this_process_is_the_rank(
    run: Path, jobs: list[supervisor.Job], joined: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(environment, "find", lambda: place(0))
    assert train(run).code == 0
    assert joined == [{"run_dir": str(Path("runs/first").resolve())}]
    assert jobs == []


def test_other_ranks_wait_until_the_first_has_written_this_run(
    run: Path, joined: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(environment, "find", lambda: place(1))
    files.save(files.load(run, overrides=["train.steps=7"]), Path("runs/first"))  # an older run in the folder is not this one
    with pytest.raises(TimeoutError, match="rank 0 has not written this run"):
        train(run, "launch.start_timeout=0.1")
    files.save(files.load(run), Path("runs/first"))
    trained = train(run)
    assert (trained.code, trained.report) == (0, None)  # one report a run: the first rank's
    assert len(joined) == 1


def test_a_rank_that_stopped_as_asked_says_so(run: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(environment, "find", lambda: place(0))
    monkeypatch.setitem(sys.modules, "megalith.train.run", SimpleNamespace(main=lambda run_dir: sys.exit(ExitCode.STOPPED)))
    assert train(run).code == ExitCode.STOPPED


def test_a_world_of_another_size_is_refused(run: Path, joined: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(environment, "find", lambda: place(0))
    with pytest.raises(SpecErrors, match="8 ranks are needed, and 4 were started"):
        train(run, "plan.data=4")
    assert joined == []


def test_a_machine_that_is_not_fit_is_told_before_any_rank_starts(run: Path, monkeypatch: pytest.MonkeyPatch):
    looks: list[Path] = []

    def look(folder: Path) -> list[Finding]:
        looks.append(folder)
        return [Finding("memory", "fail", "1 MiB", "at least 256 MiB", "Stop what else runs here")]

    monkeypatch.setattr(admission, "before_start", look)
    monkeypatch.setattr(runs, "check", lambda one, **_: runs.Checked(files.load(one.file, overrides=one.overrides), []))
    monkeypatch.setattr(ranks, "start", lambda *args, **rest: pytest.fail("started"))
    with pytest.raises(admission.UnfitError, match="1 MiB"):
        train(run)
    assert looks == [Path("runs") / files.load(run).spec.name]
    for override in ('fleet.check="return"', "fleet.recover=false"):
        with pytest.raises(pytest.fail.Exception, match="started"):
            train(run, override)
    assert len(looks) == 1


@pytest.mark.parametrize("as_json", [False, True])
def test_training_ends_with_the_runs_exit_status(monkeypatch: pytest.MonkeyPatch, as_json: bool):
    given: dict[str, Any] = {}

    def train(request: RunRequest, **options: Any) -> training.Trained:
        given.update(options, request=request)
        return training.Trained(Path("runs/first"), 75, "stopped as asked", Path("runs/first/report.html"))

    monkeypatch.setattr(training, "train", train)
    options = ["--run-dir", "here", "--profile", "2:4", "--set", "a=1", "--set", "b=2", *(["--json"] if as_json else [])]
    result = call("train", "run.toml", *options)
    assert result.exit_code == 75
    assert (given["request"], given["profile"]) == (RunRequest(Path("run.toml"), ["a=1", "b=2"], Path("here")), "2:4")
    if as_json:
        assert json.loads(result.stdout)["code"] == 75
    else:
        assert "stopped as asked" in result.stderr
        assert "report: runs/first/report.html" in result.stdout


@pytest.mark.parametrize("steps", ["3", "5:5", "a:b", "4:2", "0:2"])
def test_a_profile_that_is_no_range_is_a_usage_error(steps: str):
    result = call("train", "run.toml", "--profile", steps)
    assert result.exit_code == 2
    assert "no range of steps" in result.stderr
