"""A controller's view of many machines: agents as threads of this process, each with ranks of its own, over a dictionary."""

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megalith.fleet import agent, letters, remote
from megalith.fleet.agent import Agent
from megalith.fleet.causes import Exit, Failure
from megalith.fleet.exit_codes import ExitCode
from megalith.fleet.job import Job
from megalith.fleet.local import LocalNodes
from megalith.fleet.nodes import Generation
from megalith.fleet.remote import RemoteNodes, node_logs
from megalith.fleet.signs import HealthChecked, NodeJoined, NodesLost
from megalith.spec.fleet import FleetSpec
from tests.fleet.conftest import until
from tests.fleet.stores import Dictionary

SECONDS = 100.0  # of silence that make a node lost here: the machine may be busy


class Fleet:
    """A controller's nodes, and agents that can be started and cut off."""

    def __init__(self, job: Job) -> None:
        self.job, self.store = job, Dictionary()
        self.nodes = RemoteNodes(self.store, job, FleetSpec(node_timeout=SECONDS))
        self.agents: dict[str, Agent] = {}
        self.threads: list[threading.Thread] = []
        self.codes: dict[str, int] = {}
        self.reasons: dict[str, str] = {}

    def join(self, name: str, *, order: int = 0, deaf: bool = False) -> None:
        local = LocalNodes(self.job, names=(name,), folder=node_logs(self.job.run_dir, name))
        store = Unreachable(self.store) if deaf else self.store

        def cut_off(why: str) -> None:
            self.reasons[name] = why

        self.agents[name] = joining = Agent(
            name, local, order=order, store=self.store, beating=store, seconds=1.0 if deaf else SECONDS, cut_off=cut_off
        )

        def run() -> None:
            self.codes[name] = joining.run()

        thread = threading.Thread(target=run)
        thread.start()
        self.threads.append(thread)

    def until(self, true: Callable[[list[Any]], bool]) -> list[Any]:
        """Listen until what was heard is enough."""
        heard: list[Any] = []
        end = time.monotonic() + SECONDS
        while not true(heard):
            heard += self.nodes.wait(0.1)
            assert time.monotonic() < end, heard
        return heard


class Unreachable(Dictionary):
    """A connection that has been cut: what is sent never arrives."""

    def __init__(self, behind: Dictionary) -> None:
        super().__init__()
        self.behind = behind

    def set(self, key: str, value: str) -> None:
        raise RuntimeError("no route to host")


@pytest.fixture
def fleet(job: Callable[..., Job]) -> Iterator[Callable[..., Fleet]]:
    made: list[Fleet] = []

    def make(entry: str, **rest: Any) -> Fleet:
        made.append(Fleet(job(entry, ranks=4, **rest)))
        return made[-1]

    yield make
    for one in made:
        one.nodes.leave(ExitCode.LOST, forget=True)
        for thread in one.threads:
            thread.join(timeout=SECONDS)
        assert not any(thread.is_alive() for thread in one.threads)


def _waiting(fleet: Callable[..., Fleet]) -> Fleet:
    """Two nodes with two ranks each, which wait."""
    run = fleet("wait")
    for name in "ab":
        run.join(name)
    run.nodes.await_nodes(2, 2, seconds=SECONDS)
    run.nodes.start(Generation("g1", ("a", "b")))
    run.until(lambda _: all(beat.ready for beat in run.nodes.beats()))
    return run


def _ends(heard: list[Any]) -> set[int]:
    return {what.rank for what in heard if isinstance(what, Exit | Failure)}


def test_slots_and_not_machines_give_ranks_their_numbers(fleet: Callable[..., Fleet], tmp_path: Path) -> None:
    run = fleet("finish", word="hello")
    for order, name in enumerate(("c", "a", "b")):
        run.join(name, order=order)
    assert run.nodes.await_nodes(2, 3, seconds=SECONDS) == ("c", "a", "b")
    run.nodes.start(Generation("g1", ("b", "c")))
    heard = run.until(lambda heard: len(_ends(heard)) == 4)
    assert sorted((end.rank, end.code) for end in heard if isinstance(end, Exit)) == [(0, 0), (1, 0), (2, 0), (3, 0)]
    for rank, node in enumerate("bbcc"):
        assert "hello from rank" in run.nodes.log(rank).read_text()
        assert run.nodes.log(rank) == tmp_path / f"ranks/node-{node}/rank-{rank}.log"
    assert run.nodes.running() == frozenset()
    run.nodes.leave(ExitCode.FINISHED, forget=True)
    until(lambda: len(run.codes) == 3, seconds=SECONDS)
    assert set(run.codes.values()) == {ExitCode.FINISHED}


