"""What the verbs hand to the parts below them, and what they refuse."""

import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from megalith import verbs
from megalith.control import controller, supervisor
from megalith.control.outcome import Outcome
from megalith.fleet import environment
from megalith.fleet.environment import Place
from megalith.fleet.exit_codes import ExitCode
from megalith.machine.health import Finding
from megalith.rehearse.latencies import PROFILES
from megalith.rehearse.prepare import Wanted
from megalith.spec import files
from megalith.spec.families.llama import Llama
from megalith.spec.fleet import FleetSpec
from megalith.spec.plan import Plan
from megalith.spec.problem import SpecErrors
from megalith.spec.run import DataSpec, OptimizerSpec, TrainSpec
from tests.prepared import hollow_data

RUN = """
name = "first"
model.preset = "tiny"
data.path = "data"
train = { steps = 100, global_batch = 64, seq_len = 128 }
optimizer.warmup = 10
plan = { data = 2, pipeline = 2 }
launch = { threads = 1, start_timeout = 30 }
"""
PEACE = Outcome(ExitCode.FINISHED, False, None, (), (), (), 1.0)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run file beside prepared data, in the current directory."""
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(RUN)
    hollow_data(Path("data"), "austen")
    monkeypatch.setattr(environment, "find", lambda: None)
    return Path("run.toml")


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[supervisor.Job]:
    """The jobs that would have been started."""
    started: list[supervisor.Job] = []

    def start(job: supervisor.Job, *, tick: Any = None) -> Outcome:
        started.append(job)
        if tick:
            tick()
        return PEACE

    monkeypatch.setattr(supervisor, "run", start)
    monkeypatch.setattr(controller, "run_here", lambda job, *, tick, **_: start(job, tick=tick))
    return started


def train(run: Path, **options: Any) -> verbs.Trained:
    return verbs.train(run, console=Console(quiet=True), **options)


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
        train(run, overrides=["plan.tensor=3", "train.global_batch=5"])
    assert {"plan.tensor", "train.global_batch"} <= {problem.key for problem in caught.value.problems}
    assert jobs == []
    assert not Path("runs").exists()


FOUR_KINDS = """
model.preset = "tini"
data.path = "nowhere"
train = { step = 100, global_batch = 65, seq_len = 128 }
plan = { data = 4, pipeline = 2 }
"""


def test_unknown_keys_misspelt_presets_values_that_do_not_divide_and_missing_files_are_said_at_once(run: Path):
    run.write_text(FOUR_KINDS)
    with pytest.raises(SpecErrors) as caught:
        verbs.check(run)
    found = {problem.key: problem.way_out for problem in caught.value.problems if problem.severity == "error"}
    assert list(found) == ["model.preset", "train.step", "train.global_batch", "data.path"]
    assert 'Did you mean "tiny"?' in found["model.preset"]
    assert (found["train.step"], found["train.global_batch"]) == ("Did you mean train.steps?", "Use 64 or 68.")


@pytest.mark.parametrize("look", [verbs.dryrun, verbs.parity, partial(verbs.launch, engine="local"), train])
def test_every_verb_that_reads_a_run_says_them_at_once(run: Path, look: Any):
    with pytest.raises(SpecErrors) as caught:
        look(run, overrides=["train.sed=1", "plan.tensor=3"])
    assert {"train.sed", "plan.tensor"} <= {problem.key for problem in caught.value.problems}


@pytest.mark.parametrize("settings", [["plan.dat=2"], ["plan.extent=2"], ['plan.data="2"']])
def test_nothing_is_said_of_defaults_that_stand_for_what_is_faulty(run: Path, settings: list[str]):
    """The plan's other ranks are on their way."""
    run.write_text(RUN.replace("data = 2, pipeline = 2", ""))
    with pytest.raises(SpecErrors) as caught:
        verbs.check(run, overrides=settings, world=2)
    assert [problem.key for problem in caught.value.problems] == [settings[0].partition("=")[0]]


FAULTS = [
    f"{table}.{name}={value}"
    for table, spec in (
        ("plan", Plan),
        ("train", TrainSpec),
        ("data", DataSpec),
        ("optimizer", OptimizerSpec),
        ("fleet", FleetSpec),
    )
    for name in spec.model_fields
    for value in ("{x=[]}", "-1")
] + [f"model.{name}=[]" for name in Llama.model_fields]


