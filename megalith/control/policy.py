"""What to do about a fault: one pure function from (state, sign) to commands. No clock, no files, no processes.

The supervisor of a real run and the goodput simulator obey the same function, so like signs have like consequences. The rules, in
short: recover from the newest whole copy in the fastest tier; the same failure again at one step falls back a tier, and the third
time stops with a report; damaged copies are never used, and checkpoints never given up for a new beginning; a broken node's place
goes to a spare; what cannot be blamed on a node is not; starts that get nowhere come at growing intervals.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from pydantic import TypeAdapter

from megalith.fleet import signs, tiers
from megalith.fleet.commands import (
    CheckHealth,
    Grow,
    Order,
    QuarantineCopy,
    QuarantineNode,
    ReadElsewhere,
    Replace,
    RerunStep,
    Restart,
    RollBack,
    SaveState,
    Shrink,
    SkipTier,
    Stop,
    Wait,
)
from megalith.fleet.exit_codes import ExitCode
from megalith.fleet.signs import Sign
from megalith.fleet.tiers import BEGINNING, Copy, Source, Tier, fall_back, newest
from megalith.spec.fleet import FleetSpec

VACANT = ""
"""What `State.placement` says of a slot that no node fills."""

FREE_STARTS = 2
"""Starts without a step between them that come at once; only from the next on does waiting help."""

HOUR = 3600.0

Kept = TypeVar("Kept")


@dataclass(frozen=True)
class State:
    """All the policy remembers. The caller refreshes `copies` before it asks; everything else changes only through `decide`.

    `placement` is the node of each slot. `bad` are pieces that failed their digest: (tier, step, slot or None for all), which no
    refresh of `copies` brings back. `faults` are the times of the faults blamed on a node, `quarantined` since when a node is out,
    `failed_checks` its health checks in a row that it did not pass. `repeats` counts failures by "signature @ step", `reruns` the runs
    in place of a step. `restored` is what this generation began from, `fruitless` the starts since a step was done. `leaving` are
    nodes that go once the state is saved, `damaged` what is known to be wrong with the data, `least` how many nodes the fallback plan
    needs. `away`: since when the copy to restore cannot be read.
    """

    placement: tuple[str, ...]
    spares: tuple[str, ...] = ()
    copies: tuple[Copy, ...] = ()
    bad: tuple[tuple[Tier, int, int | None], ...] = ()
    faults: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    quarantined: Mapping[str, float] = field(default_factory=dict)
    repeats: Mapping[str, int] = field(default_factory=dict)
    reruns: Mapping[int, int] = field(default_factory=dict)
    failed_checks: Mapping[str, int] = field(default_factory=dict)
    restored: Source = BEGINNING
    fruitless: int = 0
    waiting: bool = False
    shrunk: bool = False
    skipped: tuple[Tier, ...] = ()
    leaving: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()
    least: int = 1
    away: float | None = None
    stopped: bool = False

    @property
    def vacant(self) -> tuple[int, ...]:
        """Slots without a node."""
        if VACANT not in self.placement:  # the usual case, a thousand times faster than the loop
            return ()
        return tuple(slot for slot, node in enumerate(self.placement) if node == VACANT)

    def slot(self, node: str) -> int | None:
        """The slot a node fills."""
        return self.placement.index(node) if node in self.placement else None


@dataclass(frozen=True)
class Decision:
    """What to do, in this order, and why. `blamed` is the node at fault, None when it is nobody's or nobody knows."""

    commands: tuple[Order, ...]
    state: State
    reason: str
    blamed: str | None = None
    blamed_rank: int | None = None


_STATES: TypeAdapter[State] = TypeAdapter(State)


def dump(state: State) -> dict[str, Any]:
    """A state as JSON can hold it: a supervisor that is started again goes on counting."""
    return _STATES.dump_python(state, mode="json")


