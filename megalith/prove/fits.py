"""Check of a rank's memory against its device, with changes that would make it fit: arithmetic on the counts of a dry run."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megalith.check import check
from megalith.check.remedies import changed_by
from megalith.prove.meter import Memory
from megalith.spec.problem import Problem
from megalith.spec.run import RunSpec
from megalith.spec.sites import outer_slots
from megalith.spec.state import bytes_each
from megalith.spec.toml import literal
from megalith.spec.treatment import slots_of

GIB = 2**30


@dataclass(frozen=True)
class Lever:
    """A change of the run file, the category of memory that it reduces, and the fraction that it saves (an upper bound for
    recomputation)."""

    key: str
    value: Any
    category: str
    saves: float

    def __str__(self) -> str:
        return f"{self.key} = {literal(self.value)}"


def _levers(spec: RunSpec) -> Iterator[Lever]:
    """Yield changes that save memory in some runs, cheapest first; `check` may refuse them for this run. With state or activations
    elsewhere, or released gradients, only those of one or two parts remain on the device."""
    plan, state, layers = spec.plan, spec.plan.state, spec.model.layers
    ranks = 1 - plan.replicate / plan.dp_size
    for zero, category in ((1, "optimizer"), (2, "gradients"), (3, "weights")):
        if plan.zero < zero:
            yield Lever("plan.zero", zero, category, ranks)
    if plan.zero > 0:
        yield Lever("plan.replicate", 1, "optimizer", 1 - 1 / plan.replicate)
    if plan.recompute not in ("full", "sqrt") and not plan.recompute.startswith("segments:"):
        yield Lever("plan.recompute", "full", "activations", 0.9)
    if not plan.retain.away:
        yield Lever("plan.retain.blocks", "host", "activations", 1 - 2 * plan.pipeline / layers)
    if merged := bytes_each(outer_slots(spec.sites, on_device=True)):
        others = bytes_each(slots_of(spec.optimizer)) * (1 - state.away)
        yield Lever("sites.place", "host", "optimizer", merged / (merged + others))
    if not state.away:
        yield Lever("plan.state.optimizer", "host", "optimizer", 1.0)
    if not state.release:
        yield Lever("plan.state.release", True, "gradients", 1 - 1 / (layers + 2))
    if state.away and not state.weights_away:
        yield Lever("plan.state.weights", state.optimizer, "weights", state.away * (1 - 2 / (layers + 2)))
    fewer = max((size for size in range(1, plan.microbatch // 2 + 1) if plan.microbatch % size == 0), default=plan.microbatch)
    yield Lever("plan.microbatch", fewer, "activations", 1 - fewer / plan.microbatch)
    yield Lever("plan.context", 2 * plan.context, "activations", 0.5)


def _allowed(spec: RunSpec, levers: Sequence[Lever]) -> bool:
    """Return True if the run has no error with these changes that it does not have without them."""
    changed = changed_by(spec, {lever.key: lever.value for lever in levers})
    before, after = (
        {(problem.key, problem.reason) for problem in check(one, files=False, remedies=False) if problem.severity == "error"}
        for one in (spec, changed)
    )
    return after <= before


def does_not_fit(spec: RunSpec, memory: Memory, limit: int) -> Problem | None:
    """Return a problem if a rank holds more than `limit` bytes at once. The problem names the category with the most bytes, and
    remedies, cheapest first.

    The effect of a remedy is estimated by proportion; only a dry run with the changed plan is exact.
    """
    if memory.total <= limit:
        return None
    over = memory.total - limit
    if memory.building > sum(memory.peak.values()) and sum(memory.peak.values()) <= limit:
        reason = f"while a rank builds the model, one whole part at a time, it holds {_gib(memory.building)} of {_gib(limit)}"
        way_out = (
            "The largest part sets this peak. If this is a block with experts, raise plan.expert, because a rank builds only its own "
            "experts; else use devices with more memory."
        )
        return Problem("error", "model", None, reason, way_out)
    largest = max(memory.peak, key=memory.peak.__getitem__)
    split = ", ".join(f"{name} {_gib(size)}" for name, size in sorted(memory.peak.items(), key=lambda item: -item[1]))
    reason = f"does not fit: a rank holds {_gib(memory.total)} of {_gib(limit)} ({split}); {largest} hold most"
    return Problem("error", "plan", None, reason, _ways_out(spec, memory, over=over, limit=limit, largest=largest))


def _ways_out(spec: RunSpec, memory: Memory, *, over: int, limit: int, largest: str) -> str:
    levers = [lever for lever in _levers(spec) if lever.saves > 0 and _allowed(spec, [lever])]
    enough = [str(lever) for lever in levers if lever.saves * memory.peak[lever.category] >= over]
    if enough:
        return f"By proportion, {' or '.join(enough)} would make it fit; repeat the dry run with this change."
    together: list[Lever] = []
    for lever in levers:
        if lever.category == largest and (not together or _allowed(spec, [*together, lever])):
            together.append(lever)
    times = -(-memory.total // limit)
    more = f"{times} times as many ranks per model (plan.tensor x plan.pipeline)"
    here = " and ".join(map(str, together))
    return f"No single change would make it fit. Use {here}, or {more}." if here else f"Use {more}."


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"
