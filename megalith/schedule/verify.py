"""Find the problems of a program before anything runs. A missing send, which would be a hang at run time, is reported here as a
line of text."""

from collections import Counter, defaultdict
from collections.abc import Iterator

from megalith.schedule.action import (
    COLLECTIVES,
    COMPUTATIONS,
    MESSAGES,
    TRANSFERS,
    Action,
    Kind,
    Row,
    RowEntry,
    Schedule,
    computations,
    format_row,
    number,
    parts,
)
from megalith.schedule.lower import (
    BACKWARDS,
    WEIGHT_GRADIENTS,
    WEIGHT_USERS,
    Channel,
    Program,
    ends,
    gives,
    needs,
    partner,
)
from megalith.schedule.simulate import Wait, blocked, explain


def problems(program: Program) -> list[str]:
    """Return every problem; empty if the program computes the whole step and ends. A correct program meets the following five
    conditions. Each forward and each backward (B, or I and W) of every stage and microbatch occurs once, on the rank of its stage
    and in a possible order. Every message has both ends, on the right ranks, and each channel's sends and receives are in the
    same order. Weights are gathered before use, and gradients reduced as the ZeRO stage requires. Tensors that leave the device
    come back before their backward. No rank waits forever.
    """
    if outside := list(_outside(program)):
        return outside
    found = [*_computed(program), *_messages(program)]
    for rank, row in enumerate(program.rows):
        found += _order(rank, row, program.schedule)
        found += _transfers(rank, row, program.retained)
        if program.schedule.mirrored is None:
            found += _gathers(rank, row, program.zero)
            found += _reductions(rank, row, program.zero)
        else:
            found += _at_the_ends(rank, row, program)
    # a missing or crossed message also blocks its ranks: say the cause, not that it hangs too
    return found or _deadlocks(blocked(program))


def _outside(program: Program) -> Iterator[str]:
    for rank, row in enumerate(program.rows):
        for action in computations(row):
            if not 0 <= action.stage < program.stages or action.microbatch not in range(program.microbatches):
                yield f"rank {rank}: {action} is outside {program.stages} stages and {program.microbatches} microbatches"


def _computed(program: Program) -> Iterator[str]:
    count: Counter[Action] = Counter()
    for rank, row in enumerate(program.rows):
        for action in computations(row):
            count[action] += 1
            holder = program.schedule.rank_of(action.stage, number(action))
            if holder != rank:
                yield f"rank {rank}: {action} belongs on rank {holder}, which holds its stage"
    for stage in range(program.stages):
        for i in range(program.microbatches):
            f, b, half, rest = (count[Action(kind, stage, i)] for kind in ("F", "B", "I", "W"))
            if f != 1:
                yield f"{stage}F{i}: forward happens {f} times, not once"
            if (b, half, rest) not in ((1, 0, 0), (0, 1, 1)):
                times = f"B {b}, I {half}, W {rest} times"
                yield f"backward of stage {stage}, microbatch {i}: {times}; use either B once, or I and W once each"


def _order(rank: int, row: Row, schedule: Schedule) -> Iterator[str]:
    """Check the order within one rank: forward before backward, I before W, a receive before the computation that uses it, a send after the
    computation whose result it sends."""
    place: dict[Action, int] = {}
    for i, entry in enumerate(row):
        for action in parts(entry):
            place.setdefault(action, i)
    for action, i in place.items():
        before: list[Action] = []
        if action.kind in COMPUTATIONS:
            own = {"F": (), "B": ("F",), "I": ("F",), "W": ("I",)}[action.kind]
            before += [Action(kind, action.stage, action.microbatch) for kind in own]
            if receive := needs(action, schedule):
                before.append(receive)
        elif action.kind in ("SEND_F", "SEND_B"):
            kinds = ("F",) if action.kind == "SEND_F" else ("B", "I")
            before += [a for a in (Action(k, action.stage, action.microbatch) for k in kinds) if a in place]
        for earlier in before:
            if place.get(earlier, -1) >= i:
                yield f"rank {rank}: {action} comes before {earlier}, which it needs"


def _transfers(rank: int, row: Row, retained: frozenset[int]) -> Iterator[str]:
    """Check that, in retained stages, the tensors of each microbatch leave once after its forward and come back once before its
    backward."""
    there = [action for entry in row for action in parts(entry)]
    steps: dict[tuple[int, int | None], list[Kind]] = {
        (stage, i): [] for kind, stage, i in there if kind == "F" and stage in retained
    }
    for kind, stage, i in there:
        if (stage, i) in steps and kind in ("F", *BACKWARDS, *TRANSFERS):
            steps[stage, i].append(kind)
        elif kind in TRANSFERS:
            yield f"rank {rank}: {Action(kind, stage, i)} moves tensors of stage {stage}, but none of its tensors leave the device"
    for (stage, i), kinds in steps.items():
        if kinds[:3] != ["F", "OFFLOAD", "FETCH"] or len(kinds) != 4:
            found = " ".join(str(Action(kind, stage, i)) for kind in kinds)
            yield f"rank {rank}: {found} is not the order F, OFFLOAD, FETCH, backward"


