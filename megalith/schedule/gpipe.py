"""GPipe: every forward, then every backward (Huang et al. 2019, arXiv:1811.06965)."""

from megalith.schedule.action import Row, Schedule, loop, steps


def gpipe(ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """All forwards, then all backwards. GPipe is simple, but all microbatches are in flight at once.

    With several chunks a rank runs all microbatches of one stage before its next stage. GPipe with several chunks is the
    breadth-first pipeline of Lamy-Poirier 2022 (arXiv:2211.05953): weights are gathered once per stage, not once per microbatch.
    """
    each = range(microbatches)

    def row(rank: int) -> Row:
        stages = tuple(rank + ranks * chunk for chunk in range(chunks))
        return steps("F", stages, each) + steps("B", stages[::-1], each)

    rows = tuple(row(rank) for rank in range(ranks))
    return Schedule("gpipe", rows, ranks * chunks, microbatches, loop(ranks, chunks))
