"""The domain of each sample: a fixed sequence in which each domain has received its share at every point.

Shares are rounded to multiples of 1/65,536, so the sequence has a period of at most 65,536 samples. After any number n of samples, a
domain with share w has had between n w - 1 and n w + 1 samples (Tijdeman 1980, "The chairman assignment problem": with k domains the gap
stays within 1 - 1/(2k - 2)). The domain of sample n is therefore one look-up, and the number of earlier samples from this domain is
computed from the number of whole periods and a second look-up. A mixture has no state, and any number of ranks get the same result.
"""

import heapq
from collections.abc import Sequence
from math import gcd, isfinite

import numpy as np
import numpy.typing as npt

PERIOD = 1 << 16


class Mixture:
    """A mixture of domains, numbered as in `weights` (not negative, not all zero; scaled to add up to 1)."""

    def __init__(self, weights: Sequence[float]) -> None:
        if not weights or any(not isfinite(weight) or weight < 0 for weight in weights) or sum(weights) == 0:
            raise ValueError(
                f"weights {list(weights)} are not valid shares: give finite numbers of 0 or more, at least one above 0"
            )
        if sum(weight > 0 for weight in weights) > PERIOD:
            raise ValueError(f"{len(weights)} domains are more than a mixture can hold ({PERIOD}). Combine some.")
        counts = _round(weights)
        divisor = gcd(*counts)
        self._counts = [count // divisor for count in counts]
        self.period = PERIOD // divisor
        self.shares: tuple[float, ...] = tuple(count / PERIOD for count in counts)
        self._domains = _spread(self._counts)
        self._earlier = np.zeros(self.period, np.int64)
        for domain, count in enumerate(self._counts):
            self._earlier[self._domains == domain] = np.arange(count)

    def place(self, index: int) -> tuple[int, int]:
        """Return the domain of sample `index`, and the number of earlier samples from this domain."""
        periods, position = divmod(index, self.period)
        domain = int(self._domains[position])
        return domain, periods * self._counts[domain] + int(self._earlier[position])

    def counts(self, samples: int) -> npt.NDArray[np.int64]:
        """Return how many of the first `samples` samples come from each domain, int64 [domains]."""
        periods, position = divmod(samples, self.period)
        begun = np.bincount(self._domains[:position], minlength=len(self._counts))
        return periods * np.array(self._counts, np.int64) + begun


def _round(weights: Sequence[float]) -> list[int]:
    """Round weights to whole numbers that add up to PERIOD, by largest remainder; a domain with a weight above 0 gets at least 1."""
    exact = np.array(weights, np.float64) / sum(weights) * PERIOD
    counts = np.floor(exact).astype(np.int64)
    counts[(counts == 0) & (exact > 0)] = 1
    while (missing := PERIOD - int(counts.sum())) != 0:
        gaps = np.where(exact > 0, exact - counts, -np.inf) if missing > 0 else np.where(counts > 1, counts - exact, -np.inf)
        chosen = np.argsort(-gaps, kind="stable")[: min(abs(missing), int((exact > 0).sum()))]
        chosen = chosen[gaps[chosen] > -np.inf]
        counts[chosen] += 1 if missing > 0 else -1
    return counts.tolist()


def _spread(counts: Sequence[int]) -> npt.NDArray[np.int32]:
    """Return one period of domain numbers, int32 [sum(counts)]: Tijdeman's rule as earliest deadline first.

    With n samples in all and k domains, a domain of share w may get its next sample once n w is 1/(2k - 2) ahead of the domain's
    number of samples, and must get it before n w is more than 1 - 1/(2k - 2) ahead. The first and the last possible n are computed in
    integer arithmetic.
    """
    period, kinds = sum(counts), sum(count > 0 for count in counts)
    parts = max(2 * kinds - 2, 1)
    jobs: list[tuple[int, int, int]] = []  # release, deadline, domain
    for domain, count in enumerate(counts):
        number = np.arange(count, dtype=np.int64) * parts
        release = -(-period * (number + 1) // (count * parts)) if count else number
        deadline = period * (number + parts - 1) // (count * parts) if count else number
        jobs.extend(zip(release.tolist(), deadline.tolist(), [domain] * count, strict=True))
    jobs.sort()
    order = np.empty(period, np.int32)
    ready: list[tuple[int, int]] = []
    waiting = iter([*jobs, (period + 1, 0, 0)])
    job = next(waiting)
    for position in range(period):
        while job[0] <= position + 1:
            heapq.heappush(ready, job[1:])
            job = next(waiting)
        order[position] = heapq.heappop(ready)[1]
    return order
