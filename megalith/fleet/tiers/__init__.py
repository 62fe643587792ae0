"""Storage tiers for copies of the state, the copies that remain after a fault, and the newest step that can be restored from
them."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import groupby
from typing import Any


class Tier(StrEnum):
    """Storage tiers for copies of the state, fastest first. The loss of a node loses the MEMORY and DISK copies of its own slot,
    and the BUDDY copies that it kept for another slot."""

    MEMORY = "memory"
    BUDDY = "buddy"
    DISK = "disk"
    STORE = "store"

    @property
    def depth(self) -> int:
        """Position of the tier in the order of speed; 0 for the fastest."""
        return _DEPTH[self]


_DEPTH = {tier: depth for depth, tier in enumerate(Tier)}


@dataclass(frozen=True)
class Copy:
    """A copy of the state after `step` steps in one tier. `missing`: the slots whose piece of the copy is lost or has a wrong
    digest."""

    tier: Tier
    step: int
    missing: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Source:
    """The copy of the state to restore, which is that after `step` steps. `tier` None: no copy is left, so the run starts over at
    step 0. `elsewhere`: the slots whose piece is missing in `tier`, each with the tier from which it is read.
    """

    step: int
    tier: Tier | None
    elsewhere: tuple[tuple[int, Tier], ...] = ()

    def tier_of(self, slot: int) -> Tier | None:
        """Return the tier from which the ranks of a slot restore their state."""
        return dict(self.elsewhere).get(slot, self.tier)

    @property
    def slowest(self) -> Tier | None:
        """The slowest tier from which any rank restores its state."""
        read = [tier for tier in (self.tier, *dict(self.elsewhere).values()) if tier is not None]
        return max(read, key=lambda tier: tier.depth, default=None)

    def as_json(self) -> dict[str, Any]:
        """Return the value as JSON for the ranks."""
        return {"step": self.step, "tier": self.tier and self.tier.value, "elsewhere": [list(pair) for pair in self.elsewhere]}

    def __str__(self) -> str:
        if self.tier is None:
            return "the beginning"
        others = sorted({tier.value for _, tier in self.elsewhere})
        return f"step {self.step} in {self.tier.value}" + (f" with pieces from {', '.join(others)}" if others else "")


BEGINNING = Source(step=0, tier=None)


def newest(
    copies: Iterable[Copy], *, at_most: int | None = None, before: int | None = None, below: Tier | None = None
) -> Source | None:
    """Return the newest step of which all slots' pieces exist, from the fastest tiers that have them; None if there is no such
    step.

    `at_most`: no later step. `before`: strictly earlier steps only. `below`: only tiers slower than this one.
    """
    usable = [
        copy
        for copy in copies
        if (at_most is None or copy.step <= at_most)
        and (before is None or copy.step < before)
        and (below is None or copy.tier.depth > below.depth)
    ]
    usable.sort(key=lambda copy: (-copy.step, copy.tier.depth))
    for step, together in groupby(usable, key=lambda copy: copy.step):
        source = _assemble(step, list(together))
        if source:
            return source
    return None


def _assemble(step: int, copies: Sequence[Copy]) -> Source | None:
    main, *others = copies
    elsewhere = []
    for slot in sorted(main.missing):
        tier = next((copy.tier for copy in others if slot not in copy.missing), None)
        if tier is None:
            return _assemble(step, others) if others else None
        elsewhere.append((slot, tier))
    return Source(step, main.tier, tuple(elsewhere))


def fall_back(copies: Collection[Copy], used: Source) -> Source | None:
    """Return the next source to try after a run that restored `used` has failed in the same way again. Copies of one step have
    the same digest, and so the same bits, in all tiers. So an earlier step in a slower tier is preferred; the buddy tier does not
    count as slower than memory, because its copies are made from the same bytes. If no tier that counts as slower has an earlier
    step, the buddy tier counts too; without any earlier step, return the same step from a slower tier, else None.
    """
    if used.tier is None:
        return None
    apart = Tier.BUDDY if used.tier is Tier.MEMORY else used.tier
    return (
        newest(copies, before=used.step, below=apart)
        or newest(copies, before=used.step, below=used.tier)
        or newest(copies, at_most=used.step, below=used.tier)
    )


def without_nodes(copies: Iterable[Copy], slots: Collection[int], *, nodes: int, distance: int) -> tuple[Copy, ...]:
    """Return the copies that remain if the nodes in these slots are lost. `distance`: number of nodes from a node to its buddy;
    0: there are no buddies."""
    own = frozenset(slots)
    kept_for = frozenset((slot - distance) % nodes for slot in slots)
    lost = {Tier.MEMORY: own, Tier.DISK: own, Tier.BUDDY: kept_for, Tier.STORE: frozenset[int]()}
    return tuple(replace(copy, missing=copy.missing | lost[copy.tier]) if lost[copy.tier] else copy for copy in copies)


def without_piece(copies: Iterable[Copy], tier: Tier, step: int, slot: int | None) -> tuple[Copy, ...]:
    """Return the copies without the piece of `slot` in one copy, because it has a wrong digest; `slot` None: without that whole
    copy."""
    left = []
    for copy in copies:
        if copy.tier is tier and copy.step == step:
            if slot is None:
                continue
            copy = replace(copy, missing=copy.missing | {slot})
        left.append(copy)
    return tuple(left)
