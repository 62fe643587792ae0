"""The figures of a run's newest steps that its live line and its page both show: from the same steps, by the same rule."""

import math
from collections.abc import Sequence
from statistics import median

RECENT = 50
"""Number of newest steps that these figures use."""


def usual(values: Sequence[float | None]) -> float | None:
    """Return the median of the newest values that are known; None if none is."""
    known = [value for value in values[-RECENT:] if value is not None and math.isfinite(value)]
    return float(median(known)) if known else None


def seconds_left(steps: Sequence[float], times: Sequence[float], *, last: int, seconds: float) -> float:
    """Return the seconds to step `last`, at the pace of the newest steps, including validations and checkpoints between them.
    `steps` and `times`: the numbers of the steps since the newest start, and when each ended. `seconds`: a step's time, used if
    there are fewer than two. Raises ValueError if there is none.
    """
    if not steps:
        raise ValueError("no step yet, so nothing says how long the rest takes")
    first, newest = steps[-RECENT:][0], steps[-1]
    each = (times[-1] - times[-RECENT:][0]) / (newest - first) if newest > first else seconds
    return max(last - newest, 0) * each
