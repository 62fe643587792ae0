"""One machine of a run on many, as it is printed."""

import json
from pathlib import Path

import pytest

from megalith.commands import agent
from megalith.commands.train import Trained
from tests.commands.calling import call


def test_an_agent_ends_with_the_runs_exit_status_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(agent, "agent", lambda request, **_: Trained(Path("runs/first"), 75, "stopped as asked", None))
    told = call("agent", "run.toml", "--json")
    assert (told.exit_code, json.loads(told.stdout)["code"], json.loads(told.stdout)["ok"]) == (75, 75, False)
    assert "stopped as asked" in call("agent", "run.toml").stderr
