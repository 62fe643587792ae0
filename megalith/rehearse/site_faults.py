"""The kinds of faults that a campaign can inject into a run across sites, and lists of faults drawn from a seed.

The faults hit whole sites and the links between sites. The campaign injects faults of sites and links itself, so no rank chooses
their moment.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class SiteKind:
    """A kind of fault. `merges`: the number of merges that the run makes while the fault lasts; 0: the fault lasts for some
    seconds, or has no duration. `room`: the number of merges that a campaign plans for this fault, until all sites train again.
    """

    title: str
    merges: int = 0
    room: int = 8


KINDS: dict[str, SiteKind] = {
    "kill": SiteKind("kill -9 of a whole site", room=16),
    "cut": SiteKind("site cut off", room=16),
    "loss": SiteKind("2 % of packets lost", merges=5),
    "slow": SiteKind("site at half speed", merges=5),
    "torn": SiteKind("connections torn"),
}
"""Faults of a site."""

LOSS = 0.02
"""Fraction of packets that a link loses during the fault."""
AFTERMATH = 6
"""Number of merges that a campaign makes after its last fault."""
GRACE = 5.0
"""The grace period in seconds if the run file gives none: the shortest that a run derives from its step times."""


@dataclass(frozen=True)
class SiteFault:
    """One fault of a site. The fault begins when all sites train and `after` more merges have been made. `seconds`: the time
    until a killed site is started again, or for which a site is cut off."""

    number: int
    kind: str
    site: int
    after: int
    seconds: float = 0.0


def draw(count: int, *, seed: int, sites: int, grace: float, kinds: Sequence[str] = tuple(KINDS)) -> list[SiteFault]:
    """Return a list of `count` faults, with each kind equally often, as far as possible. The same arguments give the same list.

    A site may be cut off for less than the `grace` period, so that it stays a member, or for longer, so that the others continue
    without it. The first cut is a long one, and then short and long cuts alternate.
    """
    random = Random(seed)
    dealt = [kinds[number % len(kinds)] for number in range(count)]
    random.shuffle(dealt)
    cuts = 0
    found = []
    for number, kind in enumerate(dealt):
        seconds = 0.0
        if kind == "kill":
            seconds = random.uniform(0.0, 2 * grace)
        elif kind == "cut":
            seconds, cuts = grace * (random.uniform(0.1, 0.4) if cuts % 2 else random.uniform(1.5, 2.5)), cuts + 1
        found.append(SiteFault(number, kind, random.randrange(sites), random.randint(1, 4), round(seconds, 2)))
    return found


def merges_of(faults: Sequence[SiteFault]) -> int:
    """Return how many merges a run needs for a list of faults."""
    return sum(KINDS[one.kind].room for one in faults) + AFTERMATH
