"""Zero-bubble schedules of one stage a rank, ZB-H1 and ZB-H2 (Qi et al. 2024, arXiv:2401.10241, section 2).

A backward is split in two: I, the gradient of the input, for which the stage before waits, and W, the gradient of the weights,
for which nothing waits until the step ends. W then fills the former bubble. The paper's T_B is the time of I here.
"""

from megalith.schedule.action import Action, Row, Schedule, loop


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """The memory of 1F1B and a third of its bubble: on rank r, W is r microbatches late.

    With at least `ranks` microbatches and W no longer than F or I, a rank idles (ranks - 1) * (F + I - W) at most inside its span,
    which is (ranks - 1) * (F + B - 2 W) for a full backward B = I + W. Every rank holds `ranks` microbatches at most.
    """
    rows = tuple(_row(rank, microbatches, first=ranks - rank, behind=rank) for rank in range(ranks))
    return Schedule("zb-h1", rows, ranks, microbatches, loop(ranks, 1))


def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """No bubble inside a rank's own span if F, I and W take the same time, for nearly twice the memory of 1F1B.

    There is no gap if 2 * (ranks - rank) - 1 forwards precede the first backward, and none at the end if W is 2 * rank
    microbatches late. With at least 2 * ranks - 1 microbatches and W no longer than F or I, a rank idles
    (ranks - 1) * (F + I - 2 W) at most inside its span, which is (ranks - 1) * (F + B - 3 W); it holds 2 * ranks - 1 microbatches at most.
    The ranks start and end one after the other (a parallelogram), so there is a gain only if a rank starts its next step before
    the others have ended this one. With an update that waits for all ranks, a step takes as long as with ZB-H1. (The paper's
    section 4 avoids the wait and validates the update afterwards.)
    """
    rows = tuple(_row(rank, microbatches, first=2 * (ranks - rank) - 1, behind=2 * rank) for rank in range(ranks))
    return Schedule("zb-h2", rows, ranks, microbatches, loop(ranks, 1))


def _row(rank: int, microbatches: int, *, first: int, behind: int) -> Row:
    """Return `first` forwards; then, in turn, I, the W of `behind` microbatches ago, and a forward; and at the end the remaining
    W."""
    row = [Action("F", rank, i) for i in range(min(first, microbatches))]
    for i in range(microbatches):
        row.append(Action("I", rank, i))
        if i >= behind:
            row.append(Action("W", rank, i - behind))
        if i + first < microbatches:
            row.append(Action("F", rank, i + first))
    row += [Action("W", rank, i) for i in range(max(microbatches - behind, 0), microbatches)]
    return tuple(row)
