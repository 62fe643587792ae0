"""Laws about time, asked where the processes had a processor when they needed one, as the kernel's schedstat tells."""

import os
import time
from collections.abc import Callable

import pytest

from megalith.fleet import evidence
from tests.patience import PATIENCE

ENOUGH = 0.02
"""Share of a time that may be spent waiting for a processor where a law about that time is asked."""


def waited() -> float:
    """Seconds for which this process's threads were ready to run and had no processor, so far."""
    return evidence.queued(os.getpid())


def excuse(share: float, *, most: float = ENOUGH) -> None:
    """Skip a law that did not hold, if the processes that were measured waited for this `share` of the time, more than `most`: then it
    says nothing."""
    if share > most:  # the product is not to blame for what its neighbours use
        pytest.skip(
            f"the processes waited {share:.0%} of the time for a processor: the law is about a machine that has some to spare"
        )


def rest(seconds: float) -> None:
    """Wait until this process's other threads have had `seconds` to run in."""
    end, left = time.monotonic() + PATIENCE, seconds
    while left > 0 and time.monotonic() < end:
        before = waited()
        time.sleep(seconds)
        left -= max(0.0, seconds - (waited() - before))


def cost(function: Callable[[], object], *, than: Callable[[], object], tries: int = 3) -> float:
    """Processor time of a function over that of another, on whatever machine this is: the least of some tries."""

    def seconds(one: Callable[[], object]) -> float:
        before = time.process_time()
        one()
        return time.process_time() - before

    return min(seconds(function) / seconds(than) for _ in range(tries))
