"""Bytes of gradients that are released inside the backward (`plan.state.release`): the gradients of a few parts, and gradients in
message buffers. No torch."""

from megalith.cost.workload import Workload
from megalith.spec.optimizers import OPTIMIZERS

SHARES = 3
"""Number of parts whose reduced shares are in memory at once if gradients are not released: the part under reduction, and the two parts
before it."""
UPDATED = 1
"""Number of further parts whose gradients are in memory while gradients are released: the part whose update runs."""
TOGETHER = 2
"""Number of buffers that exist at once, each with a part's gradients joined for a reduction."""


def can_be(workload: Workload) -> bool:
    """Return True if gradients can be released, and doing so saves memory. `megalith check` applies the same rules, and further rules to
    run files."""
    by_element = OPTIMIZERS[workload.optimizer].unit == "element"
    ours = workload.software_profile.ours
    return ours and by_element and workload.microbatches == 1 and not workload.watched and not workload.plan.post_validation


def held(workload: Workload, largest: float) -> float:
    """Return the bytes of gradients while the largest part, of `largest` numbers, is reduced, and another part is updated."""
    part = workload.gradient_bytes * largest
    return part * (1 + (SHARES + UPDATED) / workload.shards[0]) if workload.plan.dp_size > 1 else part * (1 + UPDATED)


def in_transit(workload: Workload, largest: float) -> float:
    """Return the bytes of the buffers that send gradients of parts of `largest` numbers."""
    return TOGETHER * workload.gradient_bytes * largest if workload.plan.dp_size > 1 else 0.0


def waiting(workload: Workload, embedding: float, *, first: bool, last: bool) -> float:
    """Return the bytes of a tied embedding's gradient. After the head's backward, the head's half of this gradient waits for the
    embedding's half: unsharded if both ends are on this rank, otherwise as a reduced share. `embedding`: number of the embedding's
    elements."""
    if not workload.model.head.tied or not last:
        return 0.0
    return embedding * (workload.width if first else workload.gradient_bytes / workload.shards[0])
