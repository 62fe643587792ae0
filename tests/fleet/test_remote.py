"""A controller and many machines: agents are threads of this process, each with its own ranks, and the store is a dictionary."""

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megalith.fleet import agent, messages, remote
from megalith.fleet.agent import Agent
from megalith.fleet.causes import Exit, Failure
from megalith.fleet.exit_codes import ExitCode
from megalith.fleet.job import Job
from megalith.fleet.local import LocalNodes
from megalith.fleet.nodes import Generation
from megalith.fleet.observations import HealthChecked, NodeJoined, NodesLost
from megalith.fleet.remote import RemoteNodes, node_logs
from megalith.spec.fleet import FleetSpec
from tests.fleet.conftest import until
from tests.fleet.stores import Dictionary

SECONDS = 100.0  # seconds of silence after which a node is lost here: the machine may be busy


class Fleet:
    """A controller's nodes, and agents that can be started and disconnected."""

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
        """Receive events until `true` holds for them."""
        heard: list[Any] = []
        end = time.monotonic() + SECONDS
        while not true(heard):
            heard += self.nodes.wait(0.1)
            assert time.monotonic() < end, heard
        return heard


class Unreachable(Dictionary):
    """A connection that has been cut: no message arrives any more."""

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
    """Start two nodes with two waiting ranks each."""
    run = fleet("wait")
    for name in "ab":
        run.join(name)
    run.nodes.await_nodes(2, 2, seconds=SECONDS)
    run.nodes.start(Generation("g1", ("a", "b")))
    run.until(lambda _: all(beat.ready for beat in run.nodes.beats()))
    return run


def _ends(heard: list[Any]) -> set[int]:
    return {what.rank for what in heard if isinstance(what, Exit | Failure)}


@pytest.mark.slow
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
    """A request for copies may take a minute, but a dead node is declared lost after its silence."""
    store, clock = Dictionary(), SimpleNamespace(now=0.0)

    def passing() -> float:
        clock.now += 0.01
        return clock.now

    nodes = RemoteNodes(store, Job("nobody:calls", {}, ranks=2, run_dir=tmp_path), FleetSpec(node_timeout=0.3), clock=passing)
    store.set(messages.member_key(store.add(messages.JOINED, 1)), json.dumps({"name": "a", "order": 0}))
    assert [type(observation) for observation in nodes.wait(0.0)] == [NodeJoined]
    assert nodes.survey(("a",)) == ()
    assert clock.now == pytest.approx(0.3, abs=0.1)
    (lost,) = nodes.wait(0.0)
    assert isinstance(lost, NodesLost)
    assert lost.nodes == ("a",)
    assert nodes.there() == ()


@pytest.mark.slow
def test_an_agent_whose_store_is_gone_before_it_has_joined_offers_itself_anew(job: Callable[..., Job]) -> None:
    told = list[str]()
    local = LocalNodes(job("wait"), names=("a",))
    gone = Unreachable(Dictionary())
    agent = Agent("a", local, order=0, store=gone, beating=gone, seconds=SECONDS, cut_off=told.append)
    assert agent.run() == ExitCode.LOST
    assert told == ["the run's store no longer answers: no route to host"]


@pytest.mark.slow
def test_beats_stacks_signals_and_the_ends_of_ranks_are_sent(fleet: Callable[..., Fleet]) -> None:
    run = _waiting(fleet)
    assert run.nodes.running() == {0, 1, 2, 3}
    looks = run.nodes.inspect([1, 2])
    assert all("in wait" in look.stack and not look.stopped for look in looks.values()), looks
    run.nodes.send(signal.SIGKILL, [3])
    [end] = [what for what in run.until(lambda heard: _ends(heard) == {3}) if isinstance(what, Failure)]
    assert "killed by SIGKILL" in end.reason
    run.nodes.send(signal.SIGKILL, run.nodes.running())
    run.until(lambda heard: len(_ends(heard)) == 3)
    run.nodes.check("b")
    run.nodes.check("nobody")
    checked = run.until(lambda heard: len(heard) == 2)
    assert {(observation.node, observation.passed) for observation in checked if isinstance(observation, HealthChecked)} == {
        ("b", True),
        ("nobody", False),
    }


@pytest.mark.slow
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
    failure = run.agents["b"]._unstarted()
    assert f"{failure.name} {failure.reason}".startswith("the agent could not write the files that ranks need to start, because")
    full.unlink()
    run.until(lambda _: all(beat.ready for beat in run.nodes.beats()))
    assert run.nodes.running() == {0, 1, 2, 3}


def test_no_start_is_ordered_while_the_run_folder_is_full(tmp_path: Path) -> None:
    """The controller waits for space on the disk, as it does with nodes on its own machine."""
    store = Dictionary()
    nodes = RemoteNodes(store, Job("nobody:calls", {}, ranks=1, run_dir=tmp_path), FleetSpec())
    messages.orders(store, store.add(messages.JOINED, 1))
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
    """Otherwise the node would pass its check, get an empty slot, and be killed there again."""
    run = fleet("wait")
    run.join("a")
    run.nodes.await_nodes(1, 1, seconds=SECONDS)
    run.agents["a"]._asked_to_go = True
    run.nodes.check("a")
    heard = run.until(lambda heard: any(isinstance(what, HealthChecked) for what in heard))
    assert [(what.node, what.passed, what.there) for what in heard if isinstance(what, HealthChecked)] == [("a", False, False)]


@pytest.mark.slow
def test_a_node_joins_once_ranks_could_start_there_at_once(fleet: Callable[..., Fleet]) -> None:
    """Otherwise its imports would look like a hang of its first ranks."""
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


