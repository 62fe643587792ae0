"""Files and output of `megalith launch` for engines."""

import json
import shlex
from pathlib import Path

import pytest

from megalith.commands import launch
from megalith.commands.shared.arguments import RunRequest
from megalith.spec.problem import SpecErrors
from tests.commands.calling import RUN, call


def test_a_launch_whose_data_is_elsewhere_is_advised_not_refused(run: Path):
    options = {"nodes": 2, "gpus_per_node": 2}
    artefact, advice = launch.launch(RunRequest(run, ["data.path=far/away"]), engine="slurm", options=options)
    assert "--set data.path=far/away" in artefact.text
    assert [(one.severity, one.key) for one in advice] == [("advice", "data.path")]
    assert "seen from this machine" in advice[0].reason


def test_a_wrong_run_is_not_launched_and_all_is_said(run: Path):
    with pytest.raises(SpecErrors) as caught:
        launch.launch(RunRequest(run, ["plan.tensor=3", "train.global_batch=5"]), engine="k8s", options={"hours": 1.0})
    assert {"plan.tensor", "train.global_batch", "--image", "--hours", "--nodes"} <= {one.key for one in caught.value.problems}


def test_all_sites_are_not_launched_as_one(run: Path):
    with pytest.raises(SpecErrors) as caught:
        launch.launch(RunRequest(run, ["sites.count=2"]), engine="slurm", options={"nodes": 1})
    assert "sites.site" in {one.key for one in caught.value.problems}
    artefact, _ = launch.launch(RunRequest(run, ["sites.count=2", "sites.site=1"]), engine="slurm", options={"nodes": 1})
    assert "--set sites.site=1" in artefact.text


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


def test_a_launch_is_handed_to_its_engine_when_asked(monkeypatch: pytest.MonkeyPatch):
    handed: list[str] = []
    monkeypatch.setattr(launch, "hand_over", lambda command: handed.append(command) or 7)
    result = call(*LAUNCH, "--submit", "--run-dir", "runs/x")
    assert (result.exit_code, handed) == (7, ["sbatch runs/x/first.sbatch"]), result.output
    assert Path("runs/x/first.sbatch").read_text().startswith("#!/bin/bash\n#SBATCH --job-name=first\n")
    assert call("launch", "run.toml", "--engine", "torchrun", "--nodes", "1", "--submit").exit_code == 2


@pytest.mark.parametrize(("engine", "name"), [("slurm", "first-run.sbatch"), ("ray", "first-run_ray.py")])
def test_a_launch_that_is_submitted_again_replaces_its_file_in_the_run_folder(
    monkeypatch: pytest.MonkeyPatch, engine: str, name: str
):
    handed: list[str] = []
    monkeypatch.setattr(launch, "hand_over", lambda command: handed.append(command) or 0)
    asked = ["launch", "run.toml", "--engine", engine, "--set", "plan.data=4", "--set", "name=First_Run", "--submit"]
    for nodes in "1", "2":
        result = call(*asked, "--nodes", nodes)
        assert result.exit_code == 0, result.output
    assert handed[0] == handed[1] and handed[0].endswith(f" runs/First_Run/{name}")
    assert call(*asked, "--nodes", "4", "--run-dir", "my runs/x").exit_code == 0
    assert shlex.split(handed[2])[-1] == f"my runs/x/{name}" and Path("my runs/x", name).is_file()
    assert call(*asked, "--nodes", "1", "--out", "a.file").exit_code == 0
    assert call(*asked, "--nodes", "2", "--out", "a.file").exit_code == 1, "a file elsewhere is not replaced unasked"


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
    for said in ("plan.tensor = 3", '--image = "x"', "2 nodes with 5 ranks each have 10 ranks, but the plan has 12"):
        assert said in result.stderr


@pytest.mark.parametrize(("option", "said"), [(["--env", "A"], "--env A=VALUE"), (["--engine", "slrum"], "torchrun or slurm")])
def test_a_launch_that_cannot_be_read_is_a_usage_error(option: list[str], said: str):
    result = call(*LAUNCH, *option)
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())
