"""The duration of a site's rounds, and how long its merges wait for another site."""

from collections import deque
from statistics import median

MIN_GRACE = 5.0  # seconds: how long a busy machine may do something else
ROUNDS = 16  # whose lengths the grace follows


class Pace:
    """The durations of the last rounds of each fragment, from one merge until the next is due, without the waits at merges."""

    def __init__(self, first: float, grace: float | None) -> None:
        """`first`: seconds assumed for a round before one was timed. `grace`: the run file's grace period, if it sets one."""
        self._first, self._grace = first, grace
        self._merged: dict[int, float] = {}
        self.rounds: deque[float] = deque(maxlen=ROUNDS)

    def merged(self, fragment: int, *, due: float, now: float) -> None:
        """Record when a merge became due, and when it was decided."""
        if fragment in self._merged:
            self.rounds.append(due - self._merged[fragment])
        self._merged[fragment] = now

    @property
    def grace(self) -> float:
        """Seconds that a merge waits for a site: the run file's value, or else the time of a whole round on this site."""
        if self._grace is not None:
            return self._grace
        return max(MIN_GRACE, median(self.rounds)) if self.rounds else self._first
