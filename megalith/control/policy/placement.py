"""Placement of nodes in slots: blame, quarantine and replacement."""

from dataclasses import replace

from megalith.control.policy.state import VACANT, State
from megalith.fleet import tiers
from megalith.fleet.commands import CheckHealth, Order, QuarantineNode, Replace
from megalith.fleet.observations import Observation
from megalith.spec.fleet import FleetSpec

HOUR = 3600.0


def evict(
    state: State, slot: int, observation: Observation, fleet: FleetSpec, *, because: str, forced: bool
) -> tuple[State, list[Order]]:
    """Replace the node of a slot by a spare. Without a spare, a node that is only suspect (not `forced`) stays. The spare has
    none of the node's copies, so it reads the state from a buddy or a slower tier.
    """
    node = state.placement[slot]
    if not state.spares and not forced:
        return state, []
    spare, rest = (state.spares[0], state.spares[1:]) if state.spares else (VACANT, ())
    placement = (*state.placement[:slot], spare, *state.placement[slot + 1 :])
    nodes = len(placement)
    copies = tiers.without_nodes(state.copies, (slot,), nodes=nodes, distance=fleet.buddy_distance(nodes))
    out = {**state.quarantined, node: observation.time}
    leaving = tuple(other for other in state.leaving if other != node)
    after = replace(state, placement=placement, spares=rest, quarantined=out, copies=copies, leaving=leaving)
    commands: list[Order] = [QuarantineNode(node, because), CheckHealth(node)]
    return after, [*commands, Replace(slot, node, spare)] if spare else commands


def blame(state: State, node: str, observation: Observation, fleet: FleetSpec) -> tuple[State, bool]:
    """Count a fault of a node. Return the new state, and True if the node's recent faults suffice to exclude it."""
    since = observation.time - fleet.lemon_hours * HOUR
    times = (*(time for time in state.faults.get(node, ()) if time > since), observation.time)
    return replace(state, faults={**state.faults, node: times}), len(times) >= fleet.lemon_faults
