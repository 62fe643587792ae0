"""Rules for failures of ranks: crashes, hangs, wrong numbers and slow nodes."""

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


def rank_failed(state: State, sign: observations.RankFailed, fleet: FleetSpec) -> Decision:
    """A dead process. The memory of its node outlives it, unless the machine itself is broken."""
    who = f"rank {sign.rank} on {sign.node}" if sign.rank is not None else f"the process that starts the ranks on {sign.node}"
    reason = f"{who}: {(sign.text or sign.signature).rstrip('.')}"
    if not sign.blamed:  # the program's own error: no node is at fault, whichever rank met it
        return after_failure(state, [], sign, fleet, key=sign.signature, reason=reason, code=ExitCode.FAILED, rank=sign.rank)
    if sign.hardware:
        return _broken(state, sign, fleet, node=sign.node, rank=sign.rank, reason=reason)
    return _after_fault_of_node(state, sign, fleet, node=sign.node, rank=sign.rank, key=sign.signature, reason=reason)


def _broken(state: State, sign: Observation, fleet: FleetSpec, *, node: str, rank: int | None, reason: str) -> Decision:
    """The machine itself reports that it is broken: its node leaves at once, even if there is no spare."""
    commands: list[Order] = []
    slot = state.slot(node)
    state, _ = blame(state, node, sign, fleet)
    if slot is not None:
        state, commands = evict(state, slot, sign, fleet, because=reason, forced=True)
    return restart(state, commands, sign, fleet, reason=reason, blamed=node, rank=rank)


def _after_fault_of_node(
    state: State, sign: Observation, fleet: FleetSpec, *, node: str, rank: int | None, key: str, reason: str
) -> Decision:
    """A fault blamed on a node may be chance: only a node with too many of them leaves, and only if a spare can take its
    place. Similar faults of several nodes at one step are also counted together: then the nodes are not the cause.
    """
    state, lemon = blame(state, node, sign, fleet)
    state, together = repeated(state, key, sign)
    slot = state.slot(node)
    if lemon and slot is not None and together < 2 * fleet.same_failure:
        because = f"{fleet.lemon_faults} faults within {fleet.lemon_hours:g} hours; last: {reason}"
        state, commands = evict(state, slot, sign, fleet, because=because, forced=False)
        if commands:
            return restart(state, commands, sign, fleet, reason=reason, blamed=node, rank=rank)
    if together >= 2 * fleet.same_failure:
        report = f"{reason}: the {ordinal(together)} similar failure at step {sign.step}, on several nodes, so the nodes are not the cause."
        return stop(state, [], ExitCode.LOST, report, rank=rank)
    return after_failure(state, [], sign, fleet, key=f"{key} on {node}", reason=reason, blamed=node, rank=rank)


def hang(state: State, sign: observations.Hang, fleet: FleetSpec) -> Decision:
    """All ranks wait for one. The hanging rank was inferred from phases and collectives; if these do not show it, no node is
    blamed."""
    if sign.silence < sign.limit:  # it works, but its start took too long
        reason = f"was not ready within {sign.limit:.3g} s of its start, in phase `{sign.phase}`"
    else:
        reason = f"no sign of life for {sign.silence:.3g} s (limit {sign.limit:.3g} s) in phase `{sign.phase}`"
    if sign.node is None:
        return after_failure(state, [], sign, fleet, key=f"hang in {sign.phase}", reason=reason)
    reason = f"rank {sign.rank} on {sign.node}: {reason}"
    if sign.hardware:
        return _broken(state, sign, fleet, node=sign.node, rank=sign.rank, reason=reason)
    return _after_fault_of_node(state, sign, fleet, node=sign.node, rank=sign.rank, key="hang", reason=reason)


