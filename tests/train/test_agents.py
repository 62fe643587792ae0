"""What an agent must know before it can join a run."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megalith.fleet.environment import Place
from megalith.fleet.job import Job
from megalith.spec.fleet import FleetSpec
from megalith.train import agents
from megalith.train.agents import MEETING, Host, _interface_to, directs, own_name, serve_node


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
    """A machine that was too busy to speak would otherwise be lost for good, and the run wait for it."""
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


def test_a_machine_that_nobody_tells_where_to_meet_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="MEGALITH_MEETING=tcp://HOST:PORT"):
        serve_node(_host(tmp_path), None)


def test_ranks_talk_over_the_interface_that_reaches_the_store() -> None:
    assert _interface_to("tcp://127.0.0.1:29500") == "lo"


def test_a_name_that_cannot_be_a_folder_is_refused() -> None:
    assert own_name("node-7") == "node-7" and own_name(None)
    with pytest.raises(ValueError, match="'a/b' is no name for a node"):
        own_name("a/b")
