"""Rules for failures of ranks: crashes, hangs, wrong results and slow nodes."""

from dataclasses import replace

from megalith.control.policy.placement import blame, evict
from megalith.control.policy.restart import after_failure, ordinal, repeated, restart, stop
from megalith.control.policy.state import Decision, State
from megalith.fleet import observations
from megalith.fleet.commands import Order, RerunStep, RollBack
from megalith.fleet.exit_codes import ExitCode
from megalith.fleet.observations import Observation
from megalith.fleet.tiers import BEGINNING, newest
from megalith.spec.fleet import FleetSpec


def rank_failed(state: State, observation: observations.RankFailed, fleet: FleetSpec) -> Decision:
    """Respond to the death of a rank's process. The copies in the memory of the rank's node stay usable, unless the machine is broken."""
    who = (
        f"rank {observation.rank} on {observation.node}"
        if observation.rank is not None
        else f"the process that starts the ranks on {observation.node}"
    )
    reason = f"{who}: {(observation.text or observation.signature).rstrip('.')}"
    if not observation.blamed:  # the program's own error: no node is at fault, whichever rank raised it
        return after_failure(
            state, [], observation, fleet, key=observation.signature, reason=reason, code=ExitCode.FAILED, rank=observation.rank
        )
    if observation.hardware:
        return _broken(state, observation, fleet, node=observation.node, rank=observation.rank, reason=reason)
    return _after_fault_of_node(
        state, observation, fleet, node=observation.node, rank=observation.rank, key=observation.signature, reason=reason
    )


def _broken(state: State, observation: Observation, fleet: FleetSpec, *, node: str, rank: int | None, reason: str) -> Decision:
    """Exclude the node of a machine that reports a fault of its own, even if there is no spare."""
    commands: list[Order] = []
    slot = state.slot(node)
    state, _ = blame(state, node, observation, fleet)
    if slot is not None:
        state, commands = evict(state, slot, observation, fleet, because=reason, forced=True)
    return restart(state, commands, observation, fleet, reason=reason, blamed=node, rank=rank)


def _after_fault_of_node(
    state: State, observation: Observation, fleet: FleetSpec, *, node: str, rank: int | None, key: str, reason: str
) -> Decision:
    """Restart after a fault of a node. Exclude the node only if it had several faults, because a single fault may be chance, and only
    if a spare can replace the node. If similar faults recur at one step on several nodes, stop: the nodes are not the cause.
    """
    state, lemon = blame(state, node, observation, fleet)
    state, together = repeated(state, key, observation)
    slot = state.slot(node)
    if lemon and slot is not None and together < 2 * fleet.same_failure:
        because = f"{fleet.lemon_faults} faults within {fleet.lemon_hours:g} hours; last: {reason}"
        state, commands = evict(state, slot, observation, fleet, because=because, forced=False)
        if commands:
            return restart(state, commands, observation, fleet, reason=reason, blamed=node, rank=rank)
    if together >= 2 * fleet.same_failure:
        report = (
            f"{reason}: this is the {ordinal(together)} similar failure at step {observation.step}. The failures were on several "
            "nodes, so the nodes are not the cause."
        )
        return stop(state, [], ExitCode.LOST, report, rank=rank)
    return after_failure(state, [], observation, fleet, key=f"{key} on {node}", reason=reason, blamed=node, rank=rank)


def hang(state: State, observation: observations.Hang, fleet: FleetSpec) -> Decision:
    """Respond to a hang. Phases and collectives show for which rank the other ranks wait; if they show no such rank, no node is
    blamed."""
    if observation.silence < observation.limit:  # the rank sends heartbeats, but its start took too long
        reason = f"was not ready within {observation.limit:.3g} s, in phase `{observation.phase}`"
    else:
        silence = f"{observation.silence:.3g} s (limit {observation.limit:.3g} s)"
        reason = f"no rank sent a heartbeat for {silence} in phase `{observation.phase}`"
    if observation.node is None:
        return after_failure(state, [], observation, fleet, key=f"hang in {observation.phase}", reason=reason)
    reason = f"rank {observation.rank} on {observation.node}: {reason}"
    if observation.hardware:
        return _broken(state, observation, fleet, node=observation.node, rank=observation.rank, reason=reason)
    return _after_fault_of_node(
        state, observation, fleet, node=observation.node, rank=observation.rank, key="hang", reason=reason
    )


