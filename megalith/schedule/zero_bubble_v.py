"""ZB-V: a zero-bubble schedule with two stages per rank, placed in a V (Qi et al. 2024, arXiv:2401.10241, section 6; arXiv:2405.15362 calls
it V-ZB)."""

from collections import Counter

from megalith.schedule.action import Action, Computation, Row, Schedule, number, renamed, v_shape


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """Build a schedule without bubble, if F, I and W take the same time, in which every rank has the peak memory of 1F1B.

    Rank r holds stages r and 2 * ranks - 1 - r, so the first rank also has the last stage, and a microbatch's backward starts on
    the rank on which its forward began. If F = I = W (of one stage) and there are at least 2 * ranks - 1 microbatches, the
    order is optimal: no rank idles between its first and last computation, and each rank holds the activations of at most 2 * ranks
    stages, which equal `ranks` microbatches of two stages each. If F, I and W take different times, or with fewer than 2 * ranks - 1
    microbatches, the schedule has some bubble. As with ZB-H2, ranks end one after the other.
    """
    full = max(microbatches, 2 * ranks - 1)  # the order is made for a full pipeline; microbatches that do not exist are dropped

    def row(rank: int) -> Row:
        return renamed(_row(rank, ranks, full), lambda action: action if number(action) < microbatches else None)

    return Schedule("zb-v", tuple(row(rank) for rank in range(ranks)), 2 * ranks, microbatches, v_shape(ranks))


def _row(rank: int, ranks: int, microbatches: int) -> Row:
    down, up = rank, 2 * ranks - 1 - rank
    done: Counter[tuple[Computation, int]] = Counter()
    row: list[Action] = []

    def add(stage: int, *kinds: Computation) -> None:
        for kind in kinds:
            row.append(Action(kind, stage, done[kind, stage]))
            done[kind, stage] += 1

    for _ in range(2 * (ranks - rank) - 1):  # until the first microbatch is back on its way up
        add(down, "F")
    for _ in range(rank):
        add(up, "F")
        add(down, "F")
    for _ in range(ranks - rank):  # the way up is still being filled: its backwards have the entries of later forwards
        add(up, "F", "I", "W")
    while done["F", up] < microbatches:
        if done["F", down] < microbatches:
            add(down, "F")
        add(down, "I", "W")
        add(up, "F", "I", "W")
    for _ in range(rank):  # other ranks wait for I, nobody for W
        add(down, "I")
        add(up, "I")
    for _ in range(ranks - rank):
        add(down, "I", "W")
    for stage in (up, down):
        while done["W", stage] < microbatches:
            add(stage, "W")
    return tuple(row)
