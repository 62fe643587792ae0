"""Laws about time, tested only if the processes had a CPU when they needed one, according to the kernel's schedstat."""

import os
import time
from collections.abc import Callable

import pytest

from megalith.fleet import evidence
from tests.patience import PATIENCE

ENOUGH = 0.02
"""The largest share of a time that may be spent waiting for a CPU if a law about that time is tested."""


def waited() -> float:
    """Return the seconds so far for which this process's threads were runnable without a CPU."""
    return evidence.queued(os.getpid())


def excuse(share: float, *, most: float = ENOUGH) -> None:
    """Skip a law that did not hold if the measured processes waited for a `share` of the time above `most`: then the failure proves
    nothing."""
    if share > most:  # other programs, not the product, used the CPUs
        pytest.skip(
            f"the processes waited {share:.0%} of the time for a processor: the law is about a machine that has some to spare"
        )


def rest(seconds: float) -> None:
    """Wait until this process's other threads could have run for `seconds`."""
    end, left = time.monotonic() + PATIENCE, seconds
    while left > 0 and time.monotonic() < end:
        before = waited()
        time.sleep(seconds)
        left -= max(0.0, seconds - (waited() - before))


def cost(function: Callable[[], object], *, than: Callable[[], object], tries: int = 3) -> float:
    """Return the processor time of a function over that of another, the least of several tries, which does not depend
    on the machine."""

    def seconds(one: Callable[[], object]) -> float:
        before = time.process_time()
        one()
        return time.process_time() - before

    return min(seconds(function) / seconds(than) for _ in range(tries))
