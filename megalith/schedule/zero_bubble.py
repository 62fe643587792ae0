"""Zero-bubble schedules with one stage per rank, ZB-H1 and ZB-H2 (Qi et al. 2024, arXiv:2401.10241, section 2).

A backward is split in two halves. I computes the gradient of the input, for which the previous stage waits. W computes the
gradient of the weights, for which no other computation waits until the step ends. Each rank computes W when it would otherwise
idle. In the paper's notation, the time of I is T_B.
"""

from megalith.schedule.action import Action, Row, Schedule, loop


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """Build a schedule with the memory of 1F1B and a third of its bubble. On rank r, W is delayed by r microbatches.

    With at least `ranks` microbatches, and W no longer than F or I, a rank idles at most (ranks - 1) * (F + I - W) between its
    first and its last computation. With a full backward B = I + W, this bound equals (ranks - 1) * (F + B - 2 W). Every rank
    holds at most `ranks` microbatches.
    """
    rows = tuple(_row(rank, microbatches, first=ranks - rank, behind=rank) for rank in range(ranks))
    return Schedule("zb-h1", rows, ranks, microbatches, loop(ranks, 1))


def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """Build a schedule without bubble between a rank's first and last computation, if F, I and W take the same time. The schedule
    needs nearly twice the memory of 1F1B.

    A rank has no gap at the beginning if 2 * (ranks - rank) - 1 forwards precede its first backward, and no gap at the end if W
    is delayed by 2 * rank microbatches. With at least 2 * ranks - 1 microbatches and W no longer than F or I, a rank idles at
    most (ranks - 1) * (F + I - 2 W) = (ranks - 1) * (F + B - 3 W) inside its span, and holds at most 2 * ranks - 1 microbatches.
    The ranks start and end one after the other (a parallelogram). The schedule is therefore faster only if a rank may start its
    next step before the other ranks have ended the current step. If the update waits for all ranks, a step takes as long as with
    ZB-H1. (The paper's section 4 avoids the wait and validates the update afterwards.)
    """
    rows = tuple(_row(rank, microbatches, first=2 * (ranks - rank) - 1, behind=2 * rank) for rank in range(ranks))
    return Schedule("zb-h2", rows, ranks, microbatches, loop(ranks, 1))


def _row(rank: int, microbatches: int, *, first: int, behind: int) -> Row:
    """Return a rank's row: it has `first` forwards, then in turn an I, the W of the microbatch `behind` places before that of the
    I, and a forward, and at the end the remaining W."""
    row = [Action("F", rank, i) for i in range(min(first, microbatches))]
    for i in range(microbatches):
        row.append(Action("I", rank, i))
        if i >= behind:
            row.append(Action("W", rank, i - behind))
        if i + first < microbatches:
            row.append(Action("F", rank, i + first))
    row += [Action("W", rank, i) for i in range(max(microbatches - behind, 0), microbatches)]
    return tuple(row)