def nonfinite(state: State, sign: observations.Nonfinite, fleet: FleetSpec) -> Decision:
    """Transient: gone when run again. Persistent and reproduced elsewhere: numerics. Not reproduced elsewhere: this rank's fault."""
    runs = state.reruns.get(sign.step, 0)
    what = f"a gradient of {sign.name} is not finite in step {sign.step + 1} (rank {sign.rank} on {sign.node})"
    if runs == 0:
        state = replace(state, reruns={**state.reruns, sign.step: 1})
        return Decision((RerunStep(sign.step),), state, f"{what}: run it again")
    if sign.elsewhere == "reproduced":
        seen = f"{what}, again when the step was repeated, and on another replica"
        report = f"{seen}. This is numerics: no restart helps. No weight was changed. {observations.NUMERICS}"
        return stop(state, [], ExitCode.FAILED, report, rank=sign.rank)
    if sign.elsewhere == "clean":
        state, _ = blame(state, sign.node, sign, fleet)
        commands: list[Order] = []
        if (slot := state.slot(sign.node)) is not None:
            state, commands = evict(state, slot, sign, fleet, because=f"{what}; another replica got finite ones", forced=False)
        key = f"not finite on {sign.node}"
        return after_failure(state, commands, sign, fleet, key=key, reason=what, blamed=sign.node, rank=sign.rank)
    reason = f"{what}, again when the step was repeated; no other replica could be asked"
    return after_failure(state, [], sign, fleet, key="not finite", reason=reason, code=ExitCode.FAILED, rank=sign.rank)


def state_corrupt(state: State, sign: observations.StateCorrupt, fleet: FleetSpec) -> Decision:
    """A rank's memory was altered. Copies were taken with the right digest, so the newest one is good."""
    reason = f"the state of rank {sign.rank} on {sign.node} has a wrong digest ({sign.where})"
    return _after_fault_of_node(state, sign, fleet, node=sign.node, rank=sign.rank, key="corrupt state", reason=reason)


def gradient_wrong(state: State, sign: observations.GradientWrong, fleet: FleetSpec) -> Decision:
    """Every state since the last passed verification may be wrong, so no copy of it is used. Suspects are excluded as far as
    spares are available."""
    tainted = tuple((copy.tier, copy.step, None) for copy in state.copies if copy.step > sign.good_step)
    known = sign.suspects[0] if len(sign.suspects) == 1 else None
    reason = f"wrong gradients since step {sign.good_step}, from {' or '.join(sign.suspects)}"
    state = replace(state, bad=(*state.bad, *tainted), copies=tuple(copy for copy in state.copies if copy.step <= sign.good_step))
    evicted: list[Order] = []
    for node in sign.suspects:
        state, _ = blame(state, node, sign, fleet)
        slot = state.slot(node)
        if slot is not None:
            state, orders = evict(state, slot, sign, fleet, because=reason, forced=False)
            evicted += orders
    source = newest(state.copies) or BEGINNING
    commands = [RollBack(source, reason), *evicted]
    state, times = repeated(state, f"wrong gradients after {sign.good_step} from {sign.suspects}", sign)
    if times >= fleet.same_failure:
        return stop(
            state, commands, ExitCode.FAILED, f"{reason}: for the {ordinal(times)} time, although different states were restored."
        )
    return restart(state, commands, sign, fleet, reason=reason, source=source, blamed=known)


def straggler(state: State, sign: observations.Straggler, fleet: FleetSpec) -> Decision:
    """Replace a slow node once it has cost as much as its replacement will: at most twice the best choice in hindsight."""
    reason = f"rank {sign.rank} on {sign.node} computes {sign.ratio:.2f} times as long as the others"
    slot = state.slot(sign.node)
    if sign.lost < sign.replacing or not state.spares or slot is None:
        return Decision((), state, f"{reason}: tolerate it", sign.node, sign.rank)
    state, _ = blame(state, sign.node, sign, fleet)
    state, commands = evict(state, slot, sign, fleet, because=reason, forced=False)
    return restart(state, commands, sign, fleet, reason=reason, blamed=sign.node, rank=sign.rank)
