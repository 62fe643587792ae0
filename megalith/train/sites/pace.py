"""How long a site's rounds take, and how long its merges wait for another site."""

from collections import deque
from statistics import median

MIN_GRACE = 5.0  # seconds: how long a busy machine may do something else
ROUNDS = 16  # whose lengths the grace follows


class Pace:
    """The lengths of the last rounds of each fragment, from one merge until the next is due: without what merges wait."""

    def __init__(self, first: float, grace: float | None) -> None:
        """`first`: seconds that a round may take before one was timed. `grace`: as the run file says, if it does."""
        self._first, self._grace = first, grace
        self._merged: dict[int, float] = {}
        self.rounds: deque[float] = deque(maxlen=ROUNDS)

    def merged(self, fragment: int, *, due: float, now: float) -> None:
        """Record when a merge became due, and when it is decided."""
        if fragment in self._merged:
            self.rounds.append(due - self._merged[fragment])
        self._merged[fragment] = now

    @property
    def grace(self) -> float:
        """Seconds that a merge waits for a site: those of the run file, or as many as a whole round takes here."""
        if self._grace is not None:
            return self._grace
        return max(MIN_GRACE, median(self.rounds)) if self.rounds else self._first