def test_a_node_that_dies_while_it_is_asked_is_not_waited_for(tmp_path: Path) -> None:
    """To ask for copies may take a minute; a dead one is lost after its silence, and told of."""
    store = Dictionary()
    nodes = RemoteNodes(store, Job("nobody:calls", {}, ranks=2, run_dir=tmp_path), FleetSpec(node_timeout=0.3))
    store.set(letters.member_key(store.add(letters.JOINED, 1)), json.dumps({"name": "a", "order": 0}))
    assert [type(sign) for sign in nodes.wait(0.0)] == [NodeJoined]
    began = time.monotonic()
    assert nodes.survey(("a",)) == ()
    assert time.monotonic() - began < remote.SURVEY_SECONDS / 2
    (lost,) = nodes.wait(0.0)
    assert isinstance(lost, NodesLost)
    assert lost.nodes == ("a",)
    assert nodes.there() == ()


def test_an_agent_whose_store_is_gone_before_it_has_joined_offers_itself_anew(job: Callable[..., Job]) -> None:
    told = list[str]()
    local = LocalNodes(job("wait"), names=("a",))
    gone = Unreachable(Dictionary())
    agent = Agent("a", local, order=0, store=gone, beating=gone, seconds=SECONDS, cut_off=told.append)
    assert agent.run() == ExitCode.LOST
    assert told == ["the store no longer answers: no route to host"]


def test_beats_stacks_signals_and_the_ends_of_ranks_travel(fleet: Callable[..., Fleet]) -> None:
    run = _waiting(fleet)
    assert run.nodes.running() == {0, 1, 2, 3}
    looks = run.nodes.look([1, 2])
    assert all("in wait" in look.stack and not look.stopped for look in looks.values()), looks
    run.nodes.send(signal.SIGKILL, [3])
    [end] = [what for what in run.until(lambda heard: _ends(heard) == {3}) if isinstance(what, Failure)]
    assert "killed by SIGKILL" in end.reason
    run.nodes.send(signal.SIGKILL, run.nodes.running())
    run.until(lambda heard: len(_ends(heard)) == 3)
    run.nodes.check("b")
    run.nodes.check("nobody")
    checked = run.until(lambda heard: len(heard) == 2)
    assert {(sign.node, sign.passed) for sign in checked if isinstance(sign, HealthChecked)} == {("b", True), ("nobody", False)}


def test_an_agent_without_room_to_start_ranks_waits_for_some_and_takes_orders_meanwhile(
    fleet: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "QUEUED_SECONDS", SECONDS)
    monkeypatch.setattr(agent, "STORAGE_SECONDS", 0.0)
    run = _waiting(fleet)
    run.nodes.send(signal.SIGKILL, run.nodes.running())
    run.until(lambda heard: len(_ends(heard)) == 4)
    full = node_logs(run.job.run_dir, "b") / "job.json"
    full.unlink()
    full.symlink_to("/dev/full")
    run.nodes.start(Generation("g2", ("a", "b")))
    run.until(lambda _: run.nodes.running() == {0, 1})
    assert run.nodes.queued().keys() == {"a", "b"}
    assert run.threads[1].is_alive()
    monkeypatch.setattr(remote, "LOOK_SECONDS", SECONDS)
    assert run.agents["b"]._unstarted().reason == "could not write what the ranks meet by"
    full.unlink()
    run.until(lambda _: all(beat.ready for beat in run.nodes.beats()))
    assert run.nodes.running() == {0, 1, 2, 3}


def test_no_start_is_ordered_while_the_run_folder_is_full(tmp_path: Path) -> None:
    """Who directs waits for room, as it does where the nodes are of its own machine."""
    store = Dictionary()
    nodes = RemoteNodes(store, Job("nobody:calls", {}, ranks=1, run_dir=tmp_path), FleetSpec())
    letters.orders(store, store.add(letters.JOINED, 1))
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks" / "room").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        nodes.start(Generation("g1", ("a",)))
    nodes.start(Generation("g1", ("a",)))
    assert not list((tmp_path / "ranks").iterdir())


