"""Zero-bubble schedules of one stage a rank, ZB-H1 and ZB-H2 (Qi et al. 2024, arXiv:2401.10241, section 2).

A backward is split in two: I, the gradient of the input, which the stage before waits for, and W, the gradient of the weights,
which nothing waits for until the step ends. W then fills the former bubble. The paper's T_B is the time of I here.
"""

from megalith.schedule.action import Action, Row, Schedule, loop


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """1F1B's memory, a third of its bubble: rank r lets its W fall r microbatches behind.

    With at least `ranks` microbatches and W no longer than F or I, a rank idles (ranks - 1) * (F + I - W) at most inside its span,
    which is (ranks - 1) * (F + B - 2 W) for a full backward B = I + W. Every rank holds `ranks` microbatches at most.
    """
    rows = tuple(_row(rank, microbatches, first=ranks - rank, behind=rank) for rank in range(ranks))
    return Schedule("zb-h1", rows, ranks, microbatches, loop(ranks, 1))


def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """No bubble inside a rank's own span if F, I and W take the same time, for nearly twice the memory of 1F1B.

    The first backward needs 2 * (ranks - rank) - 1 forwards before it to leave no gap, and W falls 2 * rank microbatches behind to
    leave none at the end. With at least 2 * ranks - 1 microbatches and W no longer than F or I, a rank idles
    (ranks - 1) * (F + I - 2 W) at most inside its span, which is (ranks - 1) * (F + B - 3 W); it holds 2 * ranks - 1 microbatches at most.
    The ranks start and end one after the other (a parallelogram), so the gain is there only if a rank starts its next step before
    the others have ended this one: with an update that waits for all ranks a step takes as long as with ZB-H1 (the paper's
    section 4 does without, by validating the update afterwards).
    """
    rows = tuple(_row(rank, microbatches, first=2 * (ranks - rank) - 1, behind=2 * rank) for rank in range(ranks))
    return Schedule("zb-h2", rows, ranks, microbatches, loop(ranks, 1))


def _row(rank: int, microbatches: int, *, first: int, behind: int) -> Row:
    """`first` forwards, then I, its W of `behind` microbatches ago and a forward in turn, and at last the W that are left."""
    row = [Action("F", rank, i) for i in range(min(first, microbatches))]
    for i in range(microbatches):
        row.append(Action("I", rank, i))
        if i >= behind:
            row.append(Action("W", rank, i - behind))
        if i + first < microbatches:
            row.append(Action("F", rank, i + first))
    row += [Action("W", rank, i) for i in range(max(microbatches - behind, 0), microbatches)]
    return tuple(row)
