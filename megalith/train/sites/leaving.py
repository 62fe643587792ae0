"""How sites end together. A site that has saved the run's last merge tells the others, and ends once a quorum has saved it: then no sites
that are left can form a quorum to merge otherwise. The site that decides also waits for all sites that it hears from, and sends
what they lack."""

import time
from collections.abc import Callable

from megalith.train.sites.messages import End
from megalith.train.sites.wire import Wire

TURN_SECONDS = 0.25  # between looks at the clock


class Leaving:
    """The sites that have saved the run's last merge, as site `site` knows them."""

    def __init__(self, site: int) -> None:
        self._site = site
        self.own: End | None = None
        """This site's message, once it has saved them."""
        self._others: dict[int, End] = {}
        self._since: float | None = None

    def note(self, site: int, end: End) -> None:
        """Record the message of a site, which is valid in every line."""
        self._others[site] = end

    def saved(self, mark: str) -> set[int]:
        """Return the sites that have saved the merges with this digest, this one included."""
        return {self._site} | {site for site, end in self._others.items() if end.mark == mark}

    def over(self, mark: str) -> bool:
        """True if the site that decides has ended."""
        return any(end.over and end.mark == mark for end in self._others.values())

    def close(self, wire: Wire, seconds: float, *, patience: float, beat: Callable[[], object]) -> bool:
        """End the connections; True once the others have what this site has sent, or the patience is over. False if `seconds` were not
        enough; the caller must then call again."""
        began = time.monotonic()
        self._since = began if self._since is None else self._since
        while not wire.close(seconds=TURN_SECONDS):
            beat()
            now = time.monotonic()
            if now - self._since >= patience:
                return True
            if now - began >= seconds:
                return False
        return True
