"""One site's record of the other sites' starts: the newest start of each site, whether it takes part, and when it last sent a message.
A cut connection looks intact for a while, so messages count, not connections. A restarted site knows nothing about the lines of merges
of its earlier start.
"""

import time
from collections.abc import Iterable


class SiteRoster:
    """Site `site`'s record of the other sites of one line."""

    def __init__(self, site: int) -> None:
        self._site = site
        self._newest: dict[int, bytes] = {}  # each other site, by the newest start of its ranks that came
        self._ours: dict[int, bytes] = {}  # those that take part, by the start that does
        self._spoke: dict[int, tuple[bytes, float]] = {}  # the start that last took part or followed, and when

    def __contains__(self, site: int) -> bool:
        """True for a site that has been connected."""
        return site in self._newest

    def came(self, site: int, start: bytes) -> bool:
        """Record a connection; return True if it is from a new start of that site."""
        new = self._newest.get(site) != start
        self._newest[site] = start
        return new

    def is_newest(self, site: int, start: bytes) -> bool:
        """True if no later start of this site has connected."""
        return self._newest.get(site) == start

    def spoke(self, site: int) -> None:
        """Record a site's message about this line."""
        self._spoke[site] = self._newest[site], time.monotonic()

    def begin(self) -> None:
        """Begin a new line, in which all connected sites take part, and none has sent a message yet."""
        self._ours = dict(self._newest)
        self._spoke.clear()

    def join(self, site: int) -> None:
        """Record that the newest start of a site takes part."""
        self._ours[site] = self._newest[site]

    def expect(self, site: int) -> None:
        """Record that the newest start of a site takes part, unless an earlier start does."""
        self._ours.setdefault(site, self._newest[site])

    def leave(self, site: int) -> None:
        """Record that a site no longer takes part, regardless of its earlier messages."""
        self._ours.pop(site, None)
        self._spoke.pop(site, None)

    def takes_part(self, site: int) -> bool:
        """True for a site whose newest start takes part."""
        return site == self._site or (site in self._ours and self._newest.get(site) == self._ours[site])

    def present(self, since: float) -> set[int]:
        """Return this site, and the sites whose newest start has sent a message since `since`: these sites are not cut off."""
        return {self._site} | {site for site in self._speakers() if self._spoke[site][1] >= since}

    def followers(self) -> set[int]:
        """Return the other sites whose newest start takes part or follows, as far as this site knows."""
        return {*self._speakers(), *(site for site in self._ours if self.takes_part(site))}

    def last_word(self, site: int) -> float:
        """Return the time of the last message from the newest start of a site; minus infinity if it never sent one."""
        start, when = self._spoke.get(site, (b"", 0.0))
        return when if self.is_newest(site, start) else float("-inf")

    def _speakers(self) -> Iterable[int]:
        return [site for site, (start, _) in self._spoke.items() if self.is_newest(site, start)]
