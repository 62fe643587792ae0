"""Forwards alone: validation, and the prefill of long prompts."""

from megalith.schedule.action import Schedule, loop, steps


def forward_only(ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """All microbatches through one stage of a rank, then through its next one."""
    placement = loop(ranks, chunks)
    rows = tuple(
        steps("F", tuple(stage for stage, holder in enumerate(placement) if holder == rank), range(microbatches))
        for rank in range(ranks)
    )
    return Schedule("forward_only", rows, ranks * chunks, microbatches, placement)
