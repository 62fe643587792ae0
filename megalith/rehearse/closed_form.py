"""Closed forms of goodput and of the best checkpoint interval, for exponential faults, one tier and no waiting. If faults are exponential,
and there is one tier and no waiting, the simulator must give the same values.

Times in seconds. `mtbf`: mean time between faults of the whole machine; `interval`: work between two saves; `stall`: how long a save stops
the work; `restart`: from a fault until the run works again.
"""

from math import exp, sqrt


def young(mtbf: float, stall: float) -> float:
    """The best interval to first order (Young 1974, "A first order approximation to the optimum checkpoint interval")."""
    return sqrt(2 * stall * mtbf)


def daly(mtbf: float, stall: float) -> float:
    """The best interval to higher order (Daly 2006, equation 37). If stall exceeds 2 mtbf, saves cost more than they recover, and
    the result is mtbf."""
    if stall >= 2 * mtbf:
        return mtbf
    share = stall / (2 * mtbf)
    return sqrt(2 * stall * mtbf) * (1 + sqrt(share) / 3 + share / 9) - stall


def goodput(mtbf: float, *, interval: float, stall: float, restart: float) -> float:
    """Share of the time that is useful work, with faults also during saves and restarts (the reciprocal of Daly 2006, equation 20)."""
    whole = mtbf * exp(restart / mtbf) * (exp((interval + stall) / mtbf) - 1)
    return interval / whole


def goodput_to_first_order(mtbf: float, *, interval: float, stall: float, restart: float) -> float:
    """The goodput 1 - (restart + half an interval) per fault - one stall per interval. This formula is accurate while faults and saves cost
    only a few percent of the time."""
    return 1 - (restart + interval / 2) / mtbf - stall / interval
