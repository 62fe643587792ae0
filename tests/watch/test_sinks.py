"""Other tools get a run's numbers as one run, and a fault in a tool affects only that tool's curves.

Each tool is a small stand-in here, with the calls that its documentation has.
"""

import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from megalith import epochs
from megalith.check import check
from megalith.events import EventLog, Step, Validation
from megalith.spec.run import SERVED, SINKS, LogSpec
from megalith.watch import sinks
from megalith.watch.helpers import WatchHelpers
from megalith.watch.sinks import Feed, numbers_of
from tests.patience import PATIENCE
from tests.specs import tiny_run

REST: dict[str, Any] = {"grad_norm": 2.0, "lr": 0.1, "tokens": 8, "seconds": 1.0, "tokens_per_second": 8.0, "mfu": None}


class Tools:
    """Stand-ins for all three tools, and the data they were given: runs by identity, each with its points."""

    def __init__(self) -> None:
        self.runs: dict[str, dict[str, list[tuple[int, dict[str, float]]]]] = {name: {} for name in SERVED}
        self.calls: list[tuple[str, Any]] = []

    # --- Weights & Biases ---

    def wandb(self) -> ModuleType:
        module = ModuleType("wandb")

        def init(**given: Any) -> Any:
            self.calls.append(("wandb.init", given))
            points = self.runs["wandb"].setdefault(given["id"], [])
            return SimpleNamespace(
                define_metric=lambda name, step_metric: None,
                log=lambda values: points.append((values["step"], {k: v for k, v in values.items() if k != "step"})),
                finish=lambda: self.calls.append(("wandb.finish", None)),
            )

        module.init = init  # type: ignore[attr-defined]
        return module

    # --- trackio ---

    def trackio(self) -> ModuleType:
        module, now = ModuleType("trackio"), list[str]()

        def init(**given: Any) -> None:
            self.calls.append(("trackio.init", given))
            now[:] = [given["name"]]
            self.runs["trackio"].setdefault(given["name"], [])

        module.init = init  # type: ignore[attr-defined]
        module.log = lambda values, step: self.runs["trackio"][now[0]].append((step, values))  # type: ignore[attr-defined]
        module.finish = lambda: self.calls.append(("trackio.finish", None))  # type: ignore[attr-defined]
        return module

    # --- MLflow ---

    def mlflow(self) -> ModuleType:
        tools, made = self, dict[str, Any]()

        class MlflowClient:
            def __init__(self, tracking_uri: str | None) -> None:
                tools.calls.append(("mlflow", tracking_uri))

            def get_experiment_by_name(self, name: str) -> Any:
                return made.get(name)

            def create_experiment(self, name: str) -> str:
                made[name] = SimpleNamespace(experiment_id="1")
                return "1"

            def search_runs(self, experiments: list[str], filter_string: str) -> list[Any]:
                known = [each for each in tools.runs["mlflow"] if f"'{each}'" in filter_string]
                return [SimpleNamespace(info=SimpleNamespace(run_id=each)) for each in known]

            def create_run(self, experiment: str, tags: dict[str, str], run_name: str) -> Any:
                tools.runs["mlflow"][tags["megalith"]] = []
                return SimpleNamespace(info=SimpleNamespace(run_id=tags["megalith"]))

            def set_tag(self, run: str, key: str, value: str) -> None: ...

            def update_run(self, run: str, status: str) -> None: ...

            def log_metric(self, run: str, key: str, value: float, timestamp: int, step: int) -> None:
                points = tools.runs["mlflow"][run]
                if not points or points[-1][0] != step:
                    points.append((step, {}))
                points[-1][1][key] = value

            def set_terminated(self, run: str) -> None:
                tools.calls.append(("mlflow.end", run))

        module = ModuleType("mlflow")
        module.MlflowClient = MlflowClient  # type: ignore[attr-defined]
        return module


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> Tools:
    found = Tools()
    monkeypatch.setenv("TRACKIO_DIR", "unused")
    for name in SERVED:
        monkeypatch.setitem(sys.modules, name, getattr(found, name)())
    return found


def write(folder: Path, *steps: int) -> None:
    log = EventLog(folder)
    for step in steps:
        log.write(Step(step=step, loss=5.0 - step, tokens_seen=8 * step, breakdown={"forward": 0.5}, memory={}, **REST))
    log.close()


ALL = LogSpec(wandb=True, trackio=True, mlflow=True)


def test_a_run_that_is_resumed_is_one_run_without_a_point_twice(tools: Tools, tmp_path: Path) -> None:
    for steps in ((1, 2), (3, 4)):
        write(tmp_path, *steps)
        Feed(tmp_path, ALL, warn=pytest.fail).close()
    for name in SERVED:
        ((_, points),) = tools.runs[name].items()
        assert [(step, values["train/loss"]) for step, values in points] == [(1, 4.0), (2, 3.0), (3, 2.0), (4, 1.0)], name
        assert all("train/mfu" not in values for _, values in points), "an unknown MFU is not a zero"


