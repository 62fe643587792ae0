"""Rules for nodes that are lost, preempted or excluded, that join, or whose health was checked."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from megalith.control.policy.placement import blame, evict
from megalith.control.policy.restart import backoff, can_shrink, restart, shrink, stop
from megalith.control.policy.state import VACANT, Decision, State
from megalith.fleet import observations
from megalith.fleet.commands import CheckHealth, Order, QuarantineNode, Replace, SaveState
from megalith.fleet.exit_codes import ExitCode
from megalith.spec.fleet import FleetSpec

Kept = TypeVar("Kept")


def nodes_lost(state: State, observation: observations.NodesLost, fleet: FleetSpec) -> Decision:
    """Respond to the loss of nodes, and with them of the copies in their memory and on their disks. A lost spare node is only
    removed from the list of spares, and quarantined."""
    slots = tuple(slot for slot, node in enumerate(state.placement) if node in observation.nodes)
    gone = dict.fromkeys(observation.nodes, observation.time)
    spares = tuple(node for node in state.spares if node not in observation.nodes)
    state = replace(state, spares=spares, quarantined={**state.quarantined, **gone})
    names = ", ".join(observation.nodes[:4]) + (f" and {len(observation.nodes) - 4} more" if len(observation.nodes) > 4 else "")
    if not slots:
        return Decision((), state, f"lost {names} (outside the mesh)")
    commands: list[Order] = []
    for slot in slots:
        state, _ = blame(state, state.placement[slot], observation, fleet)
        state, orders = evict(state, slot, observation, fleet, because="it no longer answers", forced=True)
        commands += orders
    blamed = observation.nodes[0] if len(observation.nodes) == 1 else None
    return restart(state, commands, observation, fleet, reason=f"lost {names}", blamed=blamed)


def preempted(state: State, observation: observations.Preempted, fleet: FleetSpec) -> Decision:
    """Respond to a preemption of a node: the ranks save and stop together, so that only the restart costs time."""
    slot = state.slot(observation.node)
    if slot is None:
        spares = tuple(node for node in state.spares if node != observation.node)
        return Decision(
            (),
            replace(state, spares=spares),
            f"{observation.node}, a node without ranks, got a signal to stop (as before a preemption)",
        )
    reason = f"{observation.node} got a signal to stop (as before a preemption), and may have only {observation.grace:g} s left"
    if observation.node in state.leaving:
        return Decision((), state, f"{reason}, as is known")
    state = replace(state, leaving=(*state.leaving, observation.node))
    if state.waiting:  # no ranks run that could save
        return restart(state, [], observation, fleet, reason=reason)
    return Decision((SaveState(observation.grace),), state, reason)


def ordered_out(state: State, observation: observations.Ordered, fleet: FleetSpec) -> Decision:
    """Exclude a node on a person's order, after the state is saved and until the node passes a health check."""
    reason = f"a person orders that {observation.node} is excluded"
    if observation.node in state.spares:
        out = {**state.quarantined, observation.node: observation.time}
        state = replace(state, spares=tuple(node for node in state.spares if node != observation.node), quarantined=out)
        return Decision((QuarantineNode(observation.node, reason), CheckHealth(observation.node)), state, reason)
    if state.slot(observation.node) is None or observation.node in state.leaving:
        return Decision((), state, f"{reason}, but this node is already excluded or leaving, or is not a node of this run")
    state = replace(state, leaving=(*state.leaving, observation.node))
    if state.waiting:  # no ranks run that could save
        return restart(state, [], observation, fleet, reason=reason)
    return Decision((SaveState(fleet.wait_limit),), state, f"{reason}: the node is excluded once the state is saved")


def node_joined(state: State, observation: observations.NodeJoined, fleet: FleetSpec) -> Decision:
    """Respond to a node that joins: check its health first if it is quarantined, else make it a spare."""
    if observation.node in state.quarantined:
        return Decision((CheckHealth(observation.node),), state, f"{observation.node} is back, and its health is checked first")
    if observation.node in state.spares or observation.node in state.placement:
        return Decision((), state, f"{observation.node} is known already")
    return _welcome(state, observation, fleet)


def health_checked(state: State, observation: observations.HealthChecked, fleet: FleetSpec) -> Decision:
    """Respond to a node's health check. A node that failed its check is excluded, and checked again later if it still answers. If
    an excluded node passed, its record is cleared, and it becomes available."""
    slot = state.slot(observation.node)
    why = f" ({observation.text})" if observation.text else ""
    if not observation.passed and slot is not None:
        reason = f"{observation.node} failed its health check{why}"
        state, commands = evict(state, slot, observation, fleet, because=reason, forced=True)
        return restart(state, commands, observation, fleet, reason=reason, blamed=observation.node)
    if not observation.passed:
        out = {**state.quarantined, observation.node: state.quarantined.get(observation.node, observation.time)}
        spares = tuple(node for node in state.spares if node != observation.node)
        failed = state.failed_checks.get(observation.node, 0)
        state = replace(
            state, quarantined=out, spares=spares, failed_checks={**state.failed_checks, observation.node: failed + 1}
        )
        reason = f"{observation.node} failed its health check and stays excluded{why}"
        if not observation.there:
            return Decision((), state, f"{reason}, until it joins again")
        return Decision((CheckHealth(observation.node, backoff(failed, fleet)),), state, f"{reason}, to be checked again")
    if observation.node not in state.quarantined:
        return Decision((), state, f"{observation.node} is healthy")
    state = replace(
        state,
        quarantined=_without(state.quarantined, observation.node),
        faults=_without(state.faults, observation.node),
        failed_checks=_without(state.failed_checks, observation.node),
    )
    return _welcome(state, observation, fleet)


def _without(kept: Mapping[str, Kept], node: str) -> dict[str, Kept]:
    return {name: value for name, value in kept.items() if name != node}


def _welcome(state: State, observation: observations.NodeJoined | observations.HealthChecked, fleet: FleetSpec) -> Decision:
    node = observation.node
    state = replace(state, spares=(*state.spares, node))
    if len(state.spares) < len(state.vacant) or not state.vacant:
        return Decision((), state, f"{node} is a spare")
    commands: list[Order] = []
    for slot in state.vacant:
        spare, *rest = state.spares
        placement = (*state.placement[:slot], spare, *state.placement[slot + 1 :])
        state = replace(state, placement=placement, spares=tuple(rest))
        commands.append(Replace(slot, VACANT, spare))
    if state.shrunk:
        return Decision(
            (*commands, SaveState(fleet.wait_limit)),
            state,
            f"{node} fills the last empty slot: the ranks save, and continue under the run's own plan",
        )
    return restart(state, commands, observation, fleet, reason=f"{node} fills the empty slot")


def waited(state: State, observation: observations.Waited, fleet: FleetSpec) -> Decision:
    """Respond to the end of a wait in which no node joined: continue under the fallback plan, or stop."""
    if not state.waiting:
        return Decision((), state, "nobody waits")
    empty = ", ".join(map(str, state.vacant))
    if fleet.fallback and can_shrink(state):
        return shrink(state, [], f"no node joined for slot {empty}")
    report = (
        f"no node joined for slot {empty} within fleet.wait_limit = {fleet.wait_limit:g} s, and no fleet.fallback fits on the "
        f"remaining nodes. Start the same command again once there are enough nodes."
    )
    return stop(state, [], ExitCode.LOST, report)