def load(record: dict[str, Any]) -> State:
    """The state `dump` wrote. Raises pydantic's ValidationError for anything else."""
    return _STATES.validate_python(record)


def decide(state: State, sign: Sign, *, fleet: FleetSpec) -> Decision:
    """What a sign calls for. The same arguments give the same decision, always."""
    if state.stopped:
        return Decision((), state, "the run has been stopped")
    rule = RULES[type(sign)]
    return _sparing_checkpoints(rule(_with_trusted_copies(state), sign, fleet), state.copies, sign)


def _sparing_checkpoints(decision: Decision, copies: tuple[Copy, ...], sign: Sign) -> Decision:
    """Stop rather than begin anew while there are checkpoints, though none can be used: those that follow would take their places."""
    starts = [command for command in decision.commands if isinstance(command, Restart | Shrink | Grow)]
    steps = sorted(copy.step for copy in copies if copy.tier is Tier.STORE)
    if not steps or not any(start.source.tier is None for start in starts):
        return decision
    report = (
        f"{decision.reason}: none of the checkpoints (of step {', '.join(map(str, steps))}) can be used. Beginning anew would in time "
        "delete them. Put one back from a copy, or move their folder away to begin anew; the same command looks at all of them again."
    )
    code = ExitCode.LOST if isinstance(sign, signs.CopyAway) else ExitCode.FAILED
    commands = [command for command in decision.commands if command not in starts]
    state = replace(decision.state, bad=(), away=None)
    return _stop(state, commands, code, report, blamed=decision.blamed, rank=decision.blamed_rank)


def _with_trusted_copies(state: State) -> State:
    copies = state.copies
    for tier, step, slot in state.bad:
        copies = tiers.without_piece(copies, tier, step, slot)
    return state if copies == state.copies else replace(state, copies=copies)


# What several rules need


def _evict(state: State, slot: int, sign: Sign, fleet: FleetSpec, *, because: str, forced: bool) -> tuple[State, list[Order]]:
    """Take the node out of a slot and put a spare in. Without a spare a node that is only suspect (not `forced`) stays.

    What the node kept of copies does not move with the slot: the spare reads it from a buddy, or a slower tier.
    """
    node = state.placement[slot]
    if not state.spares and not forced:
        return state, []
    spare, rest = (state.spares[0], state.spares[1:]) if state.spares else (VACANT, ())
    placement = (*state.placement[:slot], spare, *state.placement[slot + 1 :])
    nodes = len(placement)
    copies = tiers.without_nodes(state.copies, (slot,), nodes=nodes, distance=fleet.buddy_distance(nodes))
    out = {**state.quarantined, node: sign.time}
    leaving = tuple(other for other in state.leaving if other != node)
    after = replace(state, placement=placement, spares=rest, quarantined=out, copies=copies, leaving=leaving)
    commands: list[Order] = [QuarantineNode(node, because), CheckHealth(node)]
    return after, [*commands, Replace(slot, node, spare)] if spare else commands


def _blame(state: State, node: str, sign: Sign, fleet: FleetSpec) -> tuple[State, bool]:
    """Note a fault against a node; whether it has had so many lately that it should go."""
    since = sign.time - fleet.lemon_hours * HOUR
    times = (*(time for time in state.faults.get(node, ()) if time > since), sign.time)
    return replace(state, faults={**state.faults, node: times}), len(times) >= fleet.lemon_faults