def test_a_new_epoch_of_the_log_is_sent_from_where_it_differs(tools: Tools, tmp_path: Path) -> None:
    """The epoch's owner copied the log when it began, perhaps before the last lines of the previous owner."""

    def sent(*steps: int) -> list[int]:
        write(tmp_path, *steps)
        Feed(tmp_path, LogSpec(wandb=True), warn=pytest.fail).close()
        ((_, points),) = tools.runs["wandb"].items()
        return [step for step, _ in points]

    sent(1, 2)
    epochs.begin(tmp_path, 1)
    assert sent(3) == [1, 2, 3]
    early = (tmp_path / "events-1.jsonl").read_bytes()
    assert sent(4) == [1, 2, 3, 4]
    (tmp_path / "events-2.jsonl").write_bytes(early)
    assert sent(5) == [1, 2, 3, 4, 5]


def test_nothing_leaves_the_machine_unless_it_is_asked_for(tools: Tools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 1)
    monkeypatch.setenv("TRACKIO_SPACE_ID", "me/space")
    Feed(tmp_path, ALL.model_copy(update={"online": True}), warn=pytest.fail).close()
    Feed(tmp_path, ALL, warn=pytest.fail).close()
    given = {name: [what for call, what in tools.calls if call == name] for name in ("wandb.init", "trackio.init", "mlflow")}
    assert [each["mode"] for each in given["wandb.init"]] == ["online", "offline"]
    assert [each["space_id"] for each in given["trackio.init"]] == ["me/space", None]
    assert given["mlflow"] == [None, f"sqlite:///{tmp_path / 'mlflow.db'}"]


@pytest.mark.parametrize("fails", ["init", "log"])
def test_a_tool_that_fails_is_given_up_and_the_others_go_on(fails: str, tools: Tools, tmp_path: Path) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise OSError("the disk is full")

    setattr(sys.modules["trackio"], fails, broken)
    write(tmp_path, 1, 2)
    said: list[str] = []
    Feed(tmp_path, ALL, warn=said.append).close()
    assert len(said) == 1 and "log.trackio" in said[0] and "the disk is full" in said[0]
    assert len(next(iter(tools.runs["wandb"].values()))) == len(next(iter(tools.runs["mlflow"].values()))) == 2


def test_a_log_of_which_half_a_line_is_there_waits(tools: Tools, tmp_path: Path) -> None:
    write(tmp_path, 1)
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"type": "st')
    feed = Feed(tmp_path, LogSpec(wandb=True), warn=pytest.fail)
    feed.poll()
    feed.poll()
    assert len(next(iter(tools.runs["wandb"].values()))) == 1


def test_tensorboard_shows_one_run_of_a_run_that_is_resumed(tmp_path: Path) -> None:
    """Steps that are repeated after a fault are shown once, and a start from an older log replaces the earlier points."""
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs the extra tensorboard"
    )
    log = LogSpec(tensorboard=True)
    for steps in ((1, 2, 3), (3, 4)):
        write(tmp_path, *steps)
        Feed(tmp_path, log, warn=pytest.fail).close()
    events = EventLog(tmp_path)
    events.write(Validation(step=4, loss=4.5, domains={"tale": 4.25}, seconds=1.0))
    events.close()
    Feed(tmp_path, log, warn=pytest.fail).close()
    board = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in board.Scalars("train/loss")] == [(1, 4.0), (2, 3.0), (3, 2.0), (4, 1.0)]
    assert [event.value for event in board.Scalars("validation/tale")] == [4.25]
    assert {"train/lr", "seconds/forward"} <= set(board.Tags()["scalars"]) and "train/mfu" not in board.Tags()["scalars"]
    assert [path for path in (tmp_path / "tensorboard").iterdir() if path.is_dir()] == [], "no further runs"


def test_tensorboard_that_cannot_write_costs_its_files_alone(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs the extra tensorboard")
    write(tmp_path, 1)
    (tmp_path / "tensorboard").write_text("a file, where a folder is needed")
    said: list[str] = []
    Feed(tmp_path, LogSpec(tensorboard=True), warn=said.append).close()
    assert len(said) == 1 and "log.tensorboard: no more numbers are sent" in said[0]


def test_numbers_are_named_alike_everywhere() -> None:
    found = numbers_of(Validation(step=2, loss=4.5, domains={"tale": 4.25, "verse": float("nan")}, seconds=1.0))
    assert found == {"validation/loss": 4.5, "validation/tale": 4.25}


@pytest.mark.slow
def test_the_process_beside_a_training_feeds_them_and_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its package each tool is given up, with a note in the log. The training process is not affected."""
    run = tmp_path / "run"
    write(run, 1)
    (run / "run.toml").write_text("")
    lacking = [name for name in SINKS if subprocess.run([sys.executable, "-c", f"import {name}"], capture_output=True).returncode]
    if not lacking:  # each tool's own tests are above; this one covers a missing tool
        pytest.skip("all tools are installed, and none can be given up")
    with WatchHelpers(run, serves=False, log=LogSpec.model_validate(dict.fromkeys(lacking, True))) as helpers:
        helpers.poll()
        assert helpers._feeding is not None
    helpers._feeding.wait(PATIENCE)
    text = (run / "events.jsonl").read_text()
    assert all(f"log.{name}: no more numbers are sent" in text for name in lacking)


def test_check_names_a_tool_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megalith.check.software.find_spec", lambda name: None)
    found = {problem.key for problem in check(tiny_run(log={"wandb": True, "mlflow": True})) if problem.severity == "error"}
    assert {"log.wandb", "log.mlflow"} <= found
    assert "log.online" in {problem.key for problem in check(tiny_run(log={"online": True}), files=False)}
    assert set(sinks.KINDS) == set(SINKS)
