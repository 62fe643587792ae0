"""Check of a rank's memory against its device, with changes that would make it fit: arithmetic on the counts of a dry run."""

from collections.abc import Callable
from dataclasses import dataclass

from megalith.check import check
from megalith.prove.meter import Memory
from megalith.spec.problem import Problem
from megalith.spec.run import RunSpec
from megalith.spec.sites import outer_slots
from megalith.spec.state import bytes_each
from megalith.spec.treatment import slots_of

GIB = 2**30


@dataclass(frozen=True)
class Lever:
    """A change of the plan, the category of memory that it reduces, and the fraction that it saves (an upper bound for
    recomputation)."""

    change: str
    category: str
    saves: float


def _allowed(spec: RunSpec, key: str, value: object) -> bool:
    plan = spec.plan.model_copy(update={"state": spec.plan.state.model_copy(update={key: value})})
    changed = spec.model_copy(update={"plan": plan})
    return not any(problem.key == f"plan.state.{key}" for problem in check(changed, files=False))


def _weights(spec: RunSpec) -> Lever | None:
    """Return the change that makes weights from state off the device, if `check` allows it for the run. With this change, only
    the weights of two parts remain on the device."""
    state = spec.plan.state
    if not state.away or state.weights_away or not _allowed(spec, "weights", state.optimizer):
        return None
    return Lever(f'plan.state.weights = "{state.optimizer}"', "weights", state.away * (1 - 2 / (spec.model.layers + 2)))


def _release(spec: RunSpec) -> Lever | None:
    """Return the change that releases gradients, if `check` allows it for the run. With this change, only the gradients of one
    part remain."""
    state = spec.plan.state
    if state.optimizer != "disk" or state.release or not _allowed(spec, "release", True):
        return None
    return Lever("plan.state.release = true", "gradients", 1 - 1 / (spec.model.layers + 2))


def _retain(spec: RunSpec) -> Lever | None:
    """Return the change that moves activations to the host's memory, if `check` allows it for the run. With this change, only the
    activations of two blocks remain on the device."""
    plan = spec.plan.model_copy(update={"retain": spec.plan.retain.model_copy(update={"blocks": "host"})})
    allowed = check(spec.model_copy(update={"plan": plan}), files=False)
    if spec.plan.retain.away or any(problem.key.startswith("plan.retain.") for problem in allowed):
        return None
    return Lever('plan.retain.blocks = "host"', "activations", max(0.0, 1 - 2 * spec.plan.pipeline / spec.model.layers))


def _merged(spec: RunSpec) -> Lever | None:
    """Return the lever that moves the tensors that merges keep to the host's memory; None if no sites merge, or if these tensors
    are there already."""
    merged = bytes_each(outer_slots(spec.sites, on_device=True))
    others = bytes_each(slots_of(spec.optimizer)) * (1 - spec.plan.state.away)
    return Lever('sites.place = "host"', "optimizer", merged / (merged + others)) if merged else None


LEVERS: tuple[Callable[[RunSpec], Lever | None], ...] = (
    lambda s: Lever("plan.zero = 1", "optimizer", 1 - 1 / s.plan.dp_size) if s.plan.zero == 0 and s.plan.dp_size > 1 else None,
    lambda s: Lever("plan.zero = 2", "gradients", 1 - 1 / s.plan.dp_size) if s.plan.zero < 2 and s.plan.dp_size > 1 else None,
    lambda s: Lever("plan.zero = 3", "weights", 1 - 1 / s.plan.dp_size) if s.plan.zero < 3 and s.plan.dp_size > 1 else None,
    lambda s: Lever("plan.replicate = 1", "optimizer", 1 - 1 / s.plan.replicate) if s.plan.replicate > 1 else None,
    lambda s: Lever('plan.recompute = "full"', "activations", 0.9) if s.plan.recompute != "full" else None,
    _retain,
    _merged,
    lambda s: Lever('plan.state.optimizer = "host"', "optimizer", 1.0) if not s.plan.state.away else None,
    _release,
    _weights,
    lambda s: Lever(f"plan.microbatch = {s.plan.microbatch // 2}", "activations", 0.5) if s.plan.microbatch > 1 else None,
    lambda s: Lever(f"plan.context = {2 * s.plan.context}", "activations", 0.5),
)


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
    levers = [lever for make in LEVERS if (lever := make(spec)) is not None]
    saved = {lever.change: lever.saves * memory.peak[lever.category] for lever in levers}
    enough = [lever.change for lever in levers if saved[lever.change] >= over]
    if enough:
        return f"By proportion, {' or '.join(enough)} would make it fit; repeat the dry run with this change."
    here = [lever.change for lever in levers if lever.category == largest]
    times = -(-memory.total // limit)
    more = f"{times} times as many ranks per model (plan.tensor x plan.pipeline)"
    return f"No single change would make it fit. Use {' and '.join(here)}, or {more}." if here else f"Use {more}."


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"