def _restart(
    state: State, commands: list[Order], sign: Sign, fleet: FleetSpec, *, reason: str, source: Source | None = None,
    blamed: str | None = None, rank: int | None = None, after: float = 0.0,
) -> Decision:  # fmt: skip
    """Go on from `source` (default: the newest whole copy), or see to empty slots first; stop when starting does not help. `after`:
    seconds to wait at least. Who was to leave once the state is saved leaves with any start."""
    leaving = state.leaving
    for node in leaving:
        state, orders = _evict(
            state, state.placement.index(node), sign, fleet, because="the scheduler takes it away", forced=True
        )
        commands = [*commands, *orders]
    if source is None or leaving:  # pieces of it may be in the memory of those who left
        source = newest(state.copies, at_most=None if source is None else source.step) or BEGINNING
    if state.fruitless >= fleet.fruitless:
        report = f"{state.fruitless} starts in a row did not get one step done. The last reason: {reason}."
        return _stop(state, commands, ExitCode.LOST, report, blamed=blamed, rank=rank)
    if state.vacant:
        return _see_to_vacancy(state, commands, fleet, reason=reason, blamed=blamed, rank=rank)
    waits = state.fruitless - FREE_STARTS
    after = max(after, _backoff(waits, fleet) if waits >= 0 else 0.0)
    state = replace(state, restored=source, fruitless=state.fruitless + 1, waiting=False, shrunk=False)
    return Decision((*commands, Restart(source, state.placement, after)), state, reason, blamed, rank)


def _backoff(times: int, fleet: FleetSpec) -> float:
    """Seconds to wait before trying again what has been tried so often."""
    return min(fleet.backoff * 2.0 ** min(times, 64), fleet.backoff_limit)


def _see_to_vacancy(
    state: State, commands: list[Order], fleet: FleetSpec, *, reason: str, blamed: str | None, rank: int | None
) -> Decision:
    empty = ", ".join(map(str, state.vacant))
    shrinks = state.shrunk or fleet.no_spare == "shrink"
    if shrinks and fleet.fallback and _can_shrink(state):
        return _shrink(state, commands, f"{reason}; no spare for slot {empty}", blamed=blamed, rank=rank)
    if fleet.no_spare != "stop":
        order = Wait(fleet.wait_limit, state.vacant)
        return Decision((*commands, order), replace(state, waiting=True), f"{reason}; no spare for slot {empty}", blamed, rank)
    report = f"{reason}; no spare is left for slot {empty}, and fleet.no_spare = {fleet.no_spare!r}."
    return _stop(state, commands, ExitCode.LOST, report, blamed=blamed, rank=rank)


def _for_any_plan(copies: tuple[Copy, ...]) -> tuple[Copy, ...]:
    """Copies that ranks of another plan can read: a node's own copies are cut as its plan says."""
    return tuple(copy for copy in copies if copy.tier is Tier.STORE)


def _can_shrink(state: State) -> bool:
    return len(state.placement) - len(state.vacant) >= state.least


def _shrink(state: State, commands: list[Order], reason: str, *, blamed: str | None = None, rank: int | None = None) -> Decision:
    """Go on under the fallback plan."""
    left = tuple(node for node in state.placement if node != VACANT)
    kept = _for_any_plan(state.copies)
    source = newest(kept) or BEGINNING
    state = replace(state, copies=kept, shrunk=True, waiting=False, restored=source, fruitless=state.fruitless + 1)
    return Decision((*commands, Shrink(source, left)), state, reason, blamed, rank)


def _stop(
    state: State, commands: list[Order], code: int, report: str, *, blamed: str | None = None, rank: int | None = None
) -> Decision:
    return Decision((*commands, Stop(code, report)), replace(state, stopped=True), report, blamed, rank)


def _repeated(state: State, key: str, sign: Sign) -> tuple[State, int]:
    """Count a failure at its step; how often it has come there."""
    name = f"{key} @ {sign.step}"
    times = state.repeats.get(name, 0) + 1
    return replace(state, repeats={**state.repeats, name: times}), times