def test_no_rule_fails_or_complains_for_want_of_a_value(run: Path):
    """Whatever value is faulty, only that is found wrong with a run that is right otherwise."""
    for fault in FAULTS:
        with pytest.raises(SpecErrors) as caught:
            verbs.check(run, overrides=[fault])
        assert [p.key for p in caught.value.problems if not p.key.startswith(fault.partition("=")[0])] == []


def test_more_ranks_than_a_machine_should_start_are_refused(run: Path, jobs: list[supervisor.Job]):
    with pytest.raises(SpecErrors, match="too many for this machine"):
        train(run, overrides=["plan.data=1024", "train.global_batch=1024"])
    assert jobs == []


def begun(folder: str) -> None:
    Path(folder, "checkpoints/step-00000010").mkdir(parents=True)


def test_a_run_folder_with_a_checkpoint_is_gone_on_with_by_the_same_run_only(run: Path, jobs: list[supervisor.Job]):
    train(run)
    begun("runs/first")
    with pytest.raises(SpecErrors) as caught:
        train(run, overrides=["optimizer.lr=1", "train.seed=5", "train.steps=200"])
    assert {problem.key for problem in caught.value.problems} == {"optimizer.lr", "train.seed"}
    assert len(jobs) == 1


def test_a_resumed_run_may_have_another_plan_and_length(run: Path, jobs: list[supervisor.Job]):
    train(run)
    begun("runs/first")
    train(run, overrides=["plan.data=4", "plan.pipeline=1", "train.steps=200"])
    assert [job.ranks for job in jobs] == [4, 4]
    assert files.load("runs/first/run.toml").spec.train.steps == 200


def test_a_fine_tuned_run_goes_on_without_what_it_began_with(run: Path, jobs: list[supervisor.Job]):
    with pytest.raises(SpecErrors, match="no such checkpoint"):
        train(run, overrides=["train.init_from=gone"])
    begun("elsewhere")
    train(run, overrides=["train.init_from=gone"], run_dir=Path("elsewhere"))
    assert verbs.check(run, overrides=["train.init_from=gone"], run_dir=Path("elsewhere")).errors == []
    assert len(jobs) == 1


def test_a_run_that_never_saved_may_be_started_over_differently(run: Path, jobs: list[supervisor.Job]):
    train(run)
    train(run, overrides=["optimizer.lr=1"])
    assert len(jobs) == 2


def place(rank: int) -> Place:
    return Place(rank, 4, rank, 4, "torchrun", "tcp://localhost:1", "g")


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What a rank's entry was called with, in place of the real one, which needs torch."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setitem(sys.modules, "megalith.train.run", SimpleNamespace(main=lambda **arguments: calls.append(arguments)))
    return calls


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
        train(run, overrides=["launch.start_timeout=0.1"])
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
        train(run, overrides=["plan.data=4"])
    assert joined == []


def test_parity_needs_no_data(run: Path, monkeypatch: pytest.MonkeyPatch):
    found = {"equal": True, "rows": []}

    def start(job: supervisor.Job, *, tick: Any = None) -> Outcome:
        assert (job.entry, job.arguments["steps"], job.ranks) == ("megalith.prove.parity:main", 2, 4)
        Path(str(job.arguments["run_dir"]), "parity.json").write_text(json.dumps(found))
        return PEACE

    monkeypatch.setattr(supervisor, "run", start)
    assert verbs.parity(run, overrides=["data.path=nowhere"], steps=2) == found


def test_parity_refuses_an_illegal_plan(run: Path, jobs: list[supervisor.Job]):
    with pytest.raises(SpecErrors, match=r"plan\.tensor"):
        verbs.parity(run, overrides=["plan.tensor=3"])
    assert jobs == []


def test_a_report_wants_a_run_folder(run: Path):
    with pytest.raises(FileNotFoundError, match="no run folder"):
        verbs.report(Path("data"))