def nonfinite(state: State, observation: observations.Nonfinite, fleet: FleetSpec) -> Decision:
    """Respond to a gradient that is not finite: repeat the step. If the repeated gradient is not finite either, another replica computes
    it: the numerics are the cause if the other replica gets the same result, and the rank's node if it gets finite numbers."""
    runs = state.reruns.get(observation.step, 0)
    what = (
        f"a gradient of {observation.name} is not finite in step {observation.step + 1} (rank {observation.rank} on {observation.node})"
        if observation.rank is not None
        else f"in step {observation.step + 1}, each rank's gradients are finite, but their sum over the ranks, or its norm, is not"
    )
    if runs == 0:
        state = replace(state, reruns={**state.reruns, observation.step: 1})
        return Decision((RerunStep(observation.step),), state, f"{what}: repeat the step")
    if observation.elsewhere == "reproduced":
        again = "repeating the step" if observation.rank is None else "repeating the step and computing it on another replica"
        seen = f"{what}; {again} gave the same result"
        report = f"{seen}. The numerics are the cause, so a restart does not help. No weight was changed. {observations.NUMERICS}"
        return stop(state, [], ExitCode.FAILED, report, rank=observation.rank)
    if observation.elsewhere == "clean":
        state, _ = blame(state, observation.node, observation, fleet)
        commands: list[Order] = []
        if (slot := state.slot(observation.node)) is not None:
            state, commands = evict(
                state, slot, observation, fleet, because=f"{what}; another replica computed finite numbers", forced=False
            )
        key = f"not finite on {observation.node}"
        return after_failure(
            state, commands, observation, fleet, key=key, reason=what, blamed=observation.node, rank=observation.rank
        )
    reason = f"{what}; repeating the step gave the same result, and no other replica could compute the step"
    return after_failure(
        state, [], observation, fleet, key="not finite", reason=reason, code=ExitCode.FAILED, rank=observation.rank
    )


def state_corrupt(state: State, observation: observations.StateCorrupt, fleet: FleetSpec) -> Decision:
    """Respond to altered state in a rank's memory. The newest copy is good, because a state with a wrong digest is not copied."""
    reason = f"the state of rank {observation.rank} on {observation.node} has a wrong digest ({observation.where})"
    return _after_fault_of_node(
        state, observation, fleet, node=observation.node, rank=observation.rank, key="corrupt state", reason=reason
    )


def gradient_wrong(state: State, observation: observations.GradientWrong, fleet: FleetSpec) -> Decision:
    """Respond to a wrong gradient. Copies that are newer than the last verified step may be wrong, so they are not restored. Spares
    replace as many of the suspected nodes as possible."""
    tainted = tuple((copy.tier, copy.step, None) for copy in state.copies if copy.step > observation.good_step)
    known = observation.suspects[0] if len(observation.suspects) == 1 else None
    reason = f"wrong gradients after step {observation.good_step}, computed by {' or '.join(observation.suspects)}"
    state = replace(
        state, bad=(*state.bad, *tainted), copies=tuple(copy for copy in state.copies if copy.step <= observation.good_step)
    )
    evicted: list[Order] = []
    for node in observation.suspects:
        state, _ = blame(state, node, observation, fleet)
        slot = state.slot(node)
        if slot is not None:
            state, orders = evict(state, slot, observation, fleet, because=reason, forced=False)
            evicted += orders
    source = newest(state.copies) or BEGINNING
    commands = [RollBack(source, reason), *evicted]
    state, times = repeated(state, f"wrong gradients after {observation.good_step} from {observation.suspects}", observation)
    if times >= fleet.same_failure:
        return stop(
            state,
            commands,
            ExitCode.FAILED,
            f"{reason}: this is the {ordinal(times)} time, although a verified state was restored after each earlier time.",
        )
    return restart(state, commands, observation, fleet, reason=reason, source=source, blamed=known)


def straggler(state: State, observation: observations.Straggler, fleet: FleetSpec) -> Decision:
    """Replace a slow node once its slowness has cost the run as much time as the replacement will cost. By this rule, slowness and
    replacement together cost at most twice the lowest possible cost."""
    reason = f"rank {observation.rank} on {observation.node} computes {observation.ratio:.2f} times as long as the other ranks"
    slot = state.slot(observation.node)
    if observation.lost < observation.replacing or not state.spares or slot is None:
        return Decision((), state, f"{reason}: tolerate the slow node", observation.node, observation.rank)
    state, _ = blame(state, observation.node, observation, fleet)
    state, commands = evict(state, slot, observation, fleet, because=reason, forced=False)
    return restart(state, commands, observation, fleet, reason=reason, blamed=observation.node, rank=observation.rank)
