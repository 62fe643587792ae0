"""Rules for nodes that are lost, are taken away, join, or were checked."""

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
    """If a machine is lost, so are the memory and disks of its slots. A lost spare is only removed from the list."""
    slots = tuple(slot for slot, node in enumerate(state.placement) if node in observation.nodes)
    gone = dict.fromkeys(observation.nodes, observation.time)
    spares = tuple(node for node in state.spares if node not in observation.nodes)
    state = replace(state, spares=spares, quarantined={**state.quarantined, **gone})
    names = ", ".join(observation.nodes[:4]) + (f" and {len(observation.nodes) - 4} more" if len(observation.nodes) > 4 else "")
    if not slots:
        return Decision((), state, f"outside the mesh: lost {names}")
    commands: list[Order] = []
    for slot in slots:
        state, _ = blame(state, state.placement[slot], observation, fleet)
        state, orders = evict(state, slot, observation, fleet, because="it no longer answers", forced=True)
        commands += orders
    blamed = observation.nodes[0] if len(observation.nodes) == 1 else None
    return restart(state, commands, observation, fleet, reason=f"lost {names}", blamed=blamed)


def preempted(state: State, observation: observations.Preempted, fleet: FleetSpec) -> Decision:
    """A node is preempted. There is time for a coordinated stop, so only the restart costs time."""
    slot = state.slot(observation.node)
    if slot is None:
        spares = tuple(node for node in state.spares if node != observation.node)
        return Decision((), replace(state, spares=spares), f"{observation.node}, outside the mesh, is taken away")
    reason = f"{observation.node} is taken away by the scheduler in {observation.grace:g} s"
    if observation.node in state.leaving:
        return Decision((), state, f"{reason}, as is known")
    state = replace(state, leaving=(*state.leaving, observation.node))
    if state.waiting:  # no ranks run that could save
        return restart(state, [], observation, fleet, reason=reason)
    return Decision((SaveState(observation.grace),), state, reason)


def ordered_out(state: State, observation: observations.Ordered, fleet: FleetSpec) -> Decision:
    """A person excludes a node: it leaves once the state is saved, until it has passed a health check."""
    reason = f"a person orders {observation.node} to be taken out"
    if observation.node in state.spares:
        out = {**state.quarantined, observation.node: observation.time}
        state = replace(state, spares=tuple(node for node in state.spares if node != observation.node), quarantined=out)
        return Decision((QuarantineNode(observation.node, reason), CheckHealth(observation.node)), state, reason)
    if state.slot(observation.node) is None or observation.node in state.leaving:
        return Decision((), state, f"{reason}, but this node is out, is leaving, or is not a node of this run")
    state = replace(state, leaving=(*state.leaving, observation.node))
    if state.waiting:  # no ranks run that could save
        return restart(state, [], observation, fleet, reason=reason)
    return Decision((SaveState(fleet.wait_limit),), state, f"{reason}, once the state is saved")


def node_joined(state: State, observation: observations.NodeJoined, fleet: FleetSpec) -> Decision:
    """A node joins. A quarantined node is checked first; a new one becomes a spare."""
    if observation.node in state.quarantined:
        return Decision((CheckHealth(observation.node),), state, f"{observation.node} is back, and is checked first")
    if observation.node in state.spares or observation.node in state.placement:
        return Decision((), state, f"{observation.node} is known already")
    return _welcome(state, observation, fleet)


def health_checked(state: State, observation: observations.HealthChecked, fleet: FleetSpec) -> Decision:
    """A node that failed its check leaves, or stays out and is checked again. A node that passed gets a clean record."""
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
        reason = f"{observation.node} failed its check and stays out{why}"
        if not observation.there:
            return Decision((), state, f"{reason}, until it comes back")
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
        return Decision((*commands, SaveState(fleet.wait_limit)), state, f"{node} is back: save, then grow to the run's own plan")
    return restart(state, commands, observation, fleet, reason=f"{node} takes the empty place")


def waited(state: State, observation: observations.Waited, fleet: FleetSpec) -> Decision:
    """No node joined in time: shrink to the fallback plan, or stop."""
    if not state.waiting:
        return Decision((), state, "nobody waits")
    empty = ", ".join(map(str, state.vacant))
    if fleet.fallback and can_shrink(state):
        return shrink(state, [], f"no node came for slot {empty}")
    report = (
        f"no node came for slot {empty} within fleet.wait_limit = {fleet.wait_limit:g} s, and there is no fleet.fallback that the "
        "nodes left can hold. Start the same command again once there are enough nodes."
    )
    return stop(state, [], ExitCode.LOST, report)
