"""A schedule of forwards only, for validation and the prefill of long prompts."""

from dataclasses import replace

from megalith.schedule.action import Row, Schedule, computations, number, steps


def forward_only(like: Schedule, microbatches: int) -> Schedule:
    """Return a schedule of forwards with the stages placed as in `like`. Each rank runs all microbatches through its first stage,
    then through its second stage, and so on.

    Both directions of a bidirectional schedule are used: the first half of the microbatches runs in one direction, the rest in the other.
    """
    mirrored = None if like.mirrored is None else (microbatches + 1) // 2
    placed = replace(like, name="forward_only", rows=((),) * like.ranks, microbatches=microbatches, mirrored=mirrored)

    def row(rank: int) -> Row:
        forwards = computations(steps("F", placed.stages_of(rank), range(microbatches)))
        return tuple(action for action in forwards if placed.rank_of(action.stage, number(action)) == rank)

    return replace(placed, rows=tuple(row(rank) for rank in range(like.ranks)))
