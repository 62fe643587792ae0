"""The information that an agent needs to join a run."""

import os
import signal
import stat
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal, cast

import pytest

from megalith.fleet import messages
from megalith.fleet.environment import MEETING, Place
from megalith.fleet.exit_codes import ExitCode
from megalith.fleet.job import Job
from megalith.fleet.nodes import Generation
from megalith.fleet.observations import NodesLost
from megalith.fleet.remote import RemoteNodes
from megalith.fleet.secure import key
from megalith.fleet.secure.key import NoKey
from megalith.fleet.secure.store_client import StoreClient
from megalith.fleet.secure.store_server import listen
from megalith.machine import admission
from megalith.machine.health import Finding
from megalith.spec.fleet import FleetSpec
from megalith.train import agents
from megalith.train.agents import Host, _interface_to, directs, own_name, serve_node
from megalith.train.store import serve
from tests.fleet.conftest import until
from tests.fleet.stores import Dictionary
from tests.keys import KEY
from tests.patience import PATIENCE


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the key from the environment: neither an outer one nor that of the previous test, which sets one for its
    ranks, may remain."""
    monkeypatch.setenv(key.VARIABLE, "")
    monkeypatch.delenv(key.VARIABLE)


def _host(tmp_path: Path, name: str = "a") -> Host:
    job = Job("tests.fleet.entries:finish", {}, ranks=2, run_dir=tmp_path, start_timeout=1.0)
    return Host(job, FleetSpec(), name, "what it computes", open_data=lambda: None)


def test_nodes_of_one_machine_keep_their_copies_apart(tmp_path: Path) -> None:
    assert _host(tmp_path, "a").memory != _host(tmp_path, "b").memory
    assert _host(tmp_path, "a").memory == _host(tmp_path, "a").memory


def test_the_engines_first_process_directs_unless_it_joins_a_run_that_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    places = [Place(rank, 2, 0, 1, "torchrun", "tcp://h:1", None) for rank in range(2)]
    assert [directs(place) for place in (*places, None)] == [True, False, False]
    monkeypatch.setenv(MEETING, "tcp://h:1")
    assert not directs(places[0])


def test_the_directors_own_agent_joins_anew_as_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a machine that was too busy to send heartbeats would be lost for good, and the run would wait for it."""
    told = tmp_path / "told"

    def serve(host: Host, meeting: str, *, order: int, cut_off: Callable[[str], object]) -> int:
        return 0 * told.write_text(f"{os.environ[MEETING]} {cut_off.__name__}")

    monkeypatch.setattr(agents, "_serve", serve)
    parent = os.getpid()
    agent = os.fork()
    if agent == 0:
        agents._be_the_agent(_host(tmp_path), "tcp://h:1", parent=parent)
    assert os.waitpid(agent, 0)[1] == 0
    assert told.read_text() == "tcp://h:1 _begin_anew"


def test_the_directors_own_agent_is_started_again_when_it_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No engine knows the agent. An agent that leaves by itself is not called back."""
    told = tmp_path / "told"
    program = f"import os, pathlib; pathlib.Path({str(told)!r}).write_text(os.environ[{MEETING!r}])"
    monkeypatch.setattr(agents, "_be_the_agent", lambda host, meeting, parent: signal.pause())
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, "-S", "-c", program])
    own = agents._OwnAgent(_host(tmp_path), "tcp://h:1")
    own.tend()
    assert own._again is None
    os.kill(own._forked, signal.SIGKILL)
    until(lambda: (own.tend(), own._again is not None)[1], seconds=PATIENCE)
    again = own._again
    until(lambda: (own.tend(), own._code == 0)[1], seconds=PATIENCE)
    own.tend()
    own.end()
    assert own._again is again
    assert told.read_text() == "tcp://h:1"


def test_a_machine_that_nobody_tells_where_to_meet_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="MEGALITH_MEETING=tcp://HOST:PORT"):
        serve_node(_host(tmp_path), None)


@pytest.mark.parametrize("address", ["tcp://10.1.2.3:29500", "tcp://node7:29500", "tcp://[fd00::1]:29500"])
def test_machines_without_a_key_do_not_start_and_say_how_to_make_one(tmp_path: Path, address: str) -> None:
    place = Place(1, 2, 0, 1, "variables", address, None)
    with pytest.raises(NoKey, match=f"megalith key {tmp_path}"):
        serve_node(_host(tmp_path), place)
    assert not key.path_in(tmp_path).exists()
    key.make(tmp_path)
    assert agents._take_key(_host(tmp_path), address).text == key.path_in(tmp_path).read_text().strip()


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:29500", "tcp://localhost:29500", "tcp://[::1]:29500"])
def test_agents_of_one_machine_make_a_key_without_a_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], address: str
) -> None:
    first = agents._take_key(_host(tmp_path), address)
    assert agents._take_key(_host(tmp_path), "tcp://10.1.2.3:1") == first, "handed on by the environment"
    assert capsys.readouterr() == ("", "")
    assert stat.S_IMODE(key.path_in(tmp_path).stat().st_mode) == 0o600


@pytest.mark.parametrize("kind", ["torchrun", "slurm"])
def test_agents_that_a_launcher_starts_on_one_machine_make_a_key_whatever_the_machine_is_called(
    kind: Literal["torchrun", "slurm"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other machines may reach the address, so the key must be as secret as that of several machines."""
    monkeypatch.setattr(agents, "_agree", lambda place, meeting, seconds: place.store)
    monkeypatch.setattr(agents, "_serve", lambda host, meeting, order, cut_off: 0)

    def taken(rank: int, local_world: int = 2) -> str:
        monkeypatch.delenv(key.VARIABLE, raising=False)
        monkeypatch.delenv(MEETING, raising=False)
        serve_node(_host(tmp_path), Place(rank, 2, rank % local_world, local_world, kind, "tcp://node7:29500", None))
        return os.environ[key.VARIABLE]

    with pytest.raises(NoKey):
        taken(1, local_world=1)
    assert taken(1) == taken(0) == key.path_in(tmp_path).read_text().strip()
    assert capsys.readouterr() == ("", "")
    assert stat.S_IMODE(key.path_in(tmp_path).stat().st_mode) == 0o600
    key.path_in(tmp_path).chmod(0o644)
    with pytest.raises(NoKey, match="mode 0644"):
        taken(1)


