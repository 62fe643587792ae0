"""Rules for restarts: which copy is restored, how long to wait, on how many nodes to run, and when to stop instead."""

from dataclasses import replace

from megalith.control.policy.placement import evict
from megalith.control.policy.state import VACANT, Decision, State
from megalith.fleet.commands import Order, Restart, RollBack, Shrink, Stop, Wait
from megalith.fleet.exit_codes import ExitCode
from megalith.fleet.observations import Observation
from megalith.fleet.tiers import BEGINNING, Copy, Source, Tier, fall_back, newest
from megalith.spec.fleet import FleetSpec

FREE_STARTS = 2
"""Number of consecutive starts without a finished step that are made without a wait."""


def restart(
    state: State, commands: list[Order], observation: Observation, fleet: FleetSpec, *, reason: str, source: Source | None = None,
    blamed: str | None = None, rank: int | None = None, after: float = 0.0,
) -> Decision:  # fmt: skip
    """Restart from `source` (default: the newest complete copy), or stop after too many starts without progress. If a slot is
    empty, instead shrink, wait or stop, as `fleet.no_spare` says. `after`: minimum wait in seconds. Nodes in `state.leaving` are
    replaced at this restart."""
    leaving = state.leaving
    for node in leaving:
        state, orders = evict(
            state, state.placement.index(node), observation, fleet, because="it must leave the run", forced=True
        )
        commands = [*commands, *orders]
    if source is None or leaving:  # pieces of the copy may be in the memory of nodes that left
        source = newest(state.copies, at_most=None if source is None else source.step) or BEGINNING
    if state.fruitless >= fleet.fruitless:
        report = f"in {state.fruitless} consecutive starts, no step was finished. The last reason: {reason}."
        return stop(state, commands, ExitCode.LOST, report, blamed=blamed, rank=rank)
    if state.vacant:
        return _see_to_vacancy(state, commands, fleet, reason=reason, blamed=blamed, rank=rank)
    waits = state.fruitless - FREE_STARTS
    after = max(after, backoff(waits, fleet) if waits >= 0 else 0.0)
    state = replace(state, restored=source, fruitless=state.fruitless + 1, waiting=False, shrunk=False)
    return Decision((*commands, Restart(source, state.placement, after)), state, reason, blamed, rank)


def backoff(times: int, fleet: FleetSpec) -> float:
    """Return the seconds to wait before the next attempt, after `times` earlier waits."""
    return min(fleet.backoff * 2.0 ** min(times, 64), fleet.backoff_limit)


def _see_to_vacancy(
    state: State, commands: list[Order], fleet: FleetSpec, *, reason: str, blamed: str | None, rank: int | None
) -> Decision:
    empty = ", ".join(map(str, state.vacant))
    shrinks = state.shrunk or fleet.no_spare == "shrink"
    if shrinks and fleet.fallback and can_shrink(state):
        return shrink(state, commands, f"{reason}; no spare for slot {empty}", blamed=blamed, rank=rank)
    if fleet.no_spare != "stop":
        order = Wait(fleet.wait_limit, state.vacant)
        return Decision((*commands, order), replace(state, waiting=True), f"{reason}; no spare for slot {empty}", blamed, rank)
    report = f"{reason}; no spare is left for slot {empty}, and fleet.no_spare = {fleet.no_spare!r}."
    return stop(state, commands, ExitCode.LOST, report, blamed=blamed, rank=rank)


def for_any_plan(copies: tuple[Copy, ...]) -> tuple[Copy, ...]:
    """Return the copies that any plan can read: those in the shared store, because copies on nodes are sharded for one plan."""
    return tuple(copy for copy in copies if copy.tier is Tier.STORE)


def can_shrink(state: State) -> bool:
    """True if the remaining nodes are enough for the fallback plan."""
    return len(state.placement) - len(state.vacant) >= state.least


def shrink(state: State, commands: list[Order], reason: str, *, blamed: str | None = None, rank: int | None = None) -> Decision:
    """Continue under the fallback plan."""
    left = tuple(node for node in state.placement if node != VACANT)
    kept = for_any_plan(state.copies)
    source = newest(kept) or BEGINNING
    state = replace(state, copies=kept, shrunk=True, waiting=False, restored=source, fruitless=state.fruitless + 1)
    return Decision((*commands, Shrink(source, left)), state, reason, blamed, rank)


def stop(
    state: State, commands: list[Order], code: int, report: str, *, blamed: str | None = None, rank: int | None = None
) -> Decision:
    """End the run with a report for the user and the exit status `code`."""
    return Decision((*commands, Stop(code, report)), replace(state, stopped=True), report, blamed, rank)


def repeated(state: State, key: str, observation: Observation) -> tuple[State, int]:
    """Count a failure; the second result is how often this failure (`key`) has occurred at this step."""
    name = f"{key} @ {observation.step}"
    times = state.repeats.get(name, 0) + 1
    return replace(state, repeats={**state.repeats, name: times}), times


def after_failure(
    state: State, commands: list[Order], observation: Observation, fleet: FleetSpec, *,
    key: str, reason: str, code: int = ExitCode.LOST, blamed: str | None = None, rank: int | None = None,
) -> Decision:  # fmt: skip
    """Restart after a failure, from a slower tier if the same failure (`key`) occurred at this step before. After too many
    repetitions, stop."""
    state, times = repeated(state, key, observation)
    if times >= fleet.same_failure:
        report = (
            f"{reason}: this is the {ordinal(times)} time at step {observation.step}, the last time after restoring "
            f"{state.restored}. Starting again did not help, so the fault is probably in {_where(blamed)}. "
            "Look at the evidence of each failure; then start the same command again, or start from an earlier checkpoint."
        )
        return stop(state, commands, code, report, blamed=blamed, rank=rank)
    if times == 1:
        return restart(state, commands, observation, fleet, reason=reason, blamed=blamed, rank=rank)
    source = fall_back(state.copies, state.restored)
    if source is None:
        return restart(state, commands, observation, fleet, reason=f"{reason}, again at step {observation.step}; no slower tier is left",
                        blamed=blamed, rank=rank)  # fmt: skip
    because = f"{reason}, again at step {observation.step} after restoring {state.restored}"
    commands = [*commands, RollBack(source, because)]
    newer = tuple((copy.tier, copy.step, None) for copy in state.copies if copy.step > source.step)
    state = replace(state, bad=(*state.bad, *newer))
    return restart(state, commands, observation, fleet, reason=because, source=source, blamed=blamed, rank=rank)


def _where(blamed: str | None) -> str:
    """Return the likely cause of a failure that recurs after restoring different copies."""
    program = "the program, its data or its numerics"
    return program if blamed is None else f"{program}, or in {blamed}"


def ordinal(number: int) -> str:
    """Return a number as an ordinal: first, second, third, 4th."""
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return {1: "first", 2: "second", 3: "third"}.get(number, f"{number}{ending}")