def _after_failure(
    state: State, commands: list[Order], sign: Sign, fleet: FleetSpec, *,
    key: str, reason: str, code: int = ExitCode.LOST, blamed: str | None = None, rank: int | None = None,
) -> Decision:  # fmt: skip
    """Restart after a failure; when it came before at this step, from a slower tier, and at last not at all."""
    state, times = _repeated(state, key, sign)
    if times >= fleet.same_failure:
        report = (
            f"{reason}: for the {_ordinal(times)} time at step {sign.step}, the last time after restoring {state.restored}. "
            "What it restored from does not matter, so it is in the program, its data or its numerics, or a machine nobody blamed. "
            "Look at the evidence of each time; then start the same command again, or from an earlier checkpoint."
        )
        return _stop(state, commands, code, report, blamed=blamed, rank=rank)
    if times == 1:
        return _restart(state, commands, sign, fleet, reason=reason, blamed=blamed, rank=rank)
    source = fall_back(state.copies, state.restored)
    if source is None:
        return _restart(state, commands, sign, fleet, reason=f"{reason}, again at step {sign.step}; no slower tier is left",
                        blamed=blamed, rank=rank)  # fmt: skip
    because = f"{reason}, again at step {sign.step} after restoring {state.restored}"
    commands = [*commands, RollBack(source, because)]
    newer = tuple((copy.tier, copy.step, None) for copy in state.copies if copy.step > source.step)
    state = replace(state, bad=(*state.bad, *newer))
    return _restart(state, commands, sign, fleet, reason=because, source=source, blamed=blamed, rank=rank)


def _ordinal(number: int) -> str:
    return {1: "first", 2: "second", 3: "third"}.get(number, f"{number}th")


# The rules, one for each kind of sign


def _started(state: State, sign: signs.Started, fleet: FleetSpec) -> Decision:
    """Starting, resuming and recovering are one path. Nodes that were out then are checked, and waited for where they are needed."""
    checks: list[Order] = [CheckHealth(node) for node in state.quarantined]
    if state.vacant and checks:
        empty = ", ".join(map(str, state.vacant))
        reason = f"{', '.join(state.quarantined)} must pass a health check before slot {empty} can be filled"
        return Decision((*checks, Wait(fleet.wait_limit, state.vacant)), replace(state, waiting=True), reason)
    return _restart(state, checks, sign, fleet, reason=f"start from {newest(state.copies) or BEGINNING}")


def _progressed(state: State, sign: signs.Progressed, fleet: FleetSpec) -> Decision:
    """A step that was not done before: what failed at earlier steps is over."""
    if not (state.fruitless or state.repeats or state.reruns or state.bad or state.away is not None):
        return Decision((), state, "progress")
    repeats = {key: times for key, times in state.repeats.items() if int(key.rpartition(" @ ")[2]) >= sign.step}
    reruns = {step: times for step, times in state.reruns.items() if step >= sign.step}
    # copies of steps that were done again since are new ones
    bad = tuple(piece for piece in state.bad if not state.restored.step <= piece[1] <= sign.step)
    return Decision((), replace(state, fruitless=0, repeats=repeats, reruns=reruns, bad=bad, away=None), "progress")


def _rank_failed(state: State, sign: signs.RankFailed, fleet: FleetSpec) -> Decision:
    """A dead process. The memory of its node outlives it, unless the machine itself is broken."""
    who = f"rank {sign.rank} on {sign.node}" if sign.rank is not None else f"what starts the ranks on {sign.node}"
    reason = f"{who}: {sign.text or sign.signature}"
    if not sign.blamed:  # the program's own error: no node is at fault, whichever rank met it
        return _after_failure(state, [], sign, fleet, key=sign.signature, reason=reason, code=ExitCode.FAILED, rank=sign.rank)
    if sign.hardware:
        return _broken(state, sign, fleet, node=sign.node, rank=sign.rank, reason=reason)
    return _after_fault_of_node(state, sign, fleet, node=sign.node, rank=sign.rank, key=sign.signature, reason=reason)


def _broken(state: State, sign: Sign, fleet: FleetSpec, *, node: str, rank: int | None, reason: str) -> Decision:
    """The machine itself says that it is broken: it goes at once, whether there is a spare or not."""
    commands: list[Order] = []
    slot = state.slot(node)
    state, _ = _blame(state, node, sign, fleet)
    if slot is not None:
        state, commands = _evict(state, slot, sign, fleet, because=reason, forced=True)
    return _restart(state, commands, sign, fleet, reason=reason, blamed=node, rank=rank)


