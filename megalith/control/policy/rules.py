"""The policy's function `decide`, its table of rules, and the rules for the start and the end of a run."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megalith.control.policy import failures, nodes, storage
from megalith.control.policy.restart import for_any_plan, restart, stop
from megalith.control.policy.state import Decision, State
from megalith.fleet import observations, tiers
from megalith.fleet.commands import CheckHealth, EndInOrder, Grow, Order, Restart, SaveState, Shrink, Wait
from megalith.fleet.exit_codes import ExitCode
from megalith.fleet.observations import Observation
from megalith.fleet.tiers import BEGINNING, Copy, Tier, newest
from megalith.spec.fleet import FleetSpec


def decide(state: State, observation: Observation, *, fleet: FleetSpec) -> Decision:
    """Decide on the response to an observation. Equal arguments always give equal decisions."""
    if state.stopped:
        return Decision((), state, "the run has been stopped")
    rule = RULES[type(observation)]
    return _sparing_checkpoints(rule(_with_trusted_copies(state), observation, fleet), state.copies, observation)


def _sparing_checkpoints(decision: Decision, copies: tuple[Copy, ...], observation: Observation) -> Decision:
    """If the decision is to start over although checkpoints exist, stop instead, because new checkpoints would replace the
    existing ones."""
    starts = [command for command in decision.commands if isinstance(command, Restart | Shrink | Grow)]
    steps = sorted(copy.step for copy in copies if copy.tier is Tier.STORE)
    if not steps or not any(start.source.tier is None for start in starts):
        return decision
    report = (
        f"{decision.reason}: none of the run's checkpoints (step {', '.join(map(str, steps))}) can be restored. Starting over "
        "would eventually delete these checkpoints. Replace a checkpoint by an intact copy of it, and start the same command again, "
        "which tries all "
        "checkpoints; or start over in another run folder (--run-dir)."
    )
    code = ExitCode.LOST if isinstance(observation, observations.CopyAway) else ExitCode.FAILED
    commands = [command for command in decision.commands if command not in starts]
    state = replace(decision.state, bad=(), away=None)
    return stop(state, commands, code, report, blamed=decision.blamed, rank=decision.blamed_rank)


def _with_trusted_copies(state: State) -> State:
    copies = state.copies
    for tier, step, slot in state.bad:
        copies = tiers.without_piece(copies, tier, step, slot)
    return state if copies == state.copies else replace(state, copies=copies)


def _started(state: State, observation: observations.Started, fleet: FleetSpec) -> Decision:
    """Start or resume the run. Nodes that an earlier controller excluded are checked first, and the run waits if it needs these
    nodes."""
    checks: list[Order] = [CheckHealth(node) for node in state.quarantined]
    if state.vacant and checks:
        empty = ", ".join(map(str, state.vacant))
        reason = f"slot {empty} is empty, and {', '.join(state.quarantined)} must pass a health check to return"
        return Decision((*checks, Wait(fleet.wait_limit, state.vacant)), replace(state, waiting=True), reason)
    return restart(state, checks, observation, fleet, reason=f"start from {newest(state.copies) or BEGINNING}")


def _progressed(state: State, observation: observations.Progressed, fleet: FleetSpec) -> Decision:
    """A step was finished, so clear the counts of failures at earlier steps."""
    if not (state.fruitless or state.repeats or state.reruns or state.bad or state.away is not None):
        return Decision((), state, "progress")
    repeats = {key: times for key, times in state.repeats.items() if int(key.rpartition(" @ ")[2]) >= observation.step}
    reruns = {step: times for step, times in state.reruns.items() if step >= observation.step}
    # copies of steps that were done again since are new ones
    bad = tuple(piece for piece in state.bad if not state.restored.step <= piece[1] <= observation.step)
    return Decision((), replace(state, fruitless=0, repeats=repeats, reruns=reruns, bad=bad, away=None), "progress")


def _saved(state: State, observation: observations.Saved, fleet: FleetSpec) -> Decision:
    """The ranks have saved and stopped together: replace leaving nodes, return to the run's own plan, or resume."""
    if not state.leaving:
        if state.shrunk and not state.vacant:
            source = newest(for_any_plan(state.copies)) or BEGINNING
            grown = replace(state, shrunk=False, restored=source)
            return Decision((Grow(source, state.placement),), grown, "continue under the run's own plan")
        return restart(state, [], observation, fleet, reason="resume after the save")
    return restart(state, [], observation, fleet, reason=f"{', '.join(state.leaving)} must leave the run")


def _stop_requested(state: State, observation: observations.StopRequested, fleet: FleetSpec) -> Decision:
    return stop(state, [SaveState(fleet.wait_limit)], ExitCode.STOPPED, "stopped on request; the same command resumes the run")


def _ordered(state: State, observation: observations.Ordered, fleet: FleetSpec) -> Decision:
    """Carry out a person's order. For a save, the ranks stop together and resume, so that all save the same step."""
    if observation.what == "stop":
        return Decision((EndInOrder(),), state, "a person or a callback orders that the run stops after this step")
    if observation.what == "quarantine":
        return nodes.ordered_out(state, observation, fleet)
    if state.waiting:
        return Decision((), state, "a person orders that the state is saved, but no ranks run now")
    return Decision(
        (SaveState(fleet.wait_limit),),
        state,
        "a person orders that the state is saved: the ranks save, stop, and resume from the saved state",
    )


RULES: dict[type[observations.Observation], Callable[[State, Any, FleetSpec], Decision]] = {
    observations.Started: _started,
    observations.Progressed: _progressed,
    observations.RankFailed: failures.rank_failed,
    observations.Hang: failures.hang,
    observations.NodesLost: nodes.nodes_lost,
    observations.Nonfinite: failures.nonfinite,
    observations.StateCorrupt: failures.state_corrupt,
    observations.CopyCorrupt: storage.copy_corrupt,
    observations.CopyAway: storage.copy_away,
    observations.GradientWrong: failures.gradient_wrong,
    observations.Straggler: failures.straggler,
    observations.Preempted: nodes.preempted,
    observations.Saved: _saved,
    observations.StopRequested: _stop_requested,
    observations.SaveFailed: storage.save_failed,
    observations.SaveWorks: storage.save_works,
    observations.DataDamaged: storage.data_damaged,
    observations.NotThisRun: storage.not_this_run,
    observations.StoreAway: storage.store_away,
    observations.NodeJoined: nodes.node_joined,
    observations.HealthChecked: nodes.health_checked,
    observations.Ordered: _ordered,
    observations.Waited: nodes.waited,
}
"""Kind of observation -> the function that decides on the response."""
