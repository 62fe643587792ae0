"""One site's record of the other sites: the newest start of each site, whether this start takes part in the line of merges (all merges
since the sites last began together), and when it last sent a message. Only messages show that a site is present, because a cut connection
looks intact for a while. Starts are distinguished, because a restarted site knows nothing about the merges before its restart.
"""

import time
from collections.abc import Iterable


class SiteRoster:
    """Site `site`'s record of the other sites of one line of merges."""

    def __init__(self, site: int) -> None:
        self._site = site
        self._newest: dict[int, bytes] = {}  # for each other site, the newest start of its ranks that has connected
        self._ours: dict[int, bytes] = {}  # for each site that takes part in the line of merges, the start that does
        self._spoke: dict[int, tuple[bytes, float]] = {}  # for each site, the start that last sent a message, and when

    def __contains__(self, site: int) -> bool:
        """True for a site that has connected to this one."""
        return site in self._newest

    def came(self, site: int, start: bytes) -> bool:
        """Record a connection; return True if it is from a new start of that site."""
        new = self._newest.get(site) != start
        self._newest[site] = start
        return new

    def is_newest(self, site: int, start: bytes) -> bool:
        """True if no later start of site `site` has connected."""
        return self._newest.get(site) == start

    def spoke(self, site: int) -> None:
        """Record the time of a message from a site about this line of merges."""
        self._spoke[site] = self._newest[site], time.monotonic()

    def begin(self) -> None:
        """Begin a new line of merges, in which all connected sites take part and no site has sent a message yet."""
        self._ours = dict(self._newest)
        self._spoke.clear()

    def join(self, site: int) -> None:
        """Record that the newest start of a site takes part in the line of merges."""
        self._ours[site] = self._newest[site]

    def expect(self, site: int) -> None:
        """Record that the newest start of a site takes part in the line of merges, unless an earlier start does."""
        self._ours.setdefault(site, self._newest[site])

    def leave(self, site: int) -> None:
        """Record that a site no longer takes part in the line of merges; forget its earlier messages."""
        self._ours.pop(site, None)
        self._spoke.pop(site, None)

    def takes_part(self, site: int) -> bool:
        """True if the newest start of a site takes part in the line of merges."""
        return site == self._site or (site in self._ours and self._newest.get(site) == self._ours[site])

    def present(self, since: float) -> set[int]:
        """Return this site, and the sites whose newest start has sent a message since `since`, which shows that their connections work."""
        return {self._site} | {site for site in self._speakers() if self._spoke[site][1] >= since}

    def followers(self) -> set[int]:
        """Return the other sites whose newest start, as far as this site knows, takes part in the line of merges or follows its merges."""
        return {*self._speakers(), *(site for site in self._ours if self.takes_part(site))}

    def last_word(self, site: int) -> float:
        """Return the time of the last message from the newest start of a site; minus infinity if this start has sent none."""
        start, when = self._spoke.get(site, (b"", 0.0))
        return when if self.is_newest(site, start) else float("-inf")

    def _speakers(self) -> Iterable[int]:
        return [site for site, (start, _) in self._spoke.items() if self.is_newest(site, start)]