def test_draws_are_all_equal_only_if_as_many_as_asked_for_are(monkeypatch: pytest.MonkeyPatch):
    outcomes = ["equal", "tie", "equal"]
    drawn = SimpleNamespace(
        name="dense; data 2 shards", choices=(("data", "2 shards"),), spec=SimpleNamespace(plan=SimpleNamespace(ranks=2))
    )

    def prove_drawn(count: int, seed: int, *, starting: Any) -> Any:
        for outcome in outcomes:
            starting(drawn)
            yield SimpleNamespace(draw=drawn, outcome=outcome, rows=(), tokens_tied=0, error="")

    monkeypatch.setattr("megalith.prove.prove.prove_drawn", prove_drawn)
    heard: list[Any] = []
    found = verbs.parity_of_draws(2, seed=1, starting=lambda name, ranks: heard.append(ranks), ended=heard.append)
    assert found["equal"]
    assert found["outcomes"] == {"equal": 2, "tie": 1, "NOT equal": 0, "failed": 0}
    assert heard == [2, "equal", 2, "tie", 2, "equal"]
    assert not verbs.parity_of_draws(3, seed=1)["equal"]


def test_a_launch_whose_data_is_elsewhere_is_advised_not_refused(run: Path):
    options = {"nodes": 2, "gpus_per_node": 2}
    artefact, advice = verbs.launch(run, engine="slurm", overrides=["data.path=far/away"], options=options)
    assert "--set data.path=far/away" in artefact.text
    assert [(one.severity, one.key) for one in advice] == [("advice", "data.path")]
    assert "seen from this machine" in advice[0].reason


def test_a_wrong_run_is_not_launched_and_all_is_said(run: Path):
    with pytest.raises(SpecErrors) as caught:
        verbs.launch(run, engine="k8s", overrides=["plan.tensor=3", "train.global_batch=5"], options={"hours": 1.0})
    assert {"plan.tensor", "train.global_batch", "--image", "--hours", "--nodes"} <= {one.key for one in caught.value.problems}


def test_the_doctor_wants_a_folder(run: Path):
    with pytest.raises(NotADirectoryError, match="is a file"):
        verbs.doctor(run, burn_in=0)


def test_the_doctor_burns_in_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    given: list[str] = []

    def burn_in(device: str, *, seconds: float) -> list[Finding]:
        given.append(device)
        return [Finding("burn-in", "ok", "2 products", "the same bits")]

    monkeypatch.setattr("megalith.prove.doctor.burn_in", burn_in)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    findings = verbs.doctor(tmp_path, burn_in=0.1)
    assert given == ["cuda:0", "cuda:1"]
    assert [one.check for one in findings[-2:]] == ["burn-in, cuda:0", "burn-in, cuda:1"]


def test_a_machine_that_is_not_fit_is_told_before_any_rank_starts(run: Path, monkeypatch: pytest.MonkeyPatch):
    from megalith.machine import admission

    looks: list[Path] = []

    def look(folder: Path) -> list[Finding]:
        looks.append(folder)
        return [Finding("memory", "fail", "1 MiB", "at least 256 MiB", "Stop what else runs here")]

    monkeypatch.setattr(admission, "before_start", look)
    monkeypatch.setattr(
        verbs, "check", lambda path, *, overrides=(), **_: verbs.Checked(files.load(path, overrides=overrides), [])
    )
    monkeypatch.setattr(verbs, "_start", lambda *args, **rest: pytest.fail("started"))
    with pytest.raises(admission.UnfitError, match="1 MiB"):
        verbs.train(run, console=Console())
    assert looks == [Path("runs") / files.load(run).spec.name]
    for override in ('fleet.check="return"', "fleet.recover=false"):
        with pytest.raises(pytest.fail.Exception, match="started"):
            verbs.train(run, console=Console(), overrides=[override])
    assert len(looks) == 1


def test_a_jobs_burn_in_is_for_the_device_it_computes_on(run: Path):
    spec = files.load(run, overrides=["train.device=cpu", "fleet.burn_in=3.0"]).spec
    command = verbs._job(spec, Path("x"), verbs.TRAIN, {}).burn_in
    assert command[command.index("--seconds") + 1] == "3.0" and command[-1] == "cpu"


def test_every_profile_of_latencies_can_be_simulated():
    for profile in PROFILES:
        plan = verbs.scenario(Wanted("h100:16", options={"days": 1, "profile": profile})).scenario
        assert verbs.simulate(plan, seeds=1).scenario.latencies.source == PROFILES[profile].source


def test_a_sweep_tries_the_given_value_among_others():
    calls: list[int] = []
    plan = verbs.scenario(Wanted("h100:64", options={"days": 1, "fleet.spares": 3})).scenario
    tried = verbs.try_out(plan, "spares", seeds=2, begun=calls.append, tick=lambda: calls.append(1))
    assert [one.value for one in tried] == [0, 1, 2, 3, 4]
    assert calls == [10] + [1] * 10