def _after_fault_of_node(
    state: State, sign: Sign, fleet: FleetSpec, *, node: str, rank: int | None, key: str, reason: str
) -> Decision:
    """A fault blamed on a node that may be chance: a node with too many of them goes, if a spare can take its place.

    Like faults of several nodes at one step are counted together as well: then it is not the nodes.
    """
    state, lemon = _blame(state, node, sign, fleet)
    state, together = _repeated(state, key, sign)
    slot = state.slot(node)
    if lemon and slot is not None and together < 2 * fleet.same_failure:
        because = f"{fleet.lemon_faults} faults within {fleet.lemon_hours:g} hours; last: {reason}"
        state, commands = _evict(state, slot, sign, fleet, because=because, forced=False)
        if commands:
            return _restart(state, commands, sign, fleet, reason=reason, blamed=node, rank=rank)
    if together >= 2 * fleet.same_failure:
        report = f"{reason}: the {_ordinal(together)} like failure at step {sign.step}, on several nodes. It is not the nodes."
        return _stop(state, [], ExitCode.LOST, report, rank=rank)
    return _after_failure(state, [], sign, fleet, key=f"{key} on {node}", reason=reason, blamed=node, rank=rank)


def _hang(state: State, sign: signs.Hang, fleet: FleetSpec) -> Decision:
    """Everybody waits for one. Who it is was judged from phases and collectives; if nobody can say, nobody is blamed."""
    reason = f"no sign of life for {sign.silence:.3g} s (limit {sign.limit:.3g} s) in phase `{sign.phase}`"
    if sign.node is None:
        return _after_failure(state, [], sign, fleet, key=f"hang in {sign.phase}", reason=reason)
    reason = f"rank {sign.rank} on {sign.node}: {reason}"
    if sign.hardware:
        return _broken(state, sign, fleet, node=sign.node, rank=sign.rank, reason=reason)
    return _after_fault_of_node(state, sign, fleet, node=sign.node, rank=sign.rank, key="hang", reason=reason)


def _nodes_lost(state: State, sign: signs.NodesLost, fleet: FleetSpec) -> Decision:
    """Machines that went away take the memory and disks of their slots along. A lost spare is only struck off."""
    slots = tuple(slot for slot, node in enumerate(state.placement) if node in sign.nodes)
    gone = dict.fromkeys(sign.nodes, sign.time)
    spares = tuple(node for node in state.spares if node not in sign.nodes)
    state = replace(state, spares=spares, quarantined={**state.quarantined, **gone})
    names = ", ".join(sign.nodes[:4]) + (f" and {len(sign.nodes) - 4} more" if len(sign.nodes) > 4 else "")
    if not slots:
        return Decision((), state, f"outside the mesh: lost {names}")
    commands: list[Order] = []
    for slot in slots:
        state, _ = _blame(state, state.placement[slot], sign, fleet)
        state, orders = _evict(state, slot, sign, fleet, because="it no longer answers", forced=True)
        commands += orders
    blamed = sign.nodes[0] if len(sign.nodes) == 1 else None
    return _restart(state, commands, sign, fleet, reason=f"lost {names}", blamed=blamed)


