"""Measures the duration of a site's rounds, which determines how long its merges wait for other sites."""

from collections import deque
from statistics import median

MIN_GRACE = 5.0  # seconds: how long a busy machine may do something else
ROUNDS = 16  # whose lengths the grace follows


class Pace:
    """The durations of a site's last rounds. A round of a fragment is the time from one of its merges until its next merge is due, so it
    does not include waits at merges."""

    def __init__(self, first: float, grace: float | None) -> None:
        """`first`: the assumed duration of a round in seconds, used until one is measured. `grace`: the run file's grace period in seconds;
        None: the run file sets none."""
        self._first, self._grace = first, grace
        self._merged: dict[int, float] = {}
        self.rounds: deque[float] = deque(maxlen=ROUNDS)

    def merged(self, fragment: int, *, due: float, now: float) -> None:
        """Record that a fragment's merge became due at `due` and was decided at `now`."""
        if fragment in self._merged:
            self.rounds.append(due - self._merged[fragment])
        self._merged[fragment] = now

    @property
    def grace(self) -> float:
        """The seconds for which a merge waits for a site: the run file's value or, without one, the median duration of a round on this
        site, at least MIN_GRACE; before the first measured round, the assumed duration."""
        if self._grace is not None:
            return self._grace
        return max(MIN_GRACE, median(self.rounds)) if self.rounds else self._first
