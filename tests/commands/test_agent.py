"""Output of one machine in a run on many, and the additional processes on the director's machine."""

import json
import subprocess
import time
from pathlib import Path

import pytest

from megalith.commands import agent
from megalith.commands.train import TrainResult
from megalith.control.outcome import Outcome
from megalith.control.owner import hold
from megalith.train import agents
from megalith.watch import helpers
from tests.commands.calling import call
from tests.patience import PATIENCE


def test_an_agent_ends_with_the_runs_exit_status_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(agent, "agent", lambda request, **_: TrainResult(Path("runs/first"), 75, "stopped as asked", None))
    told = call("agent", "run.toml", "--json")
    assert (told.exit_code, json.loads(told.stdout)["code"], json.loads(told.stdout)["ok"]) == (75, 75, False)
    assert "stopped as asked" in call("agent", "run.toml").stderr


@pytest.mark.slow
def test_a_single_machine_directs_a_run_unless_another_command_holds_its_folder(monkeypatch: pytest.MonkeyPatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    with hold(Path("runs/first")):
        told = call("agent", "run.toml", "--set", "fleet.nodes=1")
    assert told.exit_code != 0 and "in use by process" in told.stderr


@pytest.mark.slow
def test_the_agent_that_directs_feeds_other_tools(monkeypatch: pytest.MonkeyPatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("megalith.check.software.find_spec", lambda name: name)  # pretend that the tool is installed
    kept, started = Path("runs/first/sinks.json"), list[subprocess.Popen[bytes]]()
    start = helpers._told
    monkeypatch.setattr(helpers, "_told", lambda command, what: started.append(start(command, what)) or started[-1])

    def direct(host: object, place: object, **given: object) -> Outcome:
        tick = given["tick"]
        assert callable(tick)
        tick()
        end = time.monotonic() + PATIENCE
        while not kept.exists() and time.monotonic() < end:
            time.sleep(0.02)
        return Outcome(0, False, None, (), (), (), None)

    monkeypatch.setattr(agents, "direct", direct)
    words = ("plan.data=2", "fleet.nodes=2", "fleet.check=return", "log.wandb=true")
    told = call("agent", "run.toml", *(word for setting in words for word in ("--set", setting)))
    assert told.exit_code == 0, told.output
    assert started[0].wait(PATIENCE) == 0, "it ends with the agent"
    assert json.loads(kept.read_text()).keys() >= {"id", "done"}