def _nonfinite(state: State, sign: signs.Nonfinite, fleet: FleetSpec) -> Decision:
    """Transient: gone when run again. Persistent and reproduced elsewhere: numerics. Not reproduced elsewhere: this rank's fault."""
    runs = state.reruns.get(sign.step, 0)
    what = f"a gradient of {sign.name} is not finite in step {sign.step + 1} (rank {sign.rank} on {sign.node})"
    if runs == 0:
        state = replace(state, reruns={**state.reruns, sign.step: 1})
        return Decision((RerunStep(sign.step),), state, f"{what}: run it again")
    if sign.elsewhere == "reproduced":
        report = f"{what}, again when the step was run again, and on another replica. This is numerics: no restart helps."
        return _stop(state, [], ExitCode.FAILED, report, rank=sign.rank)
    if sign.elsewhere == "clean":
        state, _ = _blame(state, sign.node, sign, fleet)
        commands: list[Order] = []
        if (slot := state.slot(sign.node)) is not None:
            state, commands = _evict(state, slot, sign, fleet, because=f"{what}; another replica got finite ones", forced=False)
        key = f"not finite on {sign.node}"
        return _after_failure(state, commands, sign, fleet, key=key, reason=what, blamed=sign.node, rank=sign.rank)
    reason = f"{what}, again when the step was run again; no other replica could be asked"
    return _after_failure(state, [], sign, fleet, key="not finite", reason=reason, code=ExitCode.FAILED, rank=sign.rank)


def _state_corrupt(state: State, sign: signs.StateCorrupt, fleet: FleetSpec) -> Decision:
    """What a rank holds in its memory was altered. Copies were taken with the right digest, so the newest one is good."""
    reason = f"the state of rank {sign.rank} on {sign.node} has a wrong digest ({sign.where})"
    return _after_fault_of_node(state, sign, fleet, node=sign.node, rank=sign.rank, key="corrupt state", reason=reason)


def _copy_corrupt(state: State, sign: signs.CopyCorrupt, fleet: FleetSpec) -> Decision:
    """A damaged copy is set aside, and the next newest whole one taken. This is no failure of the run: nothing is counted."""
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
    return _restart(state, commands, sign, fleet, reason=reason, source=source)


def _copy_away(state: State, sign: signs.CopyAway, fleet: FleetSpec) -> Decision:
    """A copy that cannot be read is tried again, each time after as long as it has been away, for as long as a node would be waited for:
    only then does it count as damaged."""
    since = sign.time if state.away is None else state.away
    gone = sign.time - since
    state = replace(state, away=since)
    if gone >= fleet.wait_limit:
        error = f"it could not be read for {gone:.0f} s: {sign.error}"
        damaged = signs.CopyCorrupt(
            time=sign.time, step=sign.step, tier=sign.tier, copy_step=sign.copy_step, slot=sign.slot, error=error
        )
        return _copy_corrupt(state, damaged, fleet)
    reason = f"the copy of step {sign.copy_step} in {sign.tier.value} cannot be read just now: {sign.error}"
    after = min(max(gone, fleet.backoff), fleet.backoff_limit)
    return _restart(replace(state, fruitless=max(0, state.fruitless - 1)), [], sign, fleet, reason=reason, after=after)


def _gradient_wrong(state: State, sign: signs.GradientWrong, fleet: FleetSpec) -> Decision:
    """Every state since the last good verification may be wrong: no copy of it is used; suspects go as far as there are spares."""
    tainted = tuple((copy.tier, copy.step, None) for copy in state.copies if copy.step > sign.good_step)
    known = sign.suspects[0] if len(sign.suspects) == 1 else None
    reason = f"wrong gradients since step {sign.good_step}, from {' or '.join(sign.suspects)}"
    state = replace(state, bad=(*state.bad, *tainted), copies=tuple(copy for copy in state.copies if copy.step <= sign.good_step))
    evicted: list[Order] = []
    for node in sign.suspects:
        state, _ = _blame(state, node, sign, fleet)
        slot = state.slot(node)
        if slot is not None:
            state, orders = _evict(state, slot, sign, fleet, because=reason, forced=False)
            evicted += orders
    source = newest(state.copies) or BEGINNING
    commands = [RollBack(source, reason), *evicted]
    state, times = _repeated(state, f"wrong gradients after {sign.good_step} from {sign.suspects}", sign)
    if times >= fleet.same_failure:
        return _stop(state, commands, ExitCode.FAILED, f"{reason}: for the {_ordinal(times)} time, whatever was restored.")
    return _restart(state, commands, sign, fleet, reason=reason, source=source, blamed=known)


