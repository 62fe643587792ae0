"""Rules for nodes that are lost, taken away, join, or were checked."""

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


def nodes_lost(state: State, sign: observations.NodesLost, fleet: FleetSpec) -> Decision:
    """If a machine is lost, so are the memory and disks of its slots. A lost spare is only struck off."""
    slots = tuple(slot for slot, node in enumerate(state.placement) if node in sign.nodes)
    gone = dict.fromkeys(sign.nodes, sign.time)
    spares = tuple(node for node in state.spares if node not in sign.nodes)
    state = replace(state, spares=spares, quarantined={**state.quarantined, **gone})
    names = ", ".join(sign.nodes[:4]) + (f" and {len(sign.nodes) - 4} more" if len(sign.nodes) > 4 else "")
    if not slots:
        return Decision((), state, f"outside the mesh: lost {names}")
    commands: list[Order] = []
    for slot in slots:
        state, _ = blame(state, state.placement[slot], sign, fleet)
        state, orders = evict(state, slot, sign, fleet, because="it no longer answers", forced=True)
        commands += orders
    blamed = sign.nodes[0] if len(sign.nodes) == 1 else None
    return restart(state, commands, sign, fleet, reason=f"lost {names}", blamed=blamed)


def preempted(state: State, sign: observations.Preempted, fleet: FleetSpec) -> Decision:
    """There is time for a coordinated stop, so only the restart is lost."""
    slot = state.slot(sign.node)
    if slot is None:
        spares = tuple(node for node in state.spares if node != sign.node)
        return Decision((), replace(state, spares=spares), f"{sign.node}, outside the mesh, is taken away")
    reason = f"{sign.node} is taken away by the scheduler in {sign.grace:g} s"
    if sign.node in state.leaving:
        return Decision((), state, f"{reason}, as is known")
    state = replace(state, leaving=(*state.leaving, sign.node))
    if state.waiting:  # no ranks run that could save
        return restart(state, [], sign, fleet, reason=reason)
    return Decision((SaveState(sign.grace),), state, reason)


def ordered_out(state: State, sign: observations.Ordered, fleet: FleetSpec) -> Decision:
    """A person takes a node out: as soon as the state is saved, until it has passed a health check."""
    reason = f"a person orders {sign.node} to be taken out"
    if sign.node in state.spares:
        out = {**state.quarantined, sign.node: sign.time}
        state = replace(state, spares=tuple(node for node in state.spares if node != sign.node), quarantined=out)
        return Decision((QuarantineNode(sign.node, reason), CheckHealth(sign.node)), state, reason)
    if state.slot(sign.node) is None or sign.node in state.leaving:
        return Decision((), state, f"{reason}, but it is out, leaving, or not a node of this run")
    state = replace(state, leaving=(*state.leaving, sign.node))
    if state.waiting:  # no ranks run that could save
        return restart(state, [], sign, fleet, reason=reason)
    return Decision((SaveState(fleet.wait_limit),), state, f"{reason}, once the state is saved")


def node_joined(state: State, sign: observations.NodeJoined, fleet: FleetSpec) -> Decision:
    """A node that was quarantined is checked first; one that is new is a spare."""
    if sign.node in state.quarantined:
        return Decision((CheckHealth(sign.node),), state, f"{sign.node} is back, and is checked first")
    if sign.node in state.spares or sign.node in state.placement:
        return Decision((), state, f"{sign.node} is known already")
    return _welcome(state, sign, fleet)


def health_checked(state: State, sign: observations.HealthChecked, fleet: FleetSpec) -> Decision:
    """A node that failed its check leaves, or stays out and is checked again; a node that passed starts with a clean record."""
    slot = state.slot(sign.node)
    why = f" ({sign.text})" if sign.text else ""
    if not sign.passed and slot is not None:
        reason = f"{sign.node} failed its health check{why}"
        state, commands = evict(state, slot, sign, fleet, because=reason, forced=True)
        return restart(state, commands, sign, fleet, reason=reason, blamed=sign.node)
    if not sign.passed:
        out = {**state.quarantined, sign.node: state.quarantined.get(sign.node, sign.time)}
        spares = tuple(node for node in state.spares if node != sign.node)
        failed = state.failed_checks.get(sign.node, 0)
        state = replace(state, quarantined=out, spares=spares, failed_checks={**state.failed_checks, sign.node: failed + 1})
        reason = f"{sign.node} failed its check and stays out{why}"
        if not sign.there:
            return Decision((), state, f"{reason}, until it comes back")
        return Decision((CheckHealth(sign.node, backoff(failed, fleet)),), state, f"{reason}, to be checked again")
    if sign.node not in state.quarantined:
        return Decision((), state, f"{sign.node} is healthy")
    state = replace(
        state,
        quarantined=_without(state.quarantined, sign.node),
        faults=_without(state.faults, sign.node),
        failed_checks=_without(state.failed_checks, sign.node),
    )
    return _welcome(state, sign, fleet)


def _without(kept: Mapping[str, Kept], node: str) -> dict[str, Kept]:
    return {name: value for name, value in kept.items() if name != node}


def _welcome(state: State, sign: observations.NodeJoined | observations.HealthChecked, fleet: FleetSpec) -> Decision:
    """A healthy node fills a slot that waits for one; otherwise it is a spare."""
    node = sign.node
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
    return restart(state, commands, sign, fleet, reason=f"{node} takes the empty place")


def waited(state: State, sign: observations.Waited, fleet: FleetSpec) -> Decision:
    """No node came in time: shrink to the fallback plan, or stop."""
    if not state.waiting:
        return Decision((), state, "nobody waits")
    empty = ", ".join(map(str, state.vacant))
    if fleet.fallback and can_shrink(state):
        return shrink(state, [], f"no node came for slot {empty}")
    report = (
        f"no node came for slot {empty} within fleet.wait_limit = {fleet.wait_limit:g} s, and there is no fleet.fallback that the "
        "nodes left can hold. Start the same command again when there are nodes."
    )
    return stop(state, [], ExitCode.LOST, report)
