"""A folder with a run file and prepared data, in which the tests call commands, and launchers that start nothing."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megalith.control import controller, supervisor
from megalith.control.outcome import Outcome
from megalith.fleet import environment
from megalith.fleet.exit_codes import ExitCode
from tests.commands.calling import RUN, write_run

FOUR_RANKS = """plan = { data = 2, pipeline = 2 }
launch = { threads = 1, start_timeout = 30 }
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory: a run file of one rank beside prepared data."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("MEGALITH_TRACEBACK", raising=False)
    write_run()
    return tmp_path


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the run file, changed to four ranks that no launcher has started."""
    Path("run.toml").write_text(RUN + FOUR_RANKS)
    monkeypatch.setattr(environment, "find", lambda: None)
    return Path("run.toml")


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[supervisor.Job]:
    """The jobs that would have been started."""
    started: list[supervisor.Job] = []

    def start(job: supervisor.Job, *, tick: Any = None, **_: Any) -> Outcome:
        started.append(job)
        if tick:
            tick()
        return Outcome(ExitCode.FINISHED, False, None, (), (), (), 1.0)

    monkeypatch.setattr(supervisor, "run", start)
    monkeypatch.setattr(controller, "run_here", lambda job, *, tick, **_: start(job, tick=tick))
    return started


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Record the arguments of a rank's entry. It replaces the real entry, which needs torch."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setitem(sys.modules, "megalith.train.run", SimpleNamespace(main=lambda **arguments: calls.append(arguments)))
    return calls