def _straggler(state: State, sign: signs.Straggler, fleet: FleetSpec) -> Decision:
    """Replace a slow node once it has cost as much as its replacement will: at most twice the best choice in hindsight."""
    reason = f"rank {sign.rank} on {sign.node} computes {sign.ratio:.2f} times as long as the others"
    slot = state.slot(sign.node)
    if sign.lost < sign.replacing or not state.spares or slot is None:
        return Decision((), state, f"{reason}: bear it", sign.node, sign.rank)
    state, _ = _blame(state, sign.node, sign, fleet)
    state, commands = _evict(state, slot, sign, fleet, because=reason, forced=False)
    return _restart(state, commands, sign, fleet, reason=reason, blamed=sign.node, rank=sign.rank)


def _preempted(state: State, sign: signs.Preempted, fleet: FleetSpec) -> Decision:
    """There is time for an agreed stop: nothing is lost but the restart."""
    slot = state.slot(sign.node)
    if slot is None:
        spares = tuple(node for node in state.spares if node != sign.node)
        return Decision((), replace(state, spares=spares), f"{sign.node}, outside the mesh, is taken away")
    reason = f"{sign.node} is taken away by the scheduler in {sign.grace:g} s"
    if sign.node in state.leaving:
        return Decision((), state, f"{reason}, as is known")
    state = replace(state, leaving=(*state.leaving, sign.node))
    if state.waiting:  # no ranks run that could save
        return _restart(state, [], sign, fleet, reason=reason)
    return Decision((SaveState(sign.grace),), state, reason)


def _saved(state: State, sign: signs.Saved, fleet: FleetSpec) -> Decision:
    """The ranks have stopped together and their state is among the copies: what waited for it can be done."""
    if not state.leaving:
        if state.shrunk and not state.vacant:
            source = newest(_for_any_plan(state.copies)) or BEGINNING
            grown = replace(state, shrunk=False, restored=source)
            return Decision((Grow(source, state.placement),), grown, "grow to the run's own plan")
        return _restart(state, [], sign, fleet, reason="nothing is to be done: go on")
    return _restart(state, [], sign, fleet, reason=f"the scheduler took {', '.join(state.leaving)} away")


def _stop_requested(state: State, sign: signs.StopRequested, fleet: FleetSpec) -> Decision:
    return _stop(state, [SaveState(fleet.wait_limit)], ExitCode.STOPPED, "stopped as asked; the same command goes on")


def _save_failed(state: State, sign: signs.SaveFailed, fleet: FleetSpec) -> Decision:
    """Training goes on: a copy that cannot be written is no reason to lose steps. A person must hear of it."""
    skipped = state.skipped if sign.tier in state.skipped else (*state.skipped, sign.tier)
    reason = f"no copy could be written to {sign.tier.value}: {sign.error}"
    return Decision((SkipTier(sign.tier, True, reason),), replace(state, skipped=skipped), reason)


def _save_works(state: State, sign: signs.SaveWorks, fleet: FleetSpec) -> Decision:
    if sign.tier not in state.skipped:
        return Decision((), state, "as before")
    skipped = tuple(tier for tier in state.skipped if tier is not sign.tier)
    reason = f"{sign.tier.value} takes copies again"
    return Decision((SkipTier(sign.tier, False, reason),), replace(state, skipped=skipped), reason)


