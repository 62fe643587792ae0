"""A run from Python: the page's example, and functions that do not train."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import megalith
from megalith import Run, TrainingError
from megalith.api import Run as Same
from megalith.control import controller
from megalith.control.outcome import Outcome
from megalith.events import RunFinished, Step
from megalith.fleet import environment
from megalith.fleet.exit_codes import ExitCode
from megalith.spec.plan import Plan
from megalith.spec.problem import SpecErrors
from tests.commands.calling import write_run
from tests.patience import PATIENCE
from tests.report.run_folder import write_run as write_events

PAGE = Path(megalith.__file__).parents[1] / "docs/guide/python.md"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(environment, "find", lambda: None)
    write_run()
    return tmp_path


def test_importing_the_package_imports_nothing_more() -> None:
    code = "import sys, megalith; assert not {'torch', 'numpy', 'pydantic', 'typer', 'megalith.api'} & set(sys.modules); megalith.Run"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert Run is Same
    with pytest.raises(AttributeError, match="no attribute 'Runs'"):
        megalith.Runs  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.slow
def test_the_example_of_the_page_does_what_it_says(tmp_path: Path) -> None:
    (tmp_path / "first.py").write_text(re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1])  # type: ignore[index]
    done = subprocess.run([sys.executable, "first.py"], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:2] == ["4 finished 4", f"6 {6 * 8 * 64}"]
    assert re.fullmatch(r"\d\.\d\d nats a token, \d+\.\d\d bits a byte", lines[2])
    assert (tmp_path / "exported/config.json").is_file()


def test_every_method_is_on_the_page() -> None:
    named = set(re.findall(r"`(?:run|Run)\.(\w+)", PAGE.read_text()))
    assert {name for name in vars(Run) if not name.startswith("_")} - {"request"} <= named


def test_settings_make_another_run_and_leave_this_one() -> None:
    run = Run.load("run.toml")
    other = run.set({"train.steps": 7, "name": "other"}, plan={"data": 2}, optimizer={"schedule": "wsd", "warmup": "3%"})
    assert (other.spec.train.steps, other.spec.name, other.spec.plan.data) == (7, "other", 2)
    assert (other.spec.optimizer.schedule, other.spec.optimizer.warmup) == ("wsd", "3%")
    assert (run.spec.train.steps, run.spec.name, run.run_dir, other.run_dir) == (
        100,
        "first",
        Path("runs/first"),
        Path("runs/other"),
    )
    plan = Plan(data=2, pipeline=2, layers=(1, 3), recompute="full")
    assert run.with_plan(plan).spec.plan == plan
    assert run.in_folder("there").run_dir == Path("there")


def test_check_returns_all_problems_and_reading_a_faulty_run_raises_them() -> None:
    assert [problem for problem in Run.load("run.toml").check() if problem.severity == "error"] == []
    faulty = Run.load("run.toml").set({"train.epochs": 3, "plan.tensor": 3})
    assert {"train.epochs", "plan.tensor"} <= {problem.key for problem in faulty.check()}
    with pytest.raises(SpecErrors, match=r"train\.epochs"):
        faulty.spec  # noqa: B018
    with pytest.raises(SpecErrors):
        faulty.train()


@pytest.mark.slow
def test_layouts_are_found_and_taken() -> None:
    run = Run.load("run.toml").set({"cluster": "h100:4"})
    best = run.plan(top=1).found.choices[0].plan
    assert best.ranks == 4
    assert run.with_plan(best).spec.plan == best


@pytest.mark.slow
def test_one_rank_is_counted_without_the_others() -> None:
    found = Run.load("run.toml").set(plan={"data": 2, "zero": 3}, train={"global_batch": 4, "seq_len": 32}).dry_run(rank=1)
    assert (found.run.rank, found.run.world, found.problems) == (1, 2, [])
    assert {line.name: line.counted for line in found.lines}["memory.weights"] > 0
    with pytest.raises(SpecErrors):
        Run.load("run.toml").set(plan={"tensor": 3}).dry_run()


def fake(monkeypatch: pytest.MonkeyPatch, *, code: ExitCode = ExitCode.FINISHED) -> None:
    """Replaces training: it only writes events."""

    def run(job: object, *, tick, owner, **_: object) -> Outcome:
        write_events(owner.run_dir)
        tick()
        return Outcome(code, False, None, (), (), (), 1.0, report="rank 1 is lost" if code else "")

    monkeypatch.setattr(controller, "run_here", run)


def test_events_arrive_as_typed_values_and_the_summary_is_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch)
    seen: list[object] = []
    summary = Run.load("run.toml").train(seen.append)
    steps = [event for event in seen if isinstance(event, Step)]
    assert steps and steps[-1].step == summary.step
    assert seen == list(Run.open("runs/first").events())
    assert any(isinstance(event, RunFinished) for event in seen)
    assert Run.open("runs/first").summary() == summary
    assert Run.open("runs/first").report("page.html").is_file()


def test_what_a_watcher_raises_ends_no_training_and_is_raised_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch)
    seen = 0

    def watch(event: object) -> None:
        nonlocal seen
        seen += 1
        raise LookupError("of mine")

    with pytest.raises(LookupError, match="of mine"):
        Run.load("run.toml").train(watch)
    assert seen == 1
    assert Run.open("runs/first").summary().step > 0


def test_a_training_that_does_not_finish_raises_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, code=ExitCode.LOST)
    with pytest.raises(TrainingError, match="rank 1 is lost") as caught:
        Run.load("run.toml").train()
    assert caught.value.code == ExitCode.LOST


def test_there_is_nothing_to_resume_or_open_where_nothing_was_trained() -> None:
    with pytest.raises(FileNotFoundError, match="no checkpoint here"):
        Run.load("run.toml").resume()
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        Run.open("nowhere")
