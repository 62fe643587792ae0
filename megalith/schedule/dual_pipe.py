"""DualPipe (DeepSeek-V3, arXiv:2412.19437, section 3.2.1) and its half, DualPipeV: schedules in which forwards and backwards overlap.

In an entry `(F;B)` a forward of one microbatch and a backward of another run together, so that each computes while the other
exchanges its experts' tokens. The order of steps is the published one (github.com/deepseek-ai/DualPipe; DualPipeV is Sea AI Lab's
"cut in half"). The following numbers assume p stages in the pipeline, and at least p microbatches: in each direction (DualPipe), or
in total (DualPipeV). A rank idles at most (p/2 - 1) * (F&B + B - 3 W) before the last rank ends, where F&B is the time of an
overlapped entry, and it holds the activations of at most p + 1 stages. The idle times are exact if F = I >= W and B <= F&B <= F +
B. Between a rank's own first and last entry, its idle time is shorter by (p/2 - 2) * (F + B - F&B), or by nothing if p = 2. With fewer than
p microbatches (in DualPipe, in each direction), the order is that of a full pipeline without the missing microbatches.
"""

from collections import Counter, deque

from megalith.schedule.action import Action, Computation, Overlap, Row, RowEntry, Schedule, loop, number, renamed, v_shape


def dualpipev(ranks: int, microbatches: int) -> Schedule:
    """Build DualPipeV. Each rank has two stages, placed in a V as in ZB-V; in the steady state, all entries overlap. In the formulas
    for idle time and memory, p is the number of stages, 2 * ranks. The schedule of a rank equals that of a rank of DualPipe on twice
    as many ranks, but no stage is on two ranks.
    """
    full = max(microbatches, 2 * ranks)

    def row(rank: int) -> Row:
        return renamed(_row(rank, ranks, full), lambda action: action if number(action) < microbatches else None)

    return Schedule("dualpipev", tuple(row(rank) for rank in range(ranks)), 2 * ranks, microbatches, v_shape(ranks))


def dualpipe(ranks: int, microbatches: int) -> Schedule:
    """Build DualPipe: two pipelines through the same ranks in opposite directions. Each stage is on a rank and on the mirror rank of
    this rank.

    In the formulas for its bubble and memory, p is the number of ranks, which is even. The first half of the microbatches (the
    larger half, if their number is odd) runs in one direction. Rank r and its mirror rank have the actions of rank min(r, ranks -
    1 - r) of a DualPipeV on half the ranks.
    """
    assert ranks % 2 == 0, ranks
    mirrored = (microbatches + 1) // 2
    full = max(mirrored, ranks)

    def row(rank: int) -> Row:
        def name(action: Action) -> Action | None:
            if action.stage == rank:  # the direction in which rank s computes stage s
                return action if number(action) < mirrored else None
            microbatch = number(action) + mirrored
            return Action(action.kind, action.stage, microbatch) if microbatch < microbatches else None

        return renamed(_row(min(rank, ranks - 1 - rank), ranks // 2, full), name)

    return Schedule("dualpipe", tuple(row(rank) for rank in range(ranks)), ranks, microbatches, loop(ranks, 1), mirrored)


def _row(rank: int, ranks: int, microbatches: int) -> Row:
    down, up = rank, 2 * ranks - 1 - rank
    after, before = ranks - 1 - rank, rank + 1
    row = _Row()
    for _ in range(2 * after):
        row.add("F", down)
    for _ in range(before):
        row.add("F", down)
        row.add("F", up)
    for _ in range(after):  # the pipeline is not full yet: W fills the wait for the next forward
        row.add("I", up)
        row.weights()
        row.add("F", up)
    for i in range(microbatches - 2 * ranks + before):
        if (
            i == 0 and after == 0
        ):  # where the V turns, the forward of this very microbatch has just ended: overlapping would delay its backward
            row.add("F", down)
            row.add("B", up)
        else:
            row.overlap(down, up)
        row.overlap(up, down)
    for _ in range(after):
        row.add("B", up)
        row.overlap(up, down)
    for i in range(2 * before):  # the last half of these backwards is split into I and W, because no rank waits for W
        row.add("I" if i >= before else "B", up if i % 2 == 0 else down)
    for _ in range(after):
        row.weights()
        row.add("I", down)
    while row.owed:
        row.weights()
    return tuple(row.entries)


class _Row:
    """A row under construction, with the number of microbatches added for each stage and the W actions that must still be added."""

    def __init__(self) -> None:
        self.entries: list[RowEntry] = []
        self.owed: deque[Action] = deque()
        self._done: Counter[tuple[bool, int]] = Counter()

    def add(self, kind: Computation, stage: int) -> None:
        """Add the next microbatch of F, B or I. After an I, its W must follow later."""
        self.entries.append(self._next(kind, stage))

    def overlap(self, forward: int, backward: int) -> None:
        """Add an overlap of the next forward of one stage with the next backward of the other stage."""
        self.entries.append(Overlap(self._next("F", forward), self._next("B", backward)))

    def weights(self) -> None:
        self.entries.append(self.owed.popleft())

    def _next(self, kind: Computation, stage: int) -> Action:
        action = Action(kind, stage, self._done[kind == "F", stage])
        self._done[kind == "F", stage] += 1
        if kind == "I":
            self.owed.append(action._replace(kind="W"))
        return action
