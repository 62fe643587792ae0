"""How sites exit together at the end of a run. A site that has saved the run's final merge announces this, and exits once a quorum has
saved it, because the remaining sites cannot then form a quorum for another merge. The decider also waits for all sites that still send
messages, and sends them the weights that they lack."""

import time
from collections.abc import Callable

from megalith.train.sites.messages import End
from megalith.train.sites.wire import Wire

TURN_SECONDS = 0.25  # between looks at the clock


class Leaving:
    """Site `site`'s record of the sites that have saved the run's final merge."""

    def __init__(self, site: int) -> None:
        self._site = site
        self.own: End | None = None
        """This site's own announcement; None until it has saved the final merge."""
        self._others: dict[int, End] = {}
        self._since: float | None = None

    def note(self, site: int, end: End) -> None:
        """Record a site's announcement, which is valid in every line of merges."""
        self._others[site] = end

    def saved(self, mark: str) -> set[int]:
        """Return the sites, including this one, that have saved the merges with this digest."""
        return {self._site} | {site for site, end in self._others.items() if end.mark == mark}

    def over(self, mark: str) -> bool:
        """True if the decider has announced its exit."""
        return any(end.over and end.mark == mark for end in self._others.values())

    def close(self, wire: Wire, seconds: float, *, patience: float, beat: Callable[[], object]) -> bool:
        """Close the connections. Return True once the others have received all messages, or after `patience` seconds; False if `seconds`
        were not enough, so that the caller must call again."""
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
