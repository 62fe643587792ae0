"""`megalith train`: starting, refusing, resuming and output."""

import json
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from megalith import disk, events
from megalith.checkpoint import folder as checkpoints
from megalith.checkpoint.folder import Manifest
from megalith.commands import train as training
from megalith.commands.shared import runs
from megalith.commands.shared.arguments import RunRequest
from megalith.control import owner, supervisor
from megalith.control.owner import InUseError
from megalith.events import of_kind, read
from megalith.fleet import environment
from megalith.fleet.environment import Place
from megalith.fleet.exit_codes import ExitCode
from megalith.fleet.tiers import Copy, Tier
from megalith.machine import admission, capacity
from megalith.machine.health import Finding
from megalith.spec import files
from megalith.spec.problem import SpecErrors
from tests.commands.calling import call
from tests.control.owning import another_process, content


def train(run: Path, *overrides: str, run_dir: Path | None = None, profile: str | None = None) -> training.TrainResult:
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


def test_nothing_is_written_under_a_mount_point_without_its_file_system(
    run: Path, jobs: list[supervisor.Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "store").mkdir()
    monkeypatch.setattr(disk, "bare_mount", lambda path: tmp_path / "store")
    result = call("train", str(run), "--run-dir", str(tmp_path / "store" / "first"))
    assert result.exit_code == ExitCode.LOST, "an engine tries again"
    assert "no file system is mounted here, although /etc/fstab lists one" in result.stderr
    assert (jobs, list((tmp_path / "store").iterdir())) == ([], [])
    (finding,) = admission.before_start(tmp_path / "store" / "first")
    assert finding.verdict == "fail" and f"nothing is mounted at {tmp_path / 'store'}" in finding.value


def test_nothing_starts_and_nothing_is_written_when_the_run_is_wrong(run: Path, jobs: list[supervisor.Job]):
    with pytest.raises(SpecErrors) as caught:
        train(run, "plan.tensor=3", "train.global_batch=5")
    assert {"plan.tensor", "train.global_batch"} <= {problem.key for problem in caught.value.problems}
    assert jobs == []
    assert not Path("runs").exists()


def test_more_ranks_than_processors_start_with_a_word(run: Path, jobs: list[supervisor.Job], capsys: pytest.CaptureFixture[str]):
    train(run, "plan.data=1024", "train.global_batch=1024")
    assert [job.ranks for job in jobs] == [2048]
    assert "2,048 ranks would share the" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["model.preset=llama3.1-405b", "train.device=cuda"])
def test_what_this_machine_cannot_do_is_refused_before_anything_starts(
    run: Path, jobs: list[supervisor.Job], setting: str, monkeypatch: pytest.MonkeyPatch
):
    """C8: such ranks failed three times, or filled the memory."""
    monkeypatch.setattr(capacity, "measure", lambda: capacity.Machine(2, 23 * 2.0**30))
    with pytest.raises(SpecErrors, match="on this machine"):
        train(run, setting)
    assert jobs == []
    assert not Path("runs").exists()


def begun(folder: str) -> None:
    Path(folder, "checkpoints/step-00000010").mkdir(parents=True)


def test_a_run_folder_with_a_checkpoint_is_gone_on_with_by_the_same_run_only(run: Path, jobs: list[supervisor.Job]):
    train(run)
    begun("runs/first")
    with pytest.raises(SpecErrors) as caught:
        train(run, "optimizer.lr=1", "train.seed=5", "train.steps=200")
    assert {problem.key for problem in caught.value.problems} == {"optimizer.lr", "train.seed"}
    assert len(jobs) == 1


def saved(run: Path, *overrides: str, step: int = 20, folder: str = "runs/first") -> Path:
    """Make a checkpoint's manifest for the run of the file, with these settings changed."""
    path = Path(folder, "checkpoints", checkpoints.name(step))
    path.mkdir(parents=True)
    spec = files.load(run, overrides=overrides).spec.model_dump(mode="json")
    checkpoints.write_manifest(path, Manifest(step, step, {"spec": spec}, {}))
    return path


@pytest.mark.parametrize(
    "override", ["optimizer.lr=0.5", "optimizer.weight_decay=0.9", "model.init_std=0.5", "model.heads=2", "model.rope_theta=7.0"]
)
def test_a_checkpoint_of_another_run_is_refused_with_what_differs(run: Path, jobs: list[supervisor.Job], override: str):
    """The checkpoint was copied into the folder. `train.init_from` is the way to use its weights."""
    train(run)
    saved(run, step=10)
    saved(run, override, "plan.data=1", "plan.pipeline=1")
    with pytest.raises(SpecErrors) as caught:
        train(run)
    (problem,) = caught.value.problems
    assert problem.key == override.partition("=")[0]
    assert "checkpoints/step-00000020 was saved by a run with" in problem.reason and "train.init_from" in problem.way_out
    assert len(jobs) == 1


