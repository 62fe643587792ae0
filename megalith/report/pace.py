"""Speed and time left from a run's newest steps. The live line and the live page both use this module, so they show the same figures."""

import math
from collections.abc import Sequence
from statistics import median

RECENT = 50
"""Number of newest steps that these figures use."""


def usual(values: Sequence[float | None]) -> float | None:
    """Return the median of the known values among the newest; None if no value is known."""
    known = [value for value in values[-RECENT:] if value is not None and math.isfinite(value)]
    return float(median(known)) if known else None


def seconds_left(steps: Sequence[float], times: Sequence[float], *, last: int, seconds: float) -> float:
    """Return the seconds until step `last`, at the pace of the newest steps, which includes validations and checkpoints. `steps` and
    `times`: the numbers of the steps since the newest start, and when each ended. `seconds`: a step's time, used if there are fewer than
    two steps. Raises ValueError if there is no step.
    """
    if not steps:
        raise ValueError("no step has finished yet, so the time left is unknown")
    first, newest = steps[-RECENT:][0], steps[-1]
    each = (times[-1] - times[-RECENT:][0]) / (newest - first) if newest > first else seconds
    return max(last - newest, 0) * each
