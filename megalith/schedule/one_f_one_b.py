"""1F1B: one forward, one backward (PipeDream-Flush, Narayanan et al. 2021, arXiv:2006.09503)."""

from itertools import chain

from megalith.schedule.action import Row, Schedule, loop, steps


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """Warm up with forwards, alternate one forward and one backward, then drain.

    The bubble is as long as GPipe's, but a rank never holds more than `ranks - rank` microbatches. With one rank this is plain gradient
    accumulation.
    """
    each = range(microbatches)

    def row(rank: int) -> Row:
        warmup = min(ranks - 1 - rank, microbatches)
        forwards, backwards = steps("F", (rank,), each), steps("B", (rank,), each)
        steady = chain.from_iterable(zip(forwards[warmup:], backwards, strict=False))
        return (*forwards[:warmup], *steady, *backwards[microbatches - warmup :])

    return Schedule("1f1b", tuple(row(rank) for rank in range(ranks)), ranks, microbatches, loop(ranks, 1))