def test_where_only_checkpoints_are_left_another_learning_rate_is_said(run: Path, jobs: list[supervisor.Job]):
    saved(run)
    with pytest.raises(SpecErrors, match=r"optimizer\.lr = 1.*: checkpoints/step-00000020 was saved by a run with 0\.0003"):
        train(run, "optimizer.lr=1")
    train(run, "plan.data=4", "plan.pipeline=1", "train.steps=200")
    assert len(jobs) == 1


def test_a_checkpoint_without_a_description_is_no_runs(run: Path, jobs: list[supervisor.Job]):
    checkpoints.write_manifest(saved(run), Manifest(20, 1, {"weights": "of somebody"}, {}))
    with pytest.raises(SpecErrors, match="checkpoints/step-00000020: has no description of its run"):
        train(run)


@pytest.mark.parametrize(("damage", "what"), [(None, "is missing"), (b"{}", "cannot be read"), (b"x", "is altered")])
def test_a_checkpoint_whose_manifest_cannot_be_used_is_named_once(run: Path, damage: bytes | None, what: str):
    """The checkpoint is skipped. If there is no other, the command says so before it begins from the first weights."""
    sound, broken = saved(run, step=10), saved(run)
    manifest = broken / checkpoints.MANIFEST
    whole = manifest.read_bytes()
    manifest.unlink()
    if damage is not None:
        manifest.write_bytes(whole.replace(b"tiny", b"Tiny") if damage == b"x" else damage)
    with owner.hold(Path("runs/first")) as own:
        look = runs.store_of(own)
        assert [look() for _ in range(2)] == [(Copy(Tier.STORE, 10),)] * 2
        (told,) = of_kind(read(Path("runs/first")), events.Problem)
        assert f"{broken} is damaged and is not used: step-00000020/manifest.json {what}" in told.message
        (sound / checkpoints.MANIFEST).unlink()
        assert {copy.step for copy in look()} == {10, 20}, "none can be used, and nothing begins anew"
        assert len(of_kind(read(Path("runs/first")), events.Problem)) == 2


def test_a_run_that_began_with_an_earlier_default_keeps_it(run: Path, jobs: list[supervisor.Job]):
    """The default warm-up was 2,000 updates; now it is a share."""
    run.write_text(run.read_text().replace("optimizer.warmup = 10\n", ""))
    train(run, "optimizer.warmup=2000", "train.steps=9000")
    begun("runs/first")
    train(run, "train.steps=9000")
    kept = files.load("runs/first/run.toml")
    assert kept.spec.optimizer.warmup == 2000
    with pytest.raises(SpecErrors, match=r'optimizer\.warmup = "3%": the run in this folder has 2000'):
        train(run, "train.steps=9000", "optimizer.warmup=3%")
    Path("runs/first/run.toml").write_text(Path("runs/first/run.toml").read_text().replace("warmup = 2000", "warmup = 100 "))
    with pytest.raises(SpecErrors, match=r'optimizer\.warmup = "2%": the run in this folder has 100'):
        train(run, "train.steps=9000")
    assert len(jobs) == 2


def test_a_run_that_an_earlier_version_began_goes_on(run: Path, jobs: list[supervisor.Job]):
    """The files of the older run folder have `min_lr` instead of `min_lr_ratio`."""
    train(run)
    begun("runs/first")
    for name in ("run.toml", "spec.json", "provenance.json"):
        file = Path("runs/first", name)
        file.write_text(file.read_text().replace("min_lr_ratio", "min_lr"))
    train(run, "train.steps=200")
    assert len(jobs) == 2


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


@pytest.mark.parametrize("named", [[], ["--run-dir", "there"]], ids=["default", "named"])
def test_a_branch_is_resumed_by_its_own_command_although_its_parent_has_gone_on(
    run: Path, jobs: list[supervisor.Job], named: list[str]
):
    def save(step: int) -> None:
        path = Path("runs/parent/checkpoints", checkpoints.name(step))
        path.mkdir(parents=True)
        spec = files.load(run).spec.model_dump(mode="json")
        position = {"step": step, "updates": step, "samples": step * 64}
        checkpoints.write_manifest(path, Manifest(step, step, {"spec": spec, "position": position}, {}))

    asked = ["train", "run.toml", "--branch", "runs/parent", "--decay", "5", *named]
    save(10)
    first = call(*asked)
    assert first.exit_code == 0, first.output
    where = named[1] if named else "runs/first"
    begun(where)
    save(20)
    again = call(*asked)
    assert again.exit_code == 0, again.output
    branch = files.load(Path(where, files.FILE)).spec.branch
    assert len(jobs) == 2 and branch is not None and branch.updates == 10
    faulty = call(*asked, "--set", "name=3", "--set", "plan.tensor=3")
    assert faulty.exit_code == 2 and "plan.tensor" in faulty.stderr


