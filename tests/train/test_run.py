"""If data changes on the disk, a run reads another copy and ends as if nothing had happened, or stops with the cause. The module also tests
a run without recovery."""

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

import megalith.train.copies
import megalith.train.run
from megalith import epochs
from megalith.commands.shared import runs
from megalith.control import controller
from megalith.control.outcome import Outcome
from megalith.data.errors import AwayDataError
from megalith.events import Checkpoint, EventLog, Incident, Problem, Recovery, RunFinished, RunStarted, Step, of_kind, read
from megalith.fleet import injection
from megalith.fleet.causes import status
from megalith.fleet.environment import Place
from megalith.fleet.exit_codes import ExitCode
from megalith.fleet.injection import OWN_DATA, Injection
from megalith.fleet.job import Job
from megalith.fleet.observations import NotThisRun, StoreAway
from megalith.fleet.rank_info import MEMORY, REPORTS
from megalith.fleet.report import Reported, collect
from megalith.fleet.tiers.roots import _family, copies_place
from megalith.spec import files
from megalith.spec.fleet import FleetSpec
from megalith.spec.run import RunSpec
from megalith.train.loop import NotSavedError
from megalith.train.run import _last_words, _unreachable
from tests.full import sampled
from tests.keys import GIVEN
from tests.patience import PATIENCE
from tests.runs import assert_same_bits, final_state, finish, prepare_text, signal_yourself, start, train, when
from tests.specs import tiny_run

pytestmark = pytest.mark.slow


def _spec(data: Path, *copies: Path) -> RunSpec:
    return tiny_run(
        model={"vocab": 264},
        plan={"data": 2},
        data={"path": str(data), "copies": [str(copy) for copy in copies]},
        train={"steps": 6, "global_batch": 4, "seq_len": 32, "precision": "fp32"},
    )


def _run(spec: RunSpec, folder: Path) -> Outcome:
    """Train with an injected fault: a bit of rank 1's data in step 3 flips right before it is read."""
    folder.mkdir()
    (folder / "spec.json").write_text(spec.model_dump_json())
    injection.save(folder / "faults.json", [Injection(0, "shard", 3, "reading", (1,), place=0.5)])
    job = Job(
        entry="megalith.train.run:main",
        arguments={"run_dir": str(folder)},
        ranks=2,
        run_dir=folder,
        preload=("torch", "megalith.train.run"),
        start_timeout=250.0,
        silence_timeout=120.0,
        threads=1,
        environment={injection.VARIABLE: str(folder / "faults.json")},
    )
    return controller.run_here(job, fleet=spec.fleet, identity="data", store=lambda: ())


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_text(tmp_path_factory.mktemp("text"))


def _own(data: Path, folder: Path) -> Path:
    out = shutil.copytree(data, folder / "hurt-data")
    (out / OWN_DATA).touch()
    return out


def test_a_shard_that_changes_under_a_run_is_read_elsewhere_in_the_same_step(data: Path, tmp_path: Path) -> None:
    train(_spec(data), tmp_path / "whole")
    outcome = _run(_spec(_own(data, tmp_path), data), tmp_path / "run")
    assert outcome.code == ExitCode.FINISHED, outcome.message()
    assert_same_bits(final_state(tmp_path / "whole"), final_state(tmp_path / "run"))
    events = list(read(tmp_path / "run"))
    (found,) = of_kind(events, Incident)
    assert (found.cause, found.node, found.rank) == ("data_damaged", None, None)
    assert found.evidence["other_copy"] == str(data)
    assert len(of_kind(events, RunStarted)) == 1


def test_without_another_copy_the_run_stops_and_says_which_byte_of_which_shard(data: Path, tmp_path: Path) -> None:
    hurt = _own(data, tmp_path)
    outcome = _run(_spec(hurt), tmp_path / "run")
    assert outcome.code == ExitCode.FAILED
    assert "there is no other copy" in outcome.report
    assert str(hurt) in outcome.report
    assert "from byte" in outcome.report
    assert "data.copies" in outcome.report
    (found,) = of_kind(read(tmp_path / "run"), Incident)
    assert found.cause == "data_damaged"


def _kill_a_rank() -> None:
    """Kill a process that this process's fork server has forked."""
    *_, server = [child for child in psutil.Process().children() if child.children()]  # not the idle process of tests/warm.py
    server.children()[-1].kill()


