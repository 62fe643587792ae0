"""Rules for copies of the state and shards of the data that are damaged, or that cannot be read or written."""

from dataclasses import replace

from megalith.control.policy.restart import restart, stop
from megalith.control.policy.state import Decision, State
from megalith.fleet import observations, tiers
from megalith.fleet.commands import Order, QuarantineCopy, ReadElsewhere, RollBack, SaveState, SkipTier
from megalith.fleet.exit_codes import ExitCode
from megalith.fleet.tiers import BEGINNING, newest
from megalith.spec.fleet import FleetSpec


def copy_corrupt(state: State, observation: observations.CopyCorrupt, fleet: FleetSpec) -> Decision:
    """Never use a damaged copy of the state again, and restore the newest other complete one. The failed start does
    not count as a start without progress."""
    which = "" if observation.slot is None else f" of slot {observation.slot}"
    reason = f"the copy{which} of step {observation.copy_step} in {observation.tier.value} is damaged" + (
        f": {observation.error}" if observation.error else ""
    )
    state = replace(
        state,
        bad=(*state.bad, (observation.tier, observation.copy_step, observation.slot)),
        copies=tiers.without_piece(state.copies, observation.tier, observation.copy_step, observation.slot),
        fruitless=max(0, state.fruitless - 1),
    )
    source = newest(state.copies, at_most=state.restored.step) or newest(state.copies) or BEGINNING
    commands: list[Order] = [QuarantineCopy(observation.tier, observation.copy_step, observation.slot)]
    if source != state.restored:
        commands.append(RollBack(source, reason))
    return restart(state, commands, observation, fleet, reason=reason, source=source)


def copy_away(state: State, observation: observations.CopyAway, fleet: FleetSpec) -> Decision:
    """Restart later if a copy of the state cannot be read; each wait is as long as the copy has been unreadable so far, but from
    `fleet.backoff` to `fleet.backoff_limit`. After `fleet.wait_limit`, this copy of the run's state counts as damaged."""
    since = observation.time if state.away is None else state.away
    gone = observation.time - since
    state = replace(state, away=since)
    if gone >= fleet.wait_limit:
        error = f"the copy could not be read for {gone:.0f} s: {observation.error}"
        damaged = observations.CopyCorrupt(
            time=observation.time,
            step=observation.step,
            tier=observation.tier,
            copy_step=observation.copy_step,
            slot=observation.slot,
            error=error,
        )
        return copy_corrupt(state, damaged, fleet)
    reason = (
        f"the copy of step {observation.copy_step} in {observation.tier.value} cannot be read at the moment: {observation.error}. "
        f"It is tried again for at most {fleet.wait_limit:g} s (fleet.wait_limit)"
    )
    state = replace(state, fruitless=max(0, state.fruitless - 1))
    return restart(state, [], observation, fleet, reason=reason, after=_until_tried_again(gone, fleet))


def save_failed(state: State, observation: observations.SaveFailed, fleet: FleetSpec) -> Decision:
    """Continue training although a copy of the state could not be written, and notify the user."""
    skipped = state.skipped if observation.tier in state.skipped else (*state.skipped, observation.tier)
    reason = f"no copy could be written to {observation.tier.value}: {observation.error}"
    return Decision((SkipTier(observation.tier, True, reason),), replace(state, skipped=skipped), reason)


def save_works(state: State, observation: observations.SaveWorks, fleet: FleetSpec) -> Decision:
    """Write copies to a tier again, because it works again."""
    if observation.tier not in state.skipped:
        return Decision((), state, "as before")
    skipped = tuple(tier for tier in state.skipped if tier is not observation.tier)
    reason = f"{observation.tier.value} takes copies again"
    return Decision((SkipTier(observation.tier, False, reason),), replace(state, skipped=skipped), reason)


def data_damaged(state: State, observation: observations.DataDamaged, fleet: FleetSpec) -> Decision:
    """Respond to damaged training data. Ranks read another copy of a damaged shard by themselves; if there is none, save and
    stop."""
    if observation.other_copy is not None:
        if observation.error in state.damaged:
            return Decision((), state, f"shard {observation.shard}: known already")
        state = replace(state, damaged=(*state.damaged, observation.error))
        reason = f"shard {observation.shard}: {observation.error}; read from {observation.other_copy}"
        return Decision((ReadElsewhere(observation.shard, observation.other_copy),), state, reason)
    report = (
        f"shard {observation.shard} of the data: {observation.error}, and there is no other copy. Training without this shard "
        f"would change the data order. Restore the shard (`megalith data verify` lists damaged ones), or name a complete copy "
        f"of the data in data.copies. Then start the same command again, which resumes from the newest checkpoint."
    )
    return stop(state, [SaveState(fleet.wait_limit)], ExitCode.FAILED, report)


def not_this_run(state: State, observation: observations.NotThisRun, fleet: FleetSpec) -> Decision:
    """Stop, because a start with the changed file would be a different run. A person must undo the change of the file."""
    return stop(state, [], observation.code, observation.error)


def store_away(state: State, observation: observations.StoreAway, fleet: FleetSpec) -> Decision:
    """Restart later if storage is unavailable; each wait is as long as the storage has been unavailable so far, but from
    `fleet.backoff` to `fleet.backoff_limit`. No node is blamed, and the failed start does not count as one without progress. After
    `fleet.wait_limit` the run stops, and the same command can resume it."""
    since = observation.time if state.away is None else state.away
    gone = observation.time - since
    reason = f"{observation.path} cannot be used at the moment: {observation.error}"
    if gone >= fleet.wait_limit:
        report = (
            f"{reason}. The path was unavailable for {gone:.0f} s (fleet.wait_limit = {fleet.wait_limit:g}). Start the same "
            f"command again once the path can be used: the run resumes from the newest copy of its state."
        )
        return stop(state, [], ExitCode.LOST, report)
    reason = f"{reason}. The run waits for it, for at most {fleet.wait_limit:g} s (fleet.wait_limit)"
    state = replace(state, away=since, fruitless=max(0, state.fruitless - 1))
    return restart(state, [], observation, fleet, reason=reason, after=_until_tried_again(gone, fleet))


def _until_tried_again(gone: float, fleet: FleetSpec) -> float:
    return min(max(gone, fleet.backoff), fleet.backoff_limit)
