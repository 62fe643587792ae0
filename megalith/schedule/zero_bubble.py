"""Zero-bubble schedules with one stage per rank, ZB-H1 and ZB-H2 (Qi et al. 2024, arXiv:2401.10241, section 2).

A backward is split in two: I, the gradient of the input, for which the stage before waits, and W, the gradient of the weights, for which
nothing waits until the step ends. W then fills the former bubble. The time of I is the paper's T_B.
"""

from megalith.schedule.action import Action, Row, Schedule, loop


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """A schedule with the memory of 1F1B and a third of its bubble: on rank r, W is delayed by r microbatches.

    With at least `ranks` microbatches and W no longer than F or I, a rank idles at most (ranks - 1) * (F + I - W) inside its span; with a
    full backward B = I + W, this equals (ranks - 1) * (F + B - 2 W). Every rank holds at most `ranks` microbatches.
    """
    rows = tuple(_row(rank, microbatches, first=ranks - rank, behind=rank) for rank in range(ranks))
    return Schedule("zb-h1", rows, ranks, microbatches, loop(ranks, 1))


def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """A schedule without bubble inside a rank's own span, if F, I and W take the same time; it needs nearly twice the memory of 1F1B.

    There is no gap if 2 * (ranks - rank) - 1 forwards precede the first backward, and no gap at the end if W is delayed by 2 * rank
    microbatches. With at least 2 * ranks - 1 microbatches and W no longer than F or I, a rank idles at most (ranks - 1) * (F + I - 2 W) =
    (ranks - 1) * (F + B - 3 W) inside its span, and holds at most 2 * ranks - 1 microbatches. The ranks start and end one after the other
    (a parallelogram), so there is a gain only if a rank starts its next step before the others have ended this one. With an update that
    waits for all ranks, a step takes as long as with ZB-H1. (The paper's section 4 avoids the wait and validates the update afterwards.)
    """
    rows = tuple(_row(rank, microbatches, first=2 * (ranks - rank) - 1, behind=2 * rank) for rank in range(ranks))
    return Schedule("zb-h2", rows, ranks, microbatches, loop(ranks, 1))


def _row(rank: int, microbatches: int, *, first: int, behind: int) -> Row:
    """Return `first` forwards; then, in turn, an I, the W of the microbatch `behind` places earlier, and a forward; and finally the
    remaining W."""
    row = [Action("F", rank, i) for i in range(min(first, microbatches))]
    for i in range(microbatches):
        row.append(Action("I", rank, i))
        if i >= behind:
            row.append(Action("W", rank, i - behind))
        if i + first < microbatches:
            row.append(Action("F", rank, i + first))
    row += [Action("W", rank, i) for i in range(max(microbatches - behind, 0), microbatches)]
    return tuple(row)
