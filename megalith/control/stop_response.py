"""Prints the response to a request to stop, with the work that a second Ctrl-C would lose."""

import signal
import sys
from collections.abc import Callable, Sequence

from megalith import disk
from megalith.fleet import causes
from megalith.fleet.heartbeat import Beat
from megalith.fleet.tiers import BEGINNING, Copy, newest

Request = tuple[int, float]
"""A signal's number, and when it arrived (monotonic seconds)."""

Store = Callable[[], tuple[Copy, ...]]


def print_line(text: str) -> None:
    """Print a line to stderr, at once."""
    print(text, file=sys.stderr, flush=True)


def no_copies() -> tuple[Copy, ...]:
    """Return an empty list of copies, for a run that keeps none."""
    return ()


class StopResponse:
    """Prints two lines after the first request to stop: what happens now, and, after listing the copies of the state, the work
    that a second Ctrl-C would lose. `requests`: the requests received so far. `beats` returns the ranks' last heartbeats."""

    def __init__(
        self,
        requests: Sequence[Request],
        notify: Callable[[str], None],
        *,
        beats: Callable[[], Sequence[Beat]],
        copies: Callable[[], tuple[Copy, ...]],
    ) -> None:
        self._requests, self._notify, self._beats, self._copies = requests, notify, beats, copies

    def __call__(self) -> None:
        """Print both lines. Call this after passing the request on to the ranks, because listing copies may take seconds."""
        number = self._requests[0][0]
        begun = [beat.step for beat in self._beats() if beat.ready]
        stopping = (
            "stopping after this step, then saving"
            if any(step >= 0 for step in begun)
            else "stopping: the ranks are still starting"
        )
        by_hand = number == signal.SIGINT
        self._notify(stopping if by_hand else f"{causes.signal_name(number)}: {stopping}")
        again = "Ctrl-C again" if by_hand else "Ctrl-C"
        self._notify(f"{again}: {self._loss(min((step for step in begun if step >= 0), default=-1))}")

    def _loss(self, done: int) -> str:
        if done < 0:
            return "stop now"
        source = None
        with disk.if_available():
            source = newest(self._copies(), at_most=done) or BEGINNING
        if source is None:
            return "stop now and lose the steps since the newest copy of the state (the copies cannot be listed at the moment)"
        if source.tier is None:
            return "stop now and lose all steps (there is no copy of the state)"
        steps = done - source.step
        if steps == 0:
            return f"stop now and lose only this step (the copy of {source} is kept)"
        return f"stop now and lose {steps} step{'s' * (steps > 1)} (the newest copy of the state is {source})"
