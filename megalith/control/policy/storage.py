"""Rules for copies of the state and shards of the data that are damaged, away, or cannot be written."""

from dataclasses import replace

from megalith.control.policy.restart import restart, stop
from megalith.control.policy.state import Decision, State
from megalith.fleet import observations, tiers
from megalith.fleet.commands import Order, QuarantineCopy, ReadElsewhere, RollBack, SaveState, SkipTier
from megalith.fleet.exit_codes import ExitCode
from megalith.fleet.tiers import BEGINNING, newest
from megalith.spec.fleet import FleetSpec


def copy_corrupt(state: State, sign: observations.CopyCorrupt, fleet: FleetSpec) -> Decision:
    """A damaged copy is set aside, and the next newest whole one taken. This does not count as a failure of the run."""
    which = "" if sign.slot is None else f" of slot {sign.slot}"
    reason = f"the copy{which} of step {sign.copy_step} in {sign.tier.value} is damaged" + (
        f": {sign.error}" if sign.error else ""
    )
    state = replace(
        state,
        bad=(*state.bad, (sign.tier, sign.copy_step, sign.slot)),
        copies=tiers.without_piece(state.copies, sign.tier, sign.copy_step, sign.slot),
        fruitless=max(0, state.fruitless - 1),
    )
    source = newest(state.copies, at_most=state.restored.step) or newest(state.copies) or BEGINNING
    commands: list[Order] = [QuarantineCopy(sign.tier, sign.copy_step, sign.slot)]
    if source != state.restored:
        commands.append(RollBack(source, reason))
    return restart(state, commands, sign, fleet, reason=reason, source=source)


def copy_away(state: State, sign: observations.CopyAway, fleet: FleetSpec) -> Decision:
    """A copy that cannot be read is tried again; each wait is as long as it has been unavailable so far. After the time that the
    run would wait for a node, it counts as damaged."""
    since = sign.time if state.away is None else state.away
    gone = sign.time - since
    state = replace(state, away=since)
    if gone >= fleet.wait_limit:
        error = f"it could not be read for {gone:.0f} s: {sign.error}"
        damaged = observations.CopyCorrupt(
            time=sign.time, step=sign.step, tier=sign.tier, copy_step=sign.copy_step, slot=sign.slot, error=error
        )
        return copy_corrupt(state, damaged, fleet)
    reason = f"the copy of step {sign.copy_step} in {sign.tier.value} cannot be read just now: {sign.error}"
    state = replace(state, fruitless=max(0, state.fruitless - 1))
    return restart(state, [], sign, fleet, reason=reason, after=_until_tried_again(gone, fleet))


def save_failed(state: State, sign: observations.SaveFailed, fleet: FleetSpec) -> Decision:
    """Training continues: a failed copy is no reason to lose steps. The user must be told."""
    skipped = state.skipped if sign.tier in state.skipped else (*state.skipped, sign.tier)
    reason = f"no copy could be written to {sign.tier.value}: {sign.error}"
    return Decision((SkipTier(sign.tier, True, reason),), replace(state, skipped=skipped), reason)


def save_works(state: State, sign: observations.SaveWorks, fleet: FleetSpec) -> Decision:
    """A tier that failed is used again."""
    if sign.tier not in state.skipped:
        return Decision((), state, "as before")
    skipped = tuple(tier for tier in state.skipped if tier is not sign.tier)
    reason = f"{sign.tier.value} takes copies again"
    return Decision((SkipTier(sign.tier, False, reason),), replace(state, skipped=skipped), reason)


def data_damaged(state: State, sign: observations.DataDamaged, fleet: FleetSpec) -> Decision:
    """The reader already continues with another copy, and does so whenever it meets the damage, so no other action is needed."""
    if sign.other_copy is not None:
        if sign.error in state.damaged:
            return Decision((), state, f"shard {sign.shard}: known already")
        state = replace(state, damaged=(*state.damaged, sign.error))
        reason = f"shard {sign.shard}: {sign.error}; read from {sign.other_copy}"
        return Decision((ReadElsewhere(sign.shard, sign.other_copy),), state, reason)
    report = (
        f"shard {sign.shard} of the data: {sign.error}, and there is no other copy. Training on without it would change the data "
        "order. Put the shard back (`megalith data verify` names the damaged ones), or name a whole copy in data.copies; then start the "
        "same command again: it resumes from the newest checkpoint."
    )
    return stop(state, [SaveState(fleet.wait_limit)], ExitCode.FAILED, report)


def not_this_run(state: State, sign: observations.NotThisRun, fleet: FleetSpec) -> Decision:
    """The same start would be refused again, and a different one would be a different run. A person must undo the change."""
    return stop(state, [], ExitCode.FAILED, sign.error)


def store_away(state: State, sign: observations.StoreAway, fleet: FleetSpec) -> Decision:
    """Start again; each wait is as long as the store has been unavailable. The process that starts the ranks also waits for the
    path. Nobody is blamed, and no start is counted; after `wait_limit` the run stops, and can be started again."""
    since = sign.time if state.away is None else state.away
    gone = sign.time - since
    reason = f"{sign.path} cannot be used just now: {sign.error}"
    if gone >= fleet.wait_limit:
        report = (
            f"{reason}. It was unavailable for {gone:.0f} s (fleet.wait_limit = {fleet.wait_limit:g}). Start the same command again once "
            "it can be used: the run resumes from its newest copy."
        )
        return stop(state, [], ExitCode.LOST, report)
    state = replace(state, away=since, fruitless=max(0, state.fruitless - 1))
    return restart(state, [], sign, fleet, reason=reason, after=_until_tried_again(gone, fleet))


def _until_tried_again(gone: float, fleet: FleetSpec) -> float:
    """Return the seconds until the next try of something that has been unavailable for `gone` seconds."""
    return min(max(gone, fleet.backoff), fleet.backoff_limit)