def _messages(program: Program) -> Iterator[str]:
    """Check that every message has both ends once, on the ranks of its computations, and each channel the same order at both ends."""
    wanted: dict[Action, int] = {}
    for rank, row in enumerate(program.rows):
        for action in computations(row):
            ends = (needs(action, program.schedule), gives(action, program.schedule))
            wanted.update({end: rank for end in ends if end})
    there: dict[Action, list[int]] = defaultdict(list)
    for rank, row in enumerate(program.rows):
        for entry in row:
            for action in parts(entry):
                if action.kind in MESSAGES:
                    there[action].append(rank)
    for action, rank in wanted.items():
        if rank not in there[action]:
            yield f"rank {rank}: {action} is missing; its other end is {partner(action)}"
    for action, ranks in there.items():
        for rank in ranks:
            if wanted.get(action) != rank:
                yield f"rank {rank}: {action} has no counterpart: no computation of the other rank makes or uses its tensor"
        if len(ranks) > 1:
            yield f"{action} must occur once, but occurs {len(ranks)} times, on ranks {ranks}"
    if all(wanted.get(action) == ranks[0] and len(ranks) == 1 for action, ranks in there.items() if ranks):
        yield from _crossed(program)


def _crossed(program: Program) -> Iterator[str]:
    sends: dict[Channel, list[Action]] = defaultdict(list)
    receives: dict[Channel, list[Action]] = defaultdict(list)
    for row in program.rows:
        for entry in row:
            for action in parts(entry):
                if action.kind in MESSAGES:
                    ends = sends if action.kind.startswith("SEND") else receives
                    ends[program.channel(action)].append(action)
    for channel, sent in sends.items():
        for send, receive in zip(sent, receives[channel], strict=False):
            if partner(send) != receive:
                yield (
                    f"channel {channel.source} -> {channel.destination} ({channel.carries}): rank {channel.source} sends {send} "
                    f"where rank {channel.destination} receives {receive}"
                )
                break


def _gathers(rank: int, row: Row, zero: int) -> Iterator[str]:
    """Check that weights are whole when they are used: gathered once (ZeRO 1, 2) or for each use (ZeRO 3)."""
    whole: set[int] = set()
    for entry in row:
        users = [action for action in parts(entry) if action.kind in WEIGHT_USERS]
        for action in users:
            if zero >= 1 and action.stage not in whole:
                yield f"rank {rank}: {entry} needs a GATHER of stage {action.stage} before it (ZeRO {zero})"
        if zero == 3:
            whole -= {action.stage for action in users}
        if isinstance(entry, Action) and entry.kind == "GATHER":
            if zero == 0 or entry.stage in whole:
                yield f"rank {rank}: {entry} gathers weights that are already whole (ZeRO {zero})"
            whole.add(entry.stage)


def _reductions(rank: int, row: Row, zero: int) -> Iterator[str]:
    """Check that gradients are reduced directly after each backward (ZeRO 2, 3) or after the stage's last backward (ZeRO 0, 1)."""
    left = Counter(action.stage for action in computations(row) if action.kind in WEIGHT_GRADIENTS)
    due: list[Action] = []
    for entry in (*row, None):
        if isinstance(entry, Action) and entry.kind == "REDUCE":
            if entry in due:
                due.remove(entry)
            else:
                yield f"rank {rank}: {entry} does not directly follow a backward whose gradients are due (ZeRO {zero})"
            continue
        yield from (f"rank {rank}: {action} is missing after the backward of its stage (ZeRO {zero})" for action in due)
        due = list(_due(entry, left, zero)) if entry else []


def _due(entry: RowEntry, left: Counter[int], zero: int) -> Iterator[Action]:
    """Yield the reductions that must follow an entry; subtract the entry's backwards from `left`."""
    stages = [action.stage for action in parts(entry) if action.kind in WEIGHT_GRADIENTS]
    for stage in stages:
        left[stage] -= 1
    for stage in dict.fromkeys(stages):
        if zero >= 2 or left[stage] == 0:
            yield Action("REDUCE", stage)


def _at_the_ends(rank: int, row: Row, program: Program) -> Iterator[str]:
    """Check the collectives of a bidirectional schedule, in which both copies of a stage take part: every rank gathers first and reduces
    last, in ascending order."""
    zero = program.zero
    first, last = ends(program.schedule, rank, zero)
    there = tuple(entry for entry in row if isinstance(entry, Action) and entry.kind in COLLECTIVES)
    if there != first + last or row[: len(first)] != first or row[len(row) - len(last) :] != last:
        begin, end, found = (format_row(actions) or "no collectives" for actions in (first, last, there))
        yield (
            f"rank {rank}: a bidirectional schedule begins with {begin} and ends with {end} (ZeRO {zero}); the collectives "
            f"here are {found}, or are not at the ends of the row"
        )
    if zero >= 2:
        yield f"rank {rank}: ZeRO {zero} reduces the gradients of each microbatch, but the two copies of a stage run in different orders"


def _deadlocks(waits: list[Wait]) -> list[str]:
    """Describe the cycle of ranks that wait for each other; without a cycle, describe every wait."""
    by_rank = {wait.rank: wait for wait in waits}
    for start in by_rank:
        path: list[int] = []
        rank = start
        while rank in by_rank and rank not in path:
            path.append(rank)
            rank = by_rank[rank].on
        if rank in path:
            circle = path[path.index(rank) :]
            return ["deadlock: " + "; ".join(explain(by_rank[rank]) for rank in circle)]
    return [f"stands still: {explain(wait)}" for wait in waits]
