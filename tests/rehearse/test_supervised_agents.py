"""Agents on one machine, managed as by an engine: they are started, and started again some time after they were killed."""

import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

import pytest

from megalith.fleet.environment import MEETING
from megalith.fleet.exit_codes import ExitCode
from megalith.rehearse import supervised_agents
from megalith.rehearse.supervised_agents import SupervisedAgents
from tests.fleet.conftest import until
from tests.patience import PATIENCE


class Engine:
    """Starts waiting processes in place of agents, and records their arguments."""

    def __init__(self, *, then: str = "time.sleep(1000)") -> None:
        self.then, self.started, self.told = then, list[subprocess.Popen[bytes]](), list[tuple[list[str], dict[str, str]]]()

    def begin(self, arguments: Sequence[str], variables: Mapping[str, str]) -> "subprocess.Popen[bytes]":
        self.told.append((list(arguments), dict(variables)))
        self.started.append(subprocess.Popen([sys.executable, "-S", "-c", f"import sys, time; {self.then}"]))
        return self.started[-1]


@pytest.mark.slow
def test_one_that_is_killed_joins_anew_once_its_machine_is_repaired(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervised_agents, "LEAVE_SECONDS", 0.2)
    engine, repair = Engine(), 0.3
    with SupervisedAgents(("a", "b", "c"), repair) as agents:
        assert agents.place("a")[1] == {
            "RANK": "0",
            "WORLD_SIZE": "3",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(agents.port),
        }
        agents.tend(engine.begin)
        assert [words for words, _ in engine.told] == [["--machine", "b"], ["--machine", "c"]], "the first is its owner's"
        assert [variables["RANK"] for _, variables in engine.told] == ["1", "2"]
        engine.started[0].send_signal(signal.SIGKILL)
        engine.started[0].wait()
        killed = time.monotonic()
        while len(engine.told) < 3:
            agents.tend(engine.begin)
        assert time.monotonic() - killed >= repair
        assert engine.told[2] == (["--machine", "b"], engine.told[0][1] | {MEETING: f"tcp://127.0.0.1:{agents.port}"})
        agents.tend(engine.begin)
        assert len(engine.told) == 3
        assert agents.unexplained == 0
    assert all(process.poll() is not None for process in engine.started), "nobody is left"


@pytest.mark.parametrize(("code", "again"), [(ExitCode.FINISHED, False), (ExitCode.STOPPED, False), (ExitCode.LOST, True)])
def test_one_that_ends_in_order_is_not_started_again_and_any_other_end_is_noted(code: int, again: bool) -> None:
    engine = Engine(then=f"sys.exit({int(code)})")
    with SupervisedAgents(("a", "b"), 0.0) as agents:
        agents.tend(engine.begin)
        until(lambda: engine.started[0].poll() is not None, seconds=PATIENCE)
        agents.tend(engine.begin)
    assert (len(engine.told), agents.unexplained) == ((2, 1) if again else (1, 0))
