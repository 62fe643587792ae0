"""A merge that waits for its verdict."""

from collections.abc import Collection, Mapping, Sequence, Set
from typing import NamedTuple

from megalith.spec.sites import SitesSpec


class Pending(NamedTuple):
    """A merge that waits for its verdict. `members`: as in a `Deal`. `mark`: the digest of all earlier merges. `got`: the due sites whose
    weight differences have arrived. `waited`: the seconds waited so far. With asynchronous merges, `waiting` holds for each site the steps
    after which its unmerged differences were taken, oldest first, and `arrived` the number of these differences that have arrived; a site
    may lack up to `staleness` of them."""

    number: int
    fragment: int
    sent: int
    step: int
    members: Mapping[int, int]
    mark: str = ""
    got: Set[int] = frozenset()
    waited: float = 0.0
    waiting: Mapping[int, Sequence[int]] = {}
    staleness: int = 0
    arrived: Mapping[int, int] = {}

    @property
    def due(self) -> set[int]:
        """The sites whose weight differences this merge contains if they arrive."""
        return {site for site, since in self.members.items() if since < self.sent}

    @property
    def stale(self) -> set[int]:
        """The sites for which the merge must wait, because they lack more weight differences than allowed."""
        return {site for site in self.due - self.got if self.lacks(site) > self.staleness}

    def lacks(self, site: int) -> int:
        """Return how many of a site's unmerged weight differences have not arrived."""
        return len(self.waiting.get(site, (self.sent,))) - self.arrived.get(site, 0)


def are(sites: Collection[int], spec: SitesSpec) -> str:
    """Return the sites' names followed by "is" or "are"."""
    return f"{', '.join(map(spec.named, sorted(sites)))} {'are' if len(sites) > 1 else 'is'}"