def _data_damaged(state: State, sign: signs.DataDamaged, fleet: FleetSpec) -> Decision:
    """The reader has gone on with the other copy already, and does so again whenever it meets the damage: nobody else need do anything."""
    if sign.other_copy is not None:
        if sign.error in state.damaged:
            return Decision((), state, f"shard {sign.shard}: known already")
        state = replace(state, damaged=(*state.damaged, sign.error))
        reason = f"shard {sign.shard}: {sign.error}; read from {sign.other_copy}"
        return Decision((ReadElsewhere(sign.shard, sign.other_copy),), state, reason)
    report = (
        f"shard {sign.shard} of the data: {sign.error}, and there is no other copy. Training on without it would change the data "
        "order. Put the shard back (`megalith data verify` says which are damaged), or name a whole copy in data.copies; then start the "
        "same command again: it goes on from the newest checkpoint."
    )
    return _stop(state, [SaveState(fleet.wait_limit)], ExitCode.FAILED, report)


def _node_joined(state: State, sign: signs.NodeJoined, fleet: FleetSpec) -> Decision:
    if sign.node in state.quarantined:
        return Decision((CheckHealth(sign.node),), state, f"{sign.node} is back, and is checked first")
    if sign.node in state.spares or sign.node in state.placement:
        return Decision((), state, f"{sign.node} is known already")
    return _welcome(state, sign, fleet)


def _health_checked(state: State, sign: signs.HealthChecked, fleet: FleetSpec) -> Decision:
    slot = state.slot(sign.node)
    why = f" ({sign.text})" if sign.text else ""
    if not sign.passed and slot is not None:
        reason = f"{sign.node} failed its health check{why}"
        state, commands = _evict(state, slot, sign, fleet, because=reason, forced=True)
        return _restart(state, commands, sign, fleet, reason=reason, blamed=sign.node)
    if not sign.passed:
        out = {**state.quarantined, sign.node: state.quarantined.get(sign.node, sign.time)}
        spares = tuple(node for node in state.spares if node != sign.node)
        failed = state.failed_checks.get(sign.node, 0)
        state = replace(state, quarantined=out, spares=spares, failed_checks={**state.failed_checks, sign.node: failed + 1})
        reason = f"{sign.node} failed its check and stays out{why}"
        if not sign.there:
            return Decision((), state, f"{reason}, until it comes back")
        return Decision((CheckHealth(sign.node, _backoff(failed, fleet)),), state, f"{reason}, to be checked again")
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


def _welcome(state: State, sign: signs.NodeJoined | signs.HealthChecked, fleet: FleetSpec) -> Decision:
    """A healthy node: for a slot that waits for one, else a spare."""
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
    return _restart(state, commands, sign, fleet, reason=f"{node} takes the empty place")


def _waited(state: State, sign: signs.Waited, fleet: FleetSpec) -> Decision:
    if not state.waiting:
        return Decision((), state, "nobody waits")
    empty = ", ".join(map(str, state.vacant))
    if fleet.fallback and _can_shrink(state):
        return _shrink(state, [], f"no node came for slot {empty}")
    report = (
        f"no node came for slot {empty} within fleet.wait_limit = {fleet.wait_limit:g} s, and there is no fleet.fallback that the "
        "nodes left can hold. Start the same command again when there are nodes."
    )
    return _stop(state, [], ExitCode.LOST, report)


RULES: dict[type[signs.Sign], Callable[[State, Any, FleetSpec], Decision]] = {
    signs.Started: _started,
    signs.Progressed: _progressed,
    signs.RankFailed: _rank_failed,
    signs.Hang: _hang,
    signs.NodesLost: _nodes_lost,
    signs.Nonfinite: _nonfinite,
    signs.StateCorrupt: _state_corrupt,
    signs.CopyCorrupt: _copy_corrupt,
    signs.CopyAway: _copy_away,
    signs.GradientWrong: _gradient_wrong,
    signs.Straggler: _straggler,
    signs.Preempted: _preempted,
    signs.Saved: _saved,
    signs.StopRequested: _stop_requested,
    signs.SaveFailed: _save_failed,
    signs.SaveWorks: _save_works,
    signs.DataDamaged: _data_damaged,
    signs.NodeJoined: _node_joined,
    signs.HealthChecked: _health_checked,
    signs.Waited: _waited,
}
"""Kind of sign -> what is done about it."""