def test_agents_tell_how_long_their_ranks_waited_for_processors(
    fleet: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "QUEUED_SECONDS", SECONDS)
    monkeypatch.setattr(LocalNodes, "queued", lambda self: {"": 2.0 * len(self.running())})
    run = _waiting(fleet)
    assert run.nodes.queued() == {"a": 4.0, "b": 4.0}


def test_a_node_that_is_being_taken_away_is_gone_to_whoever_asks_whether_it_is_fit(fleet: Callable[..., Fleet]) -> None:
    """It would pass its check, get an empty slot, and be killed there again."""
    run = fleet("wait")
    run.join("a")
    run.nodes.await_nodes(1, 1, seconds=SECONDS)
    run.agents["a"]._asked_to_go = True
    run.nodes.check("a")
    heard = run.until(lambda heard: any(isinstance(what, HealthChecked) for what in heard))
    assert [(what.node, what.passed, what.there) for what in heard if isinstance(what, HealthChecked)] == [("a", False, False)]


def test_a_node_joins_once_ranks_could_start_there_at_once(fleet: Callable[..., Fleet]) -> None:
    """Its imports would otherwise look like a hang of the first ranks that it is given."""
    run = fleet("finish", word="hello", preload=("megalith.spec.run",))
    run.join("a")
    run.nodes.await_nodes(1, 1, seconds=SECONDS)
    warmed = run.agents["a"]._nodes._processes
    assert warmed is not None and warmed.fit


def test_a_node_that_cannot_import_what_ranks_need_joins_and_says_so(fleet: Callable[..., Fleet]) -> None:
    run = fleet("finish", word="hello", preload=("tests.fleet.nowhere",))
    run.join("a")
    heard = run.until(lambda heard: any(isinstance(what, Failure) for what in heard))
    assert any("No module named 'tests.fleet.nowhere'" in what.error for what in heard if isinstance(what, Failure))


def test_a_silent_node_is_lost_and_ends_its_own_ranks_and_another_takes_its_slot(fleet: Callable[..., Fleet]) -> None:
    run = fleet("wait")
    run.join("a")
    run.join("b", deaf=True)
    run.join("spare")
    run.nodes.await_nodes(3, 3, seconds=SECONDS)
    run.nodes.start(Generation("g1", ("a", "b")))
    until(lambda: run.codes.get("b") == ExitCode.LOST, seconds=SECONDS)
    assert run.reasons["b"] == "the store was not reached for 1 s"
    run.nodes._members["b"].seen -= SECONDS  # the time goes by
    heard = run.until(lambda heard: any(isinstance(what, NodesLost) for what in heard))
    assert [what.nodes for what in heard if isinstance(what, NodesLost)] == [("b",)]
    assert run.nodes.running() <= {0, 1}
    run.nodes.send(signal.SIGKILL, run.nodes.running())
    run.until(lambda _: not run.nodes.running())
    run.nodes.start(Generation("g2", ("a", "spare")))
    run.until(lambda _: all(beat.ready for beat in run.nodes.beats()))
    assert run.nodes.log(2).parent.name == "node-spare"


def test_a_node_that_joins_again_under_its_name_was_lost_before(fleet: Callable[..., Fleet]) -> None:
    run = fleet("wait")
    run.join("a")
    run.nodes.await_nodes(1, 1, seconds=SECONDS)
    run.join("a")
    heard = run.until(lambda heard: len(heard) >= 2)
    assert [type(what) for what in heard] == [NodesLost, NodeJoined]
    until(lambda: "given up" in run.reasons.get("a", ""), seconds=SECONDS)


def test_too_few_nodes_are_an_error_that_names_those_that_came(fleet: Callable[..., Fleet]) -> None:
    run = fleet("wait")
    run.join("only")
    run.nodes.await_nodes(1, 1, seconds=SECONDS)
    with pytest.raises(TimeoutError, match=r"1 of 2 nodes came within 0\.5 s \(only\)"):
        run.nodes.await_nodes(2, 3, seconds=0.5)
