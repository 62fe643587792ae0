"""The policy's decisions on recorded evidence, and laws that hold in every case."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalith.control import policy
from megalith.control.policy import RULES, VACANT, Decision, State, decide
from megalith.fleet import commands, observations
from megalith.fleet.commands import CheckHealth, Grow, Order, ReadElsewhere, Replace, RerunStep, Restart, Shrink, Stop, Wait
from megalith.fleet.exit_codes import ExitCode, retryable
from megalith.fleet.tiers import BEGINNING, Copy, Source, Tier
from megalith.spec.fleet import FleetSpec

EVIDENCE = sorted((Path(__file__).parent / "evidence").glob("*.json"))
NODES = ("n0", "n1", "n2", "n3")
COPIES = (Copy(Tier.MEMORY, 20), Copy(Tier.BUDDY, 20), Copy(Tier.MEMORY, 19), Copy(Tier.BUDDY, 19), Copy(Tier.STORE, 10))
START = State(placement=NODES, spares=("s0", "s1"), copies=COPIES, restored=Source(10, Tier.STORE))


def _play(state: State, seen: Sequence[observations.Observation], fleet: FleetSpec) -> list[Decision]:
    decisions = []
    for observation in seen:
        decisions.append(decide(state, observation, fleet=fleet))
        state = decisions[-1].state
    return decisions


def _kinds(decision: Decision) -> list[str]:
    return [command.kind for command in decision.commands]


def _kill(node: str = "n1", *, step: int = 20, time: float = 0.0, **rest: Any) -> observations.RankFailed:
    return observations.RankFailed(
        slot=NODES.index(node) if node in NODES else 0,
        node=node, rank=2, signature="killed by SIGKILL", step=step, time=time, **rest,
    )  # fmt: skip


@pytest.mark.parametrize("path", EVIDENCE, ids=lambda path: path.stem)
def test_recorded_evidence_is_answered_as_recorded(path: Path) -> None:
    record = json.loads(path.read_text())
    state, fleet = policy.load(record["state"]), FleetSpec.model_validate(record["fleet"])
    for turn in record["turns"]:
        decision = decide(state, observations.load(turn["sign"]), fleet=fleet)
        assert [commands.dump(command) for command in decision.commands] == turn["commands"], record["what"]
        assert decision.blamed == turn["blamed"]
        state = decision.state


def test_every_kind_of_observation_has_a_rule_and_evidence() -> None:
    recorded = {turn["sign"]["kind"] for path in EVIDENCE for turn in json.loads(path.read_text())["turns"]}
    assert {kind.kind for kind in RULES} - {"started", "stop_requested"} == recorded


def test_a_failure_costs_no_step_when_every_step_is_kept_in_memory() -> None:
    (first,) = decide(START, _kill(), fleet=FleetSpec()).commands
    assert first == Restart(Source(20, Tier.MEMORY), NODES, after=0.0)


def test_ranks_that_are_late_are_not_called_silent() -> None:
    """A rank that works on while its start takes too long gives signs of life."""
    late, silent = (observations.Hang(slot=1, node="n1", rank=2, phase="restoring", silence=s, limit=120.0) for s in (4.0, 121.0))
    said = decide(START, late, fleet=FleetSpec()).reason
    assert said.startswith("rank 2 on n1: was not ready within 120 s, in phase `restoring`")
    assert "no rank sent a heartbeat for 121 s (limit 120 s)" in decide(START, silent, fleet=FleetSpec()).reason


def test_the_same_failure_falls_back_then_stops() -> None:
    fleet = FleetSpec(lemon_faults=99)
    one, two, three = _play(START, [_kill()] * 3, fleet)
    assert _kinds(one) == ["restart"]
    assert _kinds(two) == ["roll_back", "restart"]
    assert two.state.restored == Source(10, Tier.STORE)
    assert isinstance(three.commands[-1], Stop)
    assert retryable(three.commands[-1].code)


def test_progress_makes_the_next_failure_a_first_one() -> None:
    fleet = FleetSpec(lemon_faults=99)
    seen = [_kill(step=20), observations.Progressed(step=21), _kill(step=21), observations.Progressed(step=22), _kill(step=22)]
    assert [_kinds(d) for d in _play(START, seen, fleet)[::2]] == [["restart"]] * 3


def test_progress_up_to_the_step_that_failed_forgets_nothing() -> None:
    """After a return to an older copy, the steps before the failing one are repeated. That does not prove that the failure is
    gone."""
    fleet = FleetSpec(lemon_faults=99)
    seen = [_kill(), _kill(), *(observations.Progressed(step=step) for step in range(11, 21)), _kill()]
    assert _kinds(_play(START, seen, fleet)[-1]) == ["stop"]


def test_like_failures_of_several_nodes_are_not_the_nodes_fault_for_ever() -> None:
    seen = [_kill(node) for node in (*NODES, *NODES)]
    kinds = [_kinds(decision) for decision in _play(START, seen, FleetSpec())]
    assert kinds[5] == ["stop"]


def test_old_faults_do_not_make_a_lemon() -> None:
    week = 7 * 24 * 3600.0
    seen: list[observations.Observation] = []
    for i in range(6):
        seen += [_kill(step=20 + i, time=i * week), observations.Progressed(step=21 + i)]
    assert all("replace" not in _kinds(decision) for decision in _play(START, seen, FleetSpec()))


def test_a_program_error_blames_no_node() -> None:
    decision = decide(START, replace(_kill(), blamed=False, signature="ValueError: #"), fleet=FleetSpec())
    assert decision.blamed is None
    assert decision.state.faults == {}


def test_a_quarantined_node_comes_back_only_through_a_check() -> None:
    lost, joined, failed, passed = _play(
        START,
        [
            observations.NodesLost(nodes=("n2",)),
            observations.NodeJoined(node="n2"),
            observations.HealthChecked(node="n2", passed=False),
            observations.HealthChecked(node="n2", passed=True),
        ],
        FleetSpec(),
    )
    assert "n2" in lost.state.quarantined
    assert _kinds(joined) == ["check_health"]
    assert "n2" in failed.state.quarantined
    assert "n2" in passed.state.spares


@pytest.mark.parametrize(
    ("no_spare", "fallback", "kind"),
    [("wait", None, Wait), ("shrink", {"data": 2}, Shrink), ("shrink", None, Wait), ("stop", None, Stop)],
)
def test_without_a_spare_the_specification_decides(no_spare: str, fallback: dict[str, int] | None, kind: type) -> None:
    fleet = FleetSpec.model_validate({"no_spare": no_spare, "fallback": fallback})
    decision = decide(replace(START, spares=()), observations.NodesLost(nodes=("n0",)), fleet=fleet)
    assert isinstance(decision.commands[-1], kind)


def test_a_shrunk_run_that_fails_stays_shrunk() -> None:
    fleet = FleetSpec.model_validate({"no_spare": "shrink", "fallback": {"data": 2}})
    shrunk, again = _play(replace(START, spares=()), [observations.NodesLost(nodes=("n0",)), _kill("n1")], fleet)
    assert isinstance(shrunk.commands[-1], Shrink)
    assert isinstance(again.commands[-1], Shrink)


def test_shrinking_and_growing_read_what_another_plan_can_read() -> None:
    fleet = FleetSpec.model_validate({"no_spare": "shrink", "fallback": {"data": 2}})
    seen = [observations.NodesLost(nodes=("n0",)), observations.NodeJoined(node="new"), observations.Saved(step=15)]
    shrunk, _, grown = _play(replace(START, spares=()), seen, fleet)
    orders = [shrunk.commands[-1], grown.commands[-1]]
    assert [type(order) for order in orders] == [Shrink, Grow]
    assert all(order.source.tier is Tier.STORE for order in orders if isinstance(order, (Shrink, Grow)))


def test_a_fallback_that_needs_more_nodes_than_are_left_is_not_taken() -> None:
    fleet = FleetSpec.model_validate({"no_spare": "shrink", "fallback": {"data": 2}})
    decision = decide(replace(START, spares=(), least=4), observations.NodesLost(nodes=("n0",)), fleet=fleet)
    assert isinstance(decision.commands[-1], Wait)


def test_a_rewritten_copy_is_trusted_again() -> None:
    damaged = observations.CopyCorrupt(tier=Tier.MEMORY, copy_step=20, slot=1)
    state = decide(START, damaged, fleet=FleetSpec()).state
    refreshed = replace(state, copies=COPIES)
    assert decide(refreshed, _kill(), fleet=FleetSpec()).state.restored.elsewhere == ((1, Tier.BUDDY),)
    passed = decide(refreshed, observations.Progressed(step=21), fleet=FleetSpec()).state
    assert decide(replace(passed, copies=COPIES), _kill(step=21), fleet=FleetSpec()).state.restored.elsewhere == ()


def test_a_node_that_fails_its_check_is_checked_again_at_growing_intervals_until_it_passes() -> None:
    out = decide(START, observations.NodesLost(nodes=("n2",)), fleet=FleetSpec()).state
    failed = [observations.HealthChecked(node="n2", passed=False)] * 5
    decisions = _play(out, failed, FleetSpec(backoff=1.0, backoff_limit=4.0))
    assert [decision.commands for decision in decisions] == [(CheckHealth("n2", after),) for after in (1.0, 2.0, 4.0, 4.0, 4.0)]
    passed = decide(decisions[-1].state, observations.HealthChecked(node="n2", passed=True), fleet=FleetSpec()).state
    assert (passed.failed_checks, "n2" in passed.spares) == ({}, True)
    gone = decide(out, observations.HealthChecked(node="n2", passed=False, there=False), fleet=FleetSpec())
    assert gone.commands == (), "one that is gone comes back by itself"


def test_a_start_checks_nodes_that_were_out_and_waits_only_for_those_it_needs() -> None:
    enough = replace(START, quarantined={"x": 1.0})
    assert _kinds(decide(enough, observations.Started(), fleet=FleetSpec())) == ["check_health", "restart"]
    short = replace(enough, placement=("n0", VACANT, *NODES[2:]), spares=())
    first, passed = _play(
        short, [observations.Started(), observations.HealthChecked(node="x", passed=True)], FleetSpec(no_spare="stop")
    )
    assert _kinds(first) == ["check_health", "wait"]
    assert _kinds(passed) == ["replace", "restart"]
    assert passed.state.placement[1] == "x"


def test_a_damaged_shard_is_told_of_once_and_stops_the_run_only_without_a_copy() -> None:
    damaged = observations.DataDamaged(shard="a-train-00000.bin", error="byte 5", other_copy="/copy")
    first, again = _play(START, [damaged, damaged], FleetSpec())
    assert first.commands == (ReadElsewhere("a-train-00000.bin", "/copy"),)
    assert again.commands == ()
    last = decide(again.state, replace(damaged, other_copy=None), fleet=FleetSpec())
    assert isinstance(last.commands[-1], Stop)
    assert last.commands[-1].code == ExitCode.FAILED
    assert "data.copies" in last.commands[-1].report


def test_waiting_between_fruitless_starts_grows_to_its_limit() -> None:
    fleet = FleetSpec(fruitless=12, backoff=1.0, backoff_limit=30.0, lemon_faults=99, same_failure=99)
    waits = [d.commands[-1].after for d in _play(START, [_kill()] * 10, fleet) if isinstance(d.commands[-1], Restart)]
    assert waits == [0, 0, 1, 2, 4, 8, 16, 30, 30, 30]


def test_nothing_left_to_restore_begins_anew() -> None:
    decision = decide(replace(START, copies=()), _kill(), fleet=FleetSpec())
    assert decision.state.restored == BEGINNING


def test_checkpoints_that_cannot_be_used_are_not_given_up_for_a_new_beginning() -> None:
    """New checkpoints would replace the unusable ones. The same command tries them again."""
    store = replace(START, copies=(Copy(Tier.STORE, 20), Copy(Tier.STORE, 10)), restored=Source(20, Tier.STORE))
    first = decide(store, observations.CopyCorrupt(tier=Tier.STORE, copy_step=20), fleet=FleetSpec())
    assert first.state.restored == Source(10, Tier.STORE)
    refreshed = replace(first.state, copies=store.copies)
    second = decide(refreshed, observations.CopyCorrupt(tier=Tier.STORE, copy_step=10), fleet=FleetSpec())
    assert "restart" not in _kinds(second)
    assert isinstance(second.commands[-1], Stop)
    assert second.commands[-1].code == ExitCode.FAILED
    assert "(step 10, 20)" in second.commands[-1].report
    again = decide(replace(second.state, stopped=False, copies=store.copies), observations.Started(), fleet=FleetSpec())
    assert again.state.restored == Source(20, Tier.STORE)


def test_wrong_gradients_older_than_every_checkpoint_stop_the_run() -> None:
    newer = replace(START, copies=(Copy(Tier.STORE, 900), Copy(Tier.STORE, 1000)))
    decision = decide(newer, observations.GradientWrong(good_step=0, suspects=("n1",), step=1000), fleet=FleetSpec())
    assert _kinds(decision)[-1] == "stop"
    assert "restart" not in _kinds(decision)


def test_a_checkpoint_that_cannot_be_read_is_tried_again_for_as_long_as_a_node_would_be_waited_for() -> None:
    fleet = FleetSpec(wait_limit=20.0, backoff=1.0, backoff_limit=8.0)
    state = replace(START, copies=(Copy(Tier.STORE, 20), Copy(Tier.STORE, 10)))
    at, tried = 0.0, []
    for _ in range(7):
        decision = decide(state, observations.CopyAway(time=at, tier=Tier.STORE, copy_step=20, error="EIO"), fleet=fleet)
        state = replace(decision.state, copies=state.copies)
        order = decision.commands[-1]
        assert isinstance(order, Restart)
        tried.append((order.source.step, order.after))
        at += order.after
        assert ("tried again for at most 20 s (fleet.wait_limit)" in decision.reason) == (order.source.step == 20)
    assert tried == [*[(20, wait) for wait in (1, 1, 2, 4, 8, 8)], (10, 0)], "and then it counts as damaged"
    last = decide(state, observations.CopyAway(time=at, tier=Tier.STORE, copy_step=10, error="EIO"), fleet=fleet)
    assert isinstance(last.commands[-1], Stop)
    assert last.commands[-1].code == ExitCode.LOST
    assert last.state.bad == ()


def test_a_wait_for_storage_says_how_long_it_may_last() -> None:
    away = observations.StoreAway(time=1.0, path="/data", error="gone", step=5)
    reason = decide(START, away, fleet=FleetSpec(wait_limit=20.0)).reason
    assert reason == "/data cannot be used at the moment: gone. The run waits for it, for at most 20 s (fleet.wait_limit)"


def test_a_checkpoint_that_can_be_read_again_was_never_away() -> None:
    away = observations.CopyAway(time=5.0, tier=Tier.STORE, copy_step=10)
    first, passed = _play(replace(START, copies=COPIES[-1:]), [away, observations.Progressed(step=11)], FleetSpec(fruitless=1))
    assert first.state.away == 5.0
    assert passed.state.away is None
    assert (passed.state.bad, passed.state.faults) == ((), {})


def test_all_nodes_told_to_go_within_one_save_go_once_it_is_made() -> None:
    told = [observations.Preempted(node=node, step=20) for node in ("n0", "n1", "n0")]
    *before, saved = _play(START, [*told, observations.Saved(step=21)], FleetSpec())
    assert [_kinds(decision) for decision in before] == [["save_state"], ["save_state"], []]
    assert saved.state.placement == ("s0", "s1", "n2", "n3")
    assert set(saved.state.quarantined) == {"n0", "n1"}


def test_a_node_told_to_go_goes_with_whatever_start_comes_before_the_save() -> None:
    """The node will be gone, with its copies in memory. Copies are read from its buddy, even if they are of an earlier step."""
    away = observations.Preempted(node="n0", step=20)
    first = _play(START, [away, _kill("n1")], FleetSpec())[-1]
    assert first.state.placement == ("s0", "n1", "n2", "n3")
    assert first.state.restored == Source(20, Tier.MEMORY, elsewhere=((0, Tier.BUDDY),))
    assert first.state.leaving == ()
    damaged = observations.CopyCorrupt(tier=Tier.MEMORY, copy_step=20)
    on_disk = replace(START, copies=(*COPIES, Copy(Tier.DISK, 15)), restored=Source(20, Tier.MEMORY))
    without_buddies = replace(on_disk, copies=tuple(copy for copy in on_disk.copies if copy.tier is not Tier.BUDDY))
    assert _play(without_buddies, [away, damaged], FleetSpec())[-1].state.restored == Source(10, Tier.STORE)


def test_a_node_that_was_lost_before_the_save_is_not_sent_away_when_it_is_back() -> None:
    seen = [
        observations.Preempted(node="n0", step=20),
        observations.NodesLost(nodes=("n0",), step=20),
        observations.HealthChecked(node="n0", passed=True),
        observations.NodesLost(nodes=("s0",), step=22),
        observations.NodesLost(nodes=("s1",), step=23),
    ]
    state = _play(START, seen, FleetSpec())[-1].state
    assert state.placement == NODES
    assert decide(state, observations.Saved(step=24), fleet=FleetSpec()).state.placement == NODES


def test_a_node_told_to_go_while_nothing_runs_goes_at_once() -> None:
    waiting = _play(
        replace(START, spares=()), [observations.NodesLost(nodes=("n3",)), observations.Preempted(node="n0")], FleetSpec()
    )[-1]
    assert waiting.state.vacant == (0, 3)
    assert isinstance(waiting.commands[-1], Wait)


def test_state_observations_and_commands_survive_json() -> None:
    for path in EVIDENCE:
        record = json.loads(path.read_text())
        state = policy.load(record["state"])
        for turn in record["turns"]:
            observation = observations.load(turn["sign"])
            assert observations.load(json.loads(json.dumps(observations.dump(observation)))) == observation
            state = decide(state, observation, fleet=FleetSpec.model_validate(record["fleet"])).state
            assert policy.load(json.loads(json.dumps(policy.dump(state)))) == state
            assert [commands.dump(commands.load(command)) for command in turn["commands"]] == turn["commands"]


# Laws that hold whatever happens

NAMES = st.sampled_from([*NODES, "s0", "s1", "new"])
STEPS = st.integers(18, 24)
MAKE: dict[str, Callable[..., observations.Observation]] = {
    "kill": lambda node, step: _kill(node, step=step, time=float(step)),
    "broken": lambda node, step: _kill(node, step=step, hardware=True),
    "bug": lambda node, step: replace(_kill(node, step=step), blamed=False, signature="ValueError"),
    "hang": lambda node, step: observations.Hang(slot=0, node=node, rank=1, phase="step", silence=2, limit=1, step=step),
    "lost": lambda node, step: observations.NodesLost(nodes=(node, "n3") if step % 2 else (node,), step=step),
    "nan": lambda node, step: observations.Nonfinite(
        slot=0, node=node, rank=1, name="w", step=step, elsewhere="clean" if step % 2 else "nobody to ask"
    ),
    "flip": lambda node, step: observations.StateCorrupt(slot=0, node=node, rank=1, step=step),
    "damaged": lambda node, step: observations.CopyCorrupt(
        tier=list(Tier)[step % 4], copy_step=step, slot=None if step % 2 else 1
    ),
    "away": lambda node, step: observations.CopyAway(tier=Tier.STORE, copy_step=step, step=step, time=step * 1000.0),
    "store": lambda node, step: observations.StoreAway(path="/data", error="EIO", step=step, time=step * 1000.0),
    "wrong": lambda node, step: observations.GradientWrong(good_step=step - 2, suspects=(node,), step=step),
    "slow": lambda node, step: observations.Straggler(
        slot=0, node=node, rank=1, ratio=2, lost=step - 20.0, replacing=1, step=step
    ),
    "preempted": lambda node, step: observations.Preempted(node=node, step=step),
    "saved": lambda node, step: observations.Saved(step=step),
    "joined": lambda node, step: observations.NodeJoined(node=node, step=step),
    "checked": lambda node, step: observations.HealthChecked(node=node, passed=step % 3 > 0, step=step),
    "waited": lambda node, step: observations.Waited(step=step),
    "changed": lambda node, step: observations.NotThisRun(error="spec.json was changed", step=step),
    "progress": lambda node, step: observations.Progressed(step=step),
}
ANY_SIGN = st.builds(lambda kind, node, step: MAKE[kind](node, step), st.sampled_from(sorted(MAKE)), NAMES, STEPS)
ENDS = (Restart, Wait, Shrink, Grow, Stop, RerunStep)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.lists(ANY_SIGN, max_size=25), st.booleans())
def test_whatever_happens_the_orders_make_sense(seen: list[observations.Observation], shrinks: bool) -> None:
    fleet = FleetSpec.model_validate({"no_spare": "shrink", "fallback": {"data": 2}} if shrinks else {})
    state, nodes = START, {*NODES, "s0", "s1"}
    for observation in seen:
        before = replace(state, copies=COPIES) if isinstance(observation, observations.Progressed) else state
        decision = decide(before, observation, fleet=fleet)
        assert decision == decide(before, observation, fleet=fleet)
        state = decision.state
        nodes |= (
            {observation.node} if isinstance(observation, observations.NodeJoined | observations.HealthChecked) else set()
        )  # a checked node is there
        _check_state(state, nodes)
        assert sum(isinstance(command, ENDS) for command in decision.commands) <= 1
        for command in decision.commands:
            _check_order(command, state)
        assert not before.stopped or not decision.commands


def _check_state(state: State, nodes: set[str]) -> None:
    filled = [node for node in state.placement if node != VACANT]
    assert len(filled) == len(set(filled))
    assert not set(filled) & set(state.spares)
    assert not {*filled, *state.spares} & set(state.quarantined)
    assert {*filled, *state.spares} <= nodes


def _check_order(command: Order, state: State) -> None:
    if isinstance(command, Restart):
        assert VACANT not in command.placement
        _check_source(command.source, state)
    elif isinstance(command, Replace):
        assert command.spare not in state.quarantined
        assert command.spare in state.placement


def _check_source(source: Source, state: State) -> None:
    """Assert that each piece exists, and that none failed its digest check."""
    have = {(copy.tier, copy.step): copy.missing for copy in state.copies}
    if source.tier is None:
        return
    elsewhere = dict(source.elsewhere)
    for slot in range(len(state.placement)):
        tier = elsewhere.get(slot, source.tier)
        assert slot not in have[tier, source.step]
        assert (tier, source.step, slot) not in state.bad
        assert (tier, source.step, None) not in state.bad


@settings(deadline=None)
@given(st.sampled_from(["kill", "bug", "flip", "hang"]), st.integers(0, 4))
def test_no_failure_goes_on_for_ever(kind: str, spares: int) -> None:
    """Equal failures without a step between them end the run, whatever the number of spares."""
    state, fleet = replace(START, spares=tuple(f"x{i}" for i in range(spares))), FleetSpec()
    for _ in range(fleet.fruitless + 1):
        slot0 = state.placement[0]
        state = decide(state, replace(MAKE[kind]("n0", 20), node=slot0), fleet=fleet).state
        if state.stopped:
            return
    pytest.fail("it would go on for ever")
