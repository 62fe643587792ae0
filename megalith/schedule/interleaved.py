"""Interleaved 1F1B: several stages per rank, which divide the bubble by their number (Narayanan et al. 2021, arXiv:2104.04473)."""

from itertools import chain

from megalith.schedule.action import Action, Computation, Row, Schedule, loop


def interleaved(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Build 1F1B in which each rank holds `chunks` stages, dealt to the ranks in turn. Microbatches pass through the stages in
    rounds. A round takes its microbatches through one chunk, then through the next chunk. Rounds are as equal as possible and
    never smaller than `ranks` (unless there are fewer microbatches), so that the pipeline stays full between chunks. Any number
    of microbatches is possible; with a multiple of `ranks` the order is the paper's.
    """
    sizes = rounds(ranks, microbatches)

    def row(rank: int) -> Row:
        forwards = _order("F", sizes, [rank + ranks * chunk for chunk in range(chunks)])
        backwards = _order("B", sizes, [rank + ranks * chunk for chunk in reversed(range(chunks))])
        # the first backward of a rank needs a whole round through all chunks but the last, and the way there and back
        warmup = min((chunks - 1) * sizes[0] + (2 if chunks > 1 else 1) * (ranks - 1 - rank), len(forwards))
        steady = chain.from_iterable(zip(forwards[warmup:], backwards, strict=False))
        return (*forwards[:warmup], *steady, *backwards[len(forwards) - warmup :])

    rows = tuple(row(rank) for rank in range(ranks))
    return Schedule("interleaved", rows, ranks * chunks, microbatches, loop(ranks, chunks))


def rounds(ranks: int, microbatches: int) -> list[int]:
    """Return the sizes of the rounds. There are as many rounds as possible with at least `ranks` microbatches each, and larger
    rounds come first."""
    count = max(1, microbatches // ranks)
    size, larger = divmod(microbatches, count)
    return [size + (i < larger) for i in range(count)]


def _order(kind: Computation, sizes: list[int], stages: list[int]) -> Row:
    row: list[Action] = []
    first = 0
    for size in sizes:
        row += [Action(kind, stage, i) for stage in stages for i in range(first, first + size)]
        first += size
    return tuple(row)
