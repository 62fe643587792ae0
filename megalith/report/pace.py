"""Speed and time left from a run's newest steps. The live line and the live page both use this module, so they show the same figures."""

import math
from collections.abc import Sequence
from statistics import median

RECENT = 50
"""Number of newest steps from which speed and time left are computed."""


def usual(values: Sequence[float | None]) -> float | None:
    """Return the median of the newest values that are known; None if no value is known."""
    known = [value for value in values[-RECENT:] if value is not None and math.isfinite(value)]
    return float(median(known)) if known else None


def seconds_left(steps: Sequence[float], times: Sequence[float], *, last: int, seconds: float) -> float:
    """Return the seconds until step `last`, from the time that the newest steps took, including validations and checkpoints.
    `steps` and `times`: the numbers of the steps since the newest start, and when each ended. `seconds`: the time of one step,
    which is used if fewer than two steps have ended. Raises ValueError if there is no step.
    """
    if not steps:
        raise ValueError("no step has finished yet, so the time left is unknown")
    first, newest = steps[-RECENT:][0], steps[-1]
    each = (times[-1] - times[-RECENT:][0]) / (newest - first) if newest > first else seconds
    return max(last - newest, 0) * each