@pytest.mark.slow
def test_a_silent_node_is_lost_and_ends_its_own_ranks_and_another_takes_its_slot(fleet: Callable[..., Fleet]) -> None:
    run = fleet("wait")
    run.join("a")
    run.join("b", deaf=True)
    run.join("spare")
    run.nodes.await_nodes(3, 3, seconds=SECONDS)
    run.nodes.start(Generation("g1", ("a", "b")))
    until(lambda: run.codes.get("b") == ExitCode.LOST, seconds=SECONDS)
    assert run.reasons["b"] == "the run's store was not reached for 1 s"
    run.nodes._members["b"].seen -= SECONDS  # time passes
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
    until(lambda: "declared this node lost" in run.reasons.get("a", ""), seconds=SECONDS)


def test_too_few_nodes_are_an_error_that_names_those_that_came(fleet: Callable[..., Fleet]) -> None:
    run = fleet("wait")
    run.join("only")
    run.nodes.await_nodes(1, 1, seconds=SECONDS)
    with pytest.raises(TimeoutError, match=r"1 of 2 nodes joined within 0\.5 s \(only\)"):
        run.nodes.await_nodes(2, 3, seconds=0.5)


# --- meaningless messages


NONSENSE = ["garbage{", "", "123", "[]", '{"name": 3}', "null", "[" * 100_000, '{"exit": {"rank": 0}, "generation": ""}']
NONSENSE += ['{"failure": 1, "generation": ""}', '{"sign": {"kind": "unheard"}}', '{"what": 1, "generation": ""}']
NONSENSE += ['{"count": 1, "generation": "g1", "ranks": {"0": 5}}', '{"count": 1}']


def test_nothing_that_an_agent_says_ends_the_controller(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = Dictionary()
    nodes = RemoteNodes(store, Job("nobody:calls", {}, ranks=2, run_dir=tmp_path), FleetSpec(node_timeout=SECONDS))
    for text in NONSENSE:
        store.set(messages.member_key(store.add(messages.JOINED, 1)), text)
        store.set(messages.refused_key(store.add(messages.REFUSED, 1)), text)
    assert nodes.wait(0.0) == []
    member = store.add(messages.JOINED, 1)
    store.set(messages.member_key(member), json.dumps({"name": "a", "order": 0}))
    assert [type(observation) for observation in nodes.wait(0.0)] == [NodeJoined]
    answers = messages.answers(store, member)
    for text in NONSENSE:
        answers._written += 1
        store.set(f"answers/{member}/{answers._written}", text)
        store.set(messages.beat_key(member), text)
        nodes.wait(0.0)
    answers.put({"generation": "", "exit": {"rank": 1, "code": 0, "time": 1.0}})
    assert nodes.wait(0.0) == [Exit(1, 0, 1.0)], "what can be read is still heard"
    assert nodes._unreadable.count >= 3 * len(NONSENSE)
    assert "Run the same version of megalith on all nodes" in capsys.readouterr().err


@pytest.mark.parametrize("text", NONSENSE)
def test_an_answer_that_means_nothing_is_none(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Dictionary()
    nodes = RemoteNodes(store, Job("nobody:calls", {}, ranks=2, run_dir=tmp_path), FleetSpec(node_timeout=SECONDS))
    store.set(messages.member_key(store.add(messages.JOINED, 1)), json.dumps({"name": "a", "order": 0}))
    nodes.wait(0.0)
    nodes._generation = Generation("g1", ("a",))
    asked = Answered(store, text)
    nodes._store = asked
    assert all(look.stack == "" for look in nodes.inspect([0, 1]).values())
    assert nodes.queued() in ({}, {"a": 123.0})
    assert nodes.survey(("a",)) == ()
    failure = nodes.unstarted()
    assert failure.name == "the agents" and "no agent reported the reason" in failure.reason


class Answered(Dictionary):
    """A store that already contains a reply to every request."""

    def __init__(self, behind: Dictionary, text: str) -> None:
        super().__init__()
        self.values, self._text = behind.values, text.encode()

    def check(self, keys: list[str]) -> bool:
        return all(key.startswith("answer/") or super(Answered, self).check([key]) for key in keys)

    def get(self, key: str) -> bytes:
        return self._text if key.startswith("answer/") else super().get(key)


ORDERS = [
    *NONSENSE,
    '{"leave": "now"}',
    '{"leave": null, "forget": true}',
    '{"start": {"name": 1}}',
    '{"send": "9", "ranks": [0]}',
]
ORDERS += ['{"send": 9, "ranks": [[]]}', '{"look": [0]}', '{"set_aside": {}}', '{"survey": true, "answer": 3}', '{"check": "b"}']


def test_an_order_that_means_nothing_is_not_obeyed_and_ends_no_agent(fleet: Callable[..., Fleet]) -> None:
    run = _waiting(fleet)
    member = run.nodes._members["a"]
    for text in ORDERS:
        member.orders._written += 1
        run.store.set(f"orders/{member.number}/{member.orders._written}", text)
    assert set(run.nodes.inspect([0, 1, 2, 3])) == {0, 1, 2, 3}
    until(lambda: not member.orders.pending(), seconds=SECONDS)
    assert run.agents["a"]._unreadable.count == len(ORDERS)
    assert run.nodes.running() == {0, 1, 2, 3}
    assert not run.codes


def test_what_ranks_met_by_does_not_stay_in_the_store(fleet: Callable[..., Fleet]) -> None:
    run = _waiting(fleet)
    run.store.set("g1/rank/0", "an address")
    run.nodes.send(signal.SIGKILL, run.nodes.running())
    run.until(lambda heard: len(_ends(heard)) == 4)
    run.nodes.start(Generation("g2", ("a", "b")))
    assert not run.store.check(["g1/rank/0"])
