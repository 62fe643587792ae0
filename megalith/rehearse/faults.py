"""The kinds of faults that a campaign can inject, and lists of faults drawn from a seed.

A published table of causes (`spec/faults.toml`) decides how frequent each kind is; MIX maps the causes in this table to kinds of
fault. Each rank injects its own faults of the list (`fleet.hooks`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from types import MappingProxyType

from megalith.fleet.injection import Injection, Moment
from megalith.fleet.rank_info import ranks_of
from megalith.spec.faults import FaultTable


@dataclass(frozen=True)
class Kind:
    """A kind of fault. `moment`: the moment in a step at which it is injected; `needs`: the fleet settings without which a run
    cannot survive or detect it.

    `blames`: True if the run must name the faulty rank or its node. `noticed`: False if the run must train on without an incident.
    `lasts`: the length of the fault in steps; `room`: the number of steps within which the run must notice the fault, and in which the
    campaign injects no other.
    """

    title: str
    moment: Moment
    blames: bool = True
    noticed: bool = True
    needs: tuple[str, ...] = ()
    lasts: int = 1
    room: int = 0


KINDS: dict[str, Kind] = {
    "kill": Kind("SIGKILL", "step"),
    "stop": Kind("SIGSTOP", "step"),
    "stuck": Kind("a call that never returns", "step"),
    "segfault": Kind("SIGSEGV", "step"),
    "exception": Kind("exception", "step"),
    "sockets": Kind("all connections torn", "step"),
    "weight": Kind("bit flip in a weight", "resting", needs=("digest",)),
    "moment": Kind("bit flip in an optimizer moment", "resting", needs=("digest",)),
    "nan": Kind("NaN in a gradient", "gradients", needs=("digest",)),
    "gradient": Kind("wrong gradients from now on", "gradients", needs=("verify_every",), lasts=10_000, room=12),
    "once": Kind("a wrong gradient, once", "gradients", needs=("verify_every",)),
    "slow": Kind("slow rank", "gradients", lasts=14, room=14),
    "preemption": Kind("SIGTERM to a rank", "step"),
    "checkpoint": Kind("newest checkpoint cut off, memory lost", "step"),
    "altered": Kind("newest checkpoint altered, memory lost", "step"),
    "node": Kind("node lost with its memory", "step"),
    "two": Kind("two ranks killed, their nodes' memory lost", "step"),
    "copy": Kind("copy in memory altered, then SIGKILL", "step", needs=("memory_every",)),
    "full": Kind("no room for a checkpoint", "saving", blames=False),
    "shard": Kind("flipped data shard", "reading", blames=False),
    "torn-chunk": Kind("chunk of state half written", "resting"),
    "altered-chunk": Kind("bit flip in a chunk of state", "resting"),
    "state-disk-full": Kind("no room for a chunk of state", "resting"),
    "slow-disk": Kind("slow disk with state", "resting", blames=False, noticed=False),
    "interface": Kind("network interface taken down", "step"),
    "agent": Kind("agent of a node killed", "step"),
    "supervisor": Kind("supervisor killed", "step", blames=False),
}
"""Faults that can be injected into a run on one machine."""

MIX: tuple[tuple[str, str, float], ...] = (
    ("faulty GPU", "kill", 74 / 148),
    ("faulty GPU", "stop", 37 / 148),
    ("faulty GPU", "segfault", 37 / 148),
    ("GPU HBM3 memory", "weight", 36 / 72),
    ("GPU HBM3 memory", "nan", 36 / 72),
    ("software bug", "exception", 1.0),
    ("network switch or cable", "sockets", 1.0),
    ("host maintenance", "preemption", 1.0),
    ("GPU SRAM memory", "moment", 1.0),
    ("GPU system processor", "stuck", 1.0),
    ("network card", "interface", 1.0),
    ("NCCL watchdog timeout", "stuck", 1.0),
    ("silent data corruption", "gradient", 1 / 2),
    ("silent data corruption", "once", 1 / 2),
    ("GPU thermal interface or sensor", "slow", 1.0),
    ("SSD", "checkpoint", 1 / 3),
    ("SSD", "torn-chunk", 1 / 3),
    ("SSD", "altered", 1 / 6),
    ("SSD", "altered-chunk", 1 / 6),
    ("power supply", "node", 1.0),
    ("server chassis", "two", 1.0),
    ("IO expansion board", "full", 1 / 2),
    ("IO expansion board", "state-disk-full", 1 / 4),
    ("IO expansion board", "slow-disk", 1 / 4),
    ("dependency", "shard", 1.0),
    ("CPU", "slow", 1.0),
    ("system memory", "copy", 1.0),
)
"""A cause in the published table, the kind of fault that represents it, and the fraction of the cause's count that this kind
gets."""

INSTEAD = {
    "once": "gradient",
    "full": "kill",
    "shard": "exception",
    "interface": "sockets",
    "node": "agent",
    "two": "agent",
    "checkpoint": "kill",
    "altered": "kill",
    "torn-chunk": "checkpoint",
    "altered-chunk": "altered",
    "state-disk-full": "full",
    "slow-disk": "full",
    "weight": "nan",
    "moment": "kill",
    "copy": "kill",
}
"""Map from a kind of fault to the kind that replaces it in runs where it is impossible; if that kind is impossible too, its own
replacement replaces both."""

ON_DISK = ("torn-chunk", "altered-chunk", "state-disk-full", "slow-disk")
"""Kinds of faults of the files in which a rank keeps its state (`plan.state.optimizer = "disk"`)."""

OF_ONE_MEMORY = ("checkpoint", "altered", "node", "two")
"""Kinds that delete the copies in the memory of a node, or of all nodes. If each node has an agent, a campaign leaves out the kinds that
delete copies in memory, because no process reaches the memory of all nodes."""

MOMENTS: tuple[Moment, ...] = ("step", "gradients", "resting")
"""The moments at which a process may die: at the start of a step, in its backward pass, after its update."""

AFTERMATH = 4
"""Number of steps that a campaign trains after its last fault."""


RECOVERING: tuple[Moment, ...] = ("joining", "building", "restoring")


def counts(total: int, table: FaultTable, kinds: Sequence[str]) -> dict[str, int]:
    """Return the number of faults of each kind: in proportion to the table, by largest remainders; at least one, if `total` is large
    enough."""
    causes = {cause.name: cause.count for cause in table.causes}
    weights: dict[str, float] = {}
    for cause, meant, share in MIX:
        kind = meant
        while kind not in kinds and kind in INSTEAD:
            kind = INSTEAD[kind]
        if kind in kinds:
            weights[kind] = weights.get(kind, 0.0) + causes[cause] * share
    whole = sum(weights.values())
    quotas = {kind: weight * total / whole for kind, weight in weights.items()}
    least = 1 if total >= len(quotas) else 0
    found = {kind: max(least, int(quota + 1e-9)) for kind, quota in quotas.items()}
    while sum(found.values()) != total:
        missing = total - sum(found.values())
        gap = {kind: (quotas[kind] - count) * (1 if missing > 0 else -1) for kind, count in found.items()}
        candidates = [kind for kind in found if missing > 0 or found[kind] > least]
        chosen = max(candidates, key=lambda kind: gap[kind])
        found[chosen] += 1 if missing > 0 else -1
    return {kind: count for kind, count in found.items() if count}


def draw(
    amounts: Mapping[str, int],
    *,
    seed: int,
    first: int,
    every: int,
    ranks: int,
    slots: int,
    only_at: Mapping[str, int] = MappingProxyType({}),
    not_before: Mapping[str, int] = MappingProxyType({}),
) -> list[Injection]:
    """Draw a list of faults, about `every` steps apart, from step `first` on. The same arguments give the same list.

    With probability 1/8, a crash comes while the ranks restart after the previous fault, if that fault restarts them. Also with
    probability 1/8, a crash or hang comes in the same step as a crash before it, on another rank. `only_at`: kinds that come only
    at multiples of a number of steps; `not_before`: the earliest step of some kinds.
    """
    random = Random(seed)
    kinds = [kind for kind, count in sorted(amounts.items()) for _ in range(count)]
    random.shuffle(kinds)
    found: list[Injection] = []
    step = first
    for number, kind in enumerate(kinds):
        before = found[-1] if found else None
        one = _one(number, kind, step, random, ranks, slots)
        if (
            before is not None
            and before.after is None
            and kind in _CRASHES
            and before.kind in _RESTARTING
            and random.random() < 1 / 8
        ):
            one = replace(one, step=before.step, moment=random.choice(RECOVERING), after=before.number)
        elif before is not None and before.after is None and _may_overlap(before, one) and random.random() < 1 / 8:
            one = replace(one, step=before.step)
        else:
            room = KINDS[before.kind].room if before is not None else 0
            step += 1 + room + int(random.expovariate(1 / max(1, every - 1)) + 0.5)
            step = max(step + (_AGAIN if KINDS[kind].room else 0), not_before.get(kind, 0))
            step += -step % only_at.get(kind, 1)
            one = replace(one, step=step)
        found.append(one)
    return found


_AGAIN = 2  # steps in which the fault before may still end all ranks, and with them what was to be noticed
_CRASHES = ("kill", "segfault", "exception")
_HANGS = ("stop", "stuck")
_RESTARTING = (*_CRASHES, *_HANGS, "sockets", "weight", "moment", "node", "two", "copy", "interface", "agent", *ON_DISK[:3])


def _may_overlap(before: Injection, one: Injection) -> bool:
    """True if two faults in one step can be told apart: a crash followed by a crash or a hang of another rank."""
    return not set(before.ranks) & set(one.ranks) and before.kind in _CRASHES and one.kind in (*_CRASHES, *_HANGS)


def _one(number: int, kind: str, step: int, random: Random, ranks: int, slots: int) -> Injection:
    rank, what = random.randrange(ranks), KINDS[kind]
    hit: tuple[int, ...] = (rank,)
    if kind in ("node", "interface"):
        hit = tuple(ranks_of(random.randrange(slots), world=ranks, slots=slots))
    if kind == "two":
        hit = tuple(sorted(random.sample(range(ranks), min(2, ranks))))
    moment = random.choice(MOMENTS) if kind in (*_CRASHES, *_HANGS) else what.moment
    return Injection(number, kind, step, moment, hit, place=random.random(), lasts=what.lasts)
