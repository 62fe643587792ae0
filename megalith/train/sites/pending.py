"""A merge that waits for its verdict."""

from collections.abc import Collection, Mapping, Sequence, Set
from typing import NamedTuple

from megalith.spec.sites import SitesSpec


class Pending(NamedTuple):
    """A merge that waits for its verdict. `members`: as in a `Deal`. `mark`: the digest of all merges before it. `got`: the due sites
    whose differences have arrived. `waited`: seconds so far. With asynchronous merges, `waiting` has for each site the steps after
    which its unmerged differences were taken, oldest first, and `arrived` how many of them have arrived; a site may lack `staleness` of
    them."""

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
        """The sites whose differences this merge takes, if these arrive."""
        return {site for site, since in self.members.items() if since < self.sent}

    @property
    def stale(self) -> set[int]:
        """The sites that the merge must wait for, because they already lack the allowed number of differences."""
        return {site for site in self.due - self.got if self.lacks(site) > self.staleness}

    def lacks(self, site: int) -> int:
        """Return how many of a site's unmerged differences have not arrived."""
        return len(self.waiting.get(site, (self.sent,))) - self.arrived.get(site, 0)


def are(sites: Collection[int], spec: SitesSpec) -> str:
    """Return the sites' names followed by "is" or "are"."""
    return f"{', '.join(map(spec.named, sorted(sites)))} {'are' if len(sites) > 1 else 'is'}"