@pytest.mark.parametrize("file", ["spec.json", "manifest.json", "tokenizer.json"])
@sampled(1)
def test_a_file_that_changed_while_the_run_is_held_is_named_at_the_next_start_and_never_trained_with(
    file: str, data: Path, tmp_path: Path
) -> None:
    """A rank dies after the change. Restarts are useless, and must not continue as another run."""
    own, folder = shutil.copytree(data, tmp_path / "data"), tmp_path / "run"
    spec = _spec(own)
    spec = spec.model_copy(update={"train": spec.train.model_copy(update={"steps": 100_000})})
    changed = (folder if file == "spec.json" else own) / file
    folder.mkdir()
    (folder / "spec.json").write_text(files.spec_text(spec))
    limits = {"start_timeout": PATIENCE, "silence_timeout": PATIENCE, "threads": 1}
    job = replace(runs.job(spec, folder, runs.TRAIN, {"run_dir": str(folder)}), **limits)
    done: list[bool] = []

    def change() -> None:
        if not done and of_kind(read(folder), Step):
            changed.write_bytes(changed.read_bytes()[:-9])
            done.append(True)
            _kill_a_rank()

    outcome = controller.run_here(job, fleet=spec.fleet, identity="data", store=lambda: (), tick=change)
    assert outcome.code == ExitCode.FAILED, outcome.message()
    assert outcome.message().startswith(f"{changed} was changed while this run was in progress")
    assert len(of_kind(read(folder), RunStarted)) == 1
    assert "changed" in of_kind(read(folder), Problem)[-1].message


def test_a_run_that_another_owner_takes_over_ends_in_the_same_bits_under_names_of_its_own(data: Path, tmp_path: Path) -> None:
    """The earlier owner's ranks were killed. Whatever it still writes goes to the names without a number."""
    spec = _spec(data)
    spec = spec.model_copy(update={"checkpoint": spec.checkpoint.model_copy(update={"every": 2, "asynchronous": False})})
    train(spec, tmp_path / "whole")
    folder = tmp_path / "run"

    with when("step", 3, rank=1, act=lambda: signal_yourself(signal.SIGKILL)):
        finish(start(spec, folder))
    epochs.begin(folder, 1)
    early = (folder / "events.jsonl").read_bytes()
    (folder / "checkpoints" / "step-00000999").mkdir(parents=True)
    assert finish(start(spec, folder, environment={epochs.VARIABLE: "1"})) == [0, 0]
    assert_same_bits(final_state(tmp_path / "whole"), final_state(folder))
    assert (folder / "events.jsonl").read_bytes() == early
    events = list(read(folder))
    assert [event.resumed_step for event in of_kind(events, RunStarted)] == [0, 2]
    assert {Path(event.path).parent.name for event in of_kind(events, Checkpoint)[-2:]} == {"checkpoints-1"}
    assert of_kind(events, RunFinished)[-1].reason == "finished"


def test_a_rank_does_not_begin_with_another_description_than_it_was_told_of(data: Path, tmp_path: Path) -> None:
    (tmp_path / "spec.json").write_text(_spec(data).model_dump_json())
    (tmp_path / "reports").mkdir()
    rank = os.fork()
    if rank == 0:
        os.environ[REPORTS] = str(tmp_path / "reports")
        try:
            megalith.train.run.main(str(tmp_path), sealed={str(tmp_path / "spec.json"): "of another"})
        except Reported:
            os._exit(ExitCode.REPORTED)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) == ExitCode.REPORTED
    (observation,) = collect(tmp_path / "reports")
    assert isinstance(observation, NotThisRun) and "spec.json was changed" in observation.error


LOST_PEER = RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:3215")


def _said(folder: Path) -> list[str]:
    return [event.reason for event in of_kind(read(folder), RunFinished)]


@pytest.mark.parametrize(
    ("error", "reason"), [(ValueError("wrong"), "failed"), (LOST_PEER, "lost"), (Reported("a flipped bit"), "lost")]
)
def test_a_run_that_may_get_further_does_not_end_as_one_that_failed(error: Exception, reason: str, tmp_path: Path) -> None:
    """Engines restart the run because of this status."""
    _last_words(error, tmp_path, EventLog(tmp_path), rank=0)
    assert _said(tmp_path) == [reason]


def test_what_a_rank_says_of_its_own_error_stands_when_others_lose_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _last_words(ValueError("wrong"), tmp_path, None, rank=3)
    _last_words(LOST_PEER, tmp_path, None, rank=2)
    _last_words(LOST_PEER, tmp_path, EventLog(tmp_path), rank=0)
    assert _said(tmp_path) == ["failed", "failed"]
    monkeypatch.setenv(REPORTS, str(tmp_path))
    _last_words(ValueError("wrong"), tmp_path, None, rank=3)
    assert _said(tmp_path) == ["failed", "failed"], "a supervisor hears of it by itself"


def test_a_lost_connection_is_logged_in_a_line_and_not_at_all_where_a_supervisor_gets_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = RuntimeError(f"{LOST_PEER}\nException raised from readComplete\nframe #0: c10::Error")
    _last_words(stack, tmp_path / "alone", EventLog(tmp_path / "alone"), rank=0)
    assert [event.message for event in of_kind(read(tmp_path / "alone"), Problem)] == [f"RuntimeError: {LOST_PEER}"]
    monkeypatch.setenv(REPORTS, str(tmp_path))
    _last_words(stack, tmp_path / "heard", EventLog(tmp_path / "heard"), rank=0)
    assert of_kind(read(tmp_path / "heard"), Problem) == []
    assert _said(tmp_path / "heard") == ["lost"]


