"""The status of nodes in the ledger."""

from pathlib import Path
from random import Random
from typing import Any

from megalith.control.node_ledger import NodeRecord, node_changes, note, read_nodes, standings
from megalith.control.policy import State, decide
from megalith.fleet.observations import HealthChecked, NodeJoined, NodesLost, Observation, RankFailed, StateCorrupt
from megalith.fleet.tiers import Copy, Tier
from megalith.spec.fleet import FleetSpec


def test_a_node_is_out_from_its_quarantine_to_a_passed_check(tmp_path: Path) -> None:
    path = tmp_path / "nodes.jsonl"
    said: list[tuple[float, str, Any]] = [
        (1.0, "a", "fault"), (2.0, "b", "fault"), (3.0, "a", "fault"), (4.0, "a", "quarantined"), (5.0, "a", "check failed"),
    ]  # fmt: skip
    for time, node, what in said:
        note(path, NodeRecord(time, node, what))
    found = standings(read_nodes(path))
    assert found["a"].quarantined == 4.0
    assert found["a"].faults_since(1.5) == (3.0,)
    assert found["b"].quarantined is None
    note(path, NodeRecord(6.0, "a", "check passed"))
    assert standings(read_nodes(path))["a"].quarantined is None


def test_a_torn_line_of_the_node_ledger_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "nodes.jsonl"
    note(path, NodeRecord(1.0, "a", "fault"))
    with path.open("a") as file:
        file.write('{"time": 2.0, "no')
    assert [record.time for record in read_nodes(path)] == [1.0]


def test_the_ledger_says_of_nodes_what_the_policy_remembers(tmp_path: Path) -> None:
    """In any sequence of events, the ledger has the faults and quarantines since the last passed check. It is written
    after each decision and read back."""
    random, path = Random(7), tmp_path / "nodes.jsonl"
    state = State(placement=("a", "b"), spares=("c",), copies=(Copy(Tier.STORE, 0),))
    for at in range(200):
        node = random.choice("abc")
        kind = random.choice(["fails", "flips", "lost", "passed", "failed", "joined"])
        common: dict[str, Any] = {"time": float(at), "step": at, "node": node}
        made: dict[str, Observation] = {
            "fails": RankFailed(**common, slot=0, rank=0, signature=f"of {at}"),
            "flips": StateCorrupt(**common, slot=0, rank=0),
            "lost": NodesLost(time=float(at), step=at, nodes=(node,)),
            "passed": HealthChecked(**common, passed=True),
            "failed": HealthChecked(**common, passed=False),
            "joined": NodeJoined(**common),
        }
        decision = decide(state, made[kind], fleet=FleetSpec(fruitless=10**6))
        for record in node_changes(state, decision.state, time=float(at), reason=decision.reason, run="mine"):
            note(path, record)
        state = decision.state
        known = standings(read_nodes(path))
        assert {node: one.faults_since(-1.0) for node, one in known.items() if one.faults} == {
            node: times for node, times in state.faults.items() if times
        }
        assert {node for node, one in known.items() if one.quarantined is not None} == set(state.quarantined)
    assert {record.what for record in read_nodes(path)} == {"fault", "quarantined", "check passed", "check failed"}