def test_a_run_that_never_saved_may_be_started_over_differently(
    run: Path, jobs: list[supervisor.Job], capsys: pytest.CaptureFixture[str]
):
    train(run)
    train(run, "log.project=mine")
    assert "starts over" not in capsys.readouterr().err, "its copies in memory are used"
    train(run, "optimizer.lr=1", "train.seed=5")
    assert (
        "runs/first has no checkpoint, so this run starts over, with train.seed = 5 (was 0), optimizer.lr = 1.0 (was 0.0003)"
        in (capsys.readouterr().err)
    )
    begun("runs/first")
    train(run, "optimizer.lr=1", "train.seed=5", "train.steps=200")
    assert "starts over" not in capsys.readouterr().err
    assert len(jobs) == 4


def test_a_run_whose_checkpoints_are_all_gone_is_not_started_over(run: Path, jobs: list[supervisor.Job]):
    """They may be on a file system of their own, which is not mounted."""
    train(run)
    log = events.EventLog(Path("runs/first"))
    for step in (10, 20):
        log.write(events.Checkpoint(step=step, path="", bytes=1, seconds=0.1, wait_seconds=0.0))
    log.close()
    Path("runs/first/checkpoints").mkdir()
    with pytest.raises(SpecErrors, match=r"^runs/first/checkpoints: holds no checkpoint, but .* step 20 was saved .*--run-dir"):
        train(run)
    assert len(jobs) == 1
    train(run, run_dir=Path("runs/second"))
    assert len(jobs) == 2


def test_a_second_command_in_a_running_folder_is_refused_and_changes_not_one_byte(run: Path, jobs: list[supervisor.Job]):
    train(run)
    with another_process(Path("runs/first")) as process:
        before = content(Path("runs/first"))
        for override in ("optimizer.lr=0.01", "train.steps=40", "plan.data=1"):
            result = call("train", "run.toml", "--set", override)
            assert f"is in use by process {process} on {socket.gethostname()} since" in result.stderr
            assert result.exit_code == ExitCode.FAILED
        assert content(Path("runs/first")) == before
    assert len(jobs) == 1


def test_a_second_torchrun_is_refused_too(run: Path, joined: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(environment, "find", lambda: place(0))
    with another_process(Path("runs/first")) as process, pytest.raises(InUseError, match=f"is in use by process {process}"):
        train(run)
    assert not Path("runs/first/run.toml").exists()
    assert joined == []


SEALED = ("runs/first/spec.json", "data/manifest.json", "data/tokenizer.json")


def place(rank: int) -> Place:
    return Place(rank, 4, rank, 4, "torchrun", "tcp://localhost:1", "g")


def test_under_a_launcher_this_process_is_the_rank(
    run: Path, jobs: list[supervisor.Job], joined: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(environment, "find", lambda: place(0))
    assert train(run).code == 0
    (arguments,) = joined
    assert arguments.pop("sealed").keys() == {str(Path(path).resolve()) for path in SEALED}
    assert arguments == {"run_dir": str(Path("runs/first").resolve())}
    assert jobs == []


def test_other_ranks_wait_until_the_first_has_written_this_run(
    run: Path, joined: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(environment, "find", lambda: place(1))
    files.save(files.load(run, overrides=["train.steps=7"]), Path("runs/first"))  # the folder may have an older run
    with pytest.raises(TimeoutError, match="rank 0 has not written this run"):
        train(run, "launch.start_timeout=0.1")
    files.save(files.load(run), Path("runs/first"))
    trained = train(run)
    assert (trained.code, trained.report) == (0, None)  # one report a run: the first rank's
    assert len(joined) == 1


def test_a_rank_that_stopped_as_asked_says_so(run: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(environment, "find", lambda: place(0))
    monkeypatch.setitem(
        sys.modules, "megalith.train.run", SimpleNamespace(main=lambda run_dir, sealed: sys.exit(ExitCode.STOPPED))
    )
    assert train(run).code == ExitCode.STOPPED


def test_a_world_of_another_size_is_refused(run: Path, joined: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(environment, "find", lambda: place(0))
    with pytest.raises(SpecErrors, match="8 ranks are needed, but 4 were started"):
        train(run, "plan.data=4")
    assert joined == []


def test_a_machine_that_is_not_fit_is_told_before_any_rank_starts(run: Path, monkeypatch: pytest.MonkeyPatch):
    looks: list[Path] = []

    def look(folder: Path) -> list[Finding]:
        looks.append(folder)
        return [Finding("memory", "fail", "1 MiB", "at least 256 MiB", "Stop other programs on this machine")]

    monkeypatch.setattr(admission, "before_start", look)
    monkeypatch.setattr(runs, "check", lambda one, **_: runs.CheckResult(files.load(one.file, overrides=one.overrides), []))
    monkeypatch.setattr(runs, "start", lambda *args, **rest: pytest.fail("started"))
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

    def train(request: RunRequest, **options: Any) -> training.TrainResult:
        given.update(options, request=request)
        return training.TrainResult(Path("runs/first"), 75, "stopped as asked", Path("runs/first/report.html"))

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
    assert "not a range of steps" in result.stderr