@pytest.mark.parametrize(
    ("error", "path"),
    [
        (FileNotFoundError(2, "No such file or directory", "{}/spec.json"), "{}/spec.json"),
        (PermissionError(13, "Permission denied", "{}"), "{}"),
        (AwayDataError(Path("/data/manifest.json"), "/data does not exist"), "/data/manifest.json"),
        (FileNotFoundError(2, "No such file or directory", "/elsewhere/cluster.toml"), None),
        (IsADirectoryError(21, "Is a directory", "{}/spec.json"), None),
        (ValueError("wrong"), None),
    ],
)
def test_what_a_run_used_before_and_cannot_reach_is_no_error_of_the_program(
    error: Exception, path: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (tmp_path / "reports").mkdir()
    monkeypatch.setenv(REPORTS, str(tmp_path / "reports"))
    if isinstance(error, OSError):
        error.filename = error.filename.format(run)
    ending = _unreachable(error, [run, Path("/data")])
    assert [observation.path for observation in collect(tmp_path / "reports") if isinstance(observation, StoreAway)] == (
        [] if path is None else [path.format(run)]
    )
    assert (ending is None) == (path is None)
    assert ending is None or status(ending) == ExitCode.LOST


def _ends_with(error: Exception) -> int:
    """Return the exit code of a rank of another launcher."""

    def entry() -> None:
        raise error

    place = Place(1, 2, 0, 1, "variables", "tcp://h:1", None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "_await", lambda resolved, folder, timeout: resolved)
        patch.setattr(runs.importlib, "import_module", lambda name: SimpleNamespace(main=entry))
        resolved = SimpleNamespace(spec=SimpleNamespace(launch=SimpleNamespace(start_timeout=1.0)))
        return runs.join(cast(Any, resolved), Path(), place, "a:main", {})


def test_a_rank_of_another_launcher_ends_with_the_status_that_its_error_asks_for() -> None:
    assert [_ends_with(error) for error in (Reported("a flipped bit"), NotSavedError("no room"), LOST_PEER)] == [76, 71, 71]
    with pytest.raises(ValueError, match="wrong"):
        _ends_with(ValueError("wrong"))


@pytest.mark.parametrize("steps", [1, 2])
def test_a_run_that_is_already_longer_says_so_and_leaves_its_checkpoint_alone(data: Path, tmp_path: Path, steps: int) -> None:
    spec = tiny_run(
        model={"vocab": 264},
        data={"path": str(data)},
        train={"steps": 2, "global_batch": 4, "seq_len": 32, "precision": "fp32"},
    )
    train(spec, tmp_path)
    train(spec.model_copy(update={"train": spec.train.model_copy(update={"steps": steps})}), tmp_path)
    events = list(read(tmp_path))
    (told,) = [event.message for event in of_kind(events, Problem)]
    assert told.startswith(f"2 steps are done and train.steps = {steps}: nothing is left to train. Set train.steps above 2")
    assert len(of_kind(events, Checkpoint)) == 1


def test_without_recovery_there_is_no_guard_and_no_copy(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(*what: Any, **more: Any) -> None:
        os._exit(99)

    monkeypatch.setenv(MEMORY, str(tmp_path / "memory"))
    for variable, value in GIVEN.items():
        monkeypatch.setenv(variable, value)
    for module, name in ((megalith.train.run, "StateGuard"), (megalith.train.copies, "Memory")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, leave)
            train(_spec(data).model_copy(update={"fleet": FleetSpec(recover=False)}), tmp_path / f"without-{name}")
            assert 99 in finish(start(_spec(data), tmp_path / f"with-{name}"))


def test_without_recovery_a_killed_rank_ends_the_run(data: Path, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        f'[model]\npreset = "tiny"\nlayers = 2\n[plan]\ndata = 2\n[data]\npath = "{data}"\n[optimizer]\nwarmup = 2\n'
        "[train]\nsteps = 6\nglobal_batch = 4\nseq_len = 32\n[fleet]\nrecover = false\n"
    )
    folder = tmp_path / "run"
    injection.save(tmp_path / "faults.json", [Injection(0, "kill", 3, "step", (1,))])
    command = [sys.executable, "-m", "megalith.cli", "train", str(tmp_path / "run.toml"), "--run-dir", str(folder)]
    environment = os.environ | {injection.VARIABLE: str(tmp_path / "faults.json")}
    ended = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == ExitCode.LOST, ended.stdout + ended.stderr
    events = list(read(folder))
    assert len(of_kind(events, RunStarted)) == 1
    assert len(of_kind(events, Step)) == 3
    assert not [*of_kind(events, Incident), *of_kind(events, Recovery)]
    assert not list(copies_place().glob(f"{_family(folder)}-*")), "copies in memory, as a run keeps them that is to go on"