def test_ranks_talk_over_the_interface_that_reaches_the_store() -> None:
    assert _interface_to("tcp://127.0.0.1:29500") == "lo"


def test_a_name_that_cannot_be_a_folder_is_refused() -> None:
    assert own_name("node-7") == "node-7" and own_name(None)
    with pytest.raises(ValueError, match="'a/b' is not a name for a node"):
        own_name("a/b")


def test_a_machine_that_is_not_fit_does_not_join_and_tells_the_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    short = Finding("memory", "fail", "1 MiB", "at least 256 MiB", "Stop other programs on this machine")
    monkeypatch.setattr(admission, "before_start", lambda folder: [short])
    host, store = _host(tmp_path), Dictionary()
    assert not agents._is_fit(host, store, seconds=0.0)
    assert b"1 MiB" in store.get(messages.refused_key(1))
    assert "not fit to join" in capsys.readouterr().err
    assert agents._is_fit(replace(host, fleet=FleetSpec(check="return")), store, seconds=0.0)


def _fork_agent(host: Host, meeting: str) -> int:
    process = os.fork()
    if process == 0:
        try:
            os._exit(agents._serve(host, meeting, order=0, cut_off=lambda why: os._exit(ExitCode.LOST)))
        finally:
            os._exit(1)
    return process


class _Paced:
    """A controller's clock that waits for live nodes: it advances at most MAXIMUM seconds beyond the last heartbeat of each."""

    MAXIMUM = 0.5

    def __init__(self, names: str) -> None:
        self.names, self.now, self.nodes = names, 0.0, cast(RemoteNodes, None)
        self._real, self._lives, self._since = time.monotonic(), dict[str, str](), dict[str, float]()

    def __call__(self) -> float:
        before, self._real = self._real, time.monotonic()
        members = self.nodes._members if self.nodes else {}
        for name in set(self.names) & set(members):
            if name not in self._since or members[name].life != self._lives.get(name):
                self._lives[name], self._since[name] = members[name].life, self.now
        if all(self.now - self._since.get(name, self.now) < self.MAXIMUM for name in self.names):
            self.now += min(self._real - before, 0.1)
        return self.now


@pytest.mark.slow
def test_by_default_a_node_that_falls_silent_is_lost_after_three_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent's connections stay open, so that only its silence shows. When it wakes up it finds that it was given up."""
    monkeypatch.setenv(key.VARIABLE, KEY.text)
    server = listen("127.0.0.1", 0)
    meeting = f"tcp://127.0.0.1:{server.getsockname()[1]}"
    keeper = serve(server, KEY)
    job = Job("tests.fleet.entries:wait", {}, ranks=2, run_dir=tmp_path, start_timeout=PATIENCE)
    patient = FleetSpec(node_timeout=PATIENCE)  # timeout without the store; heartbeats have the default interval
    processes = {name: _fork_agent(Host(job, patient, name, "silence", open_data=lambda: None), meeting) for name in "ab"}
    clock = _Paced("ab")
    nodes = clock.nodes = RemoteNodes(StoreClient(meeting, KEY, seconds=PATIENCE), job, FleetSpec(), clock=clock)
    try:
        nodes.await_nodes(2, 2, seconds=PATIENCE)
        nodes.start(Generation("g1", ("a", "b")))
        until(lambda: nodes.wait(0.1) == [] and all(beat.ready for beat in nodes.beats()), seconds=PATIENCE)
        os.kill(processes["b"], signal.SIGSTOP)
        clock.names, silent, lost = "a", clock.now, dict[str, float]()
        while "b" not in lost:
            for observation in nodes.wait(0.1):
                lost |= dict.fromkeys(observation.nodes, clock.now - silent) if isinstance(observation, NodesLost) else {}
        assert 3.0 - _Paced.MAXIMUM <= lost["b"] <= 3.0 + _Paced.MAXIMUM
        os.kill(processes["b"], signal.SIGCONT)
        assert os.waitstatus_to_exitcode(os.waitpid(processes.pop("b"), 0)[1]) == ExitCode.LOST
        nodes.leave(ExitCode.FINISHED, forget=True)
        assert os.waitstatus_to_exitcode(os.waitpid(processes.pop("a"), 0)[1]) == ExitCode.FINISHED
    finally:
        for process in (*processes.values(), keeper):
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
