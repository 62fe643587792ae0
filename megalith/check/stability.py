"""Rules about a run's response to spikes, and about the loss scale of fp16."""

from megalith.check.case import Case, Found, advice, error
from megalith.spec.numbers import PRECISIONS
from megalith.spec.run import ANSWERS


def answers_are_a_ladder(case: Case) -> Found:
    """Each response is listed once, from the mildest to the most severe, and the run watches its loss."""
    stability = case.spec.stability
    ladder = tuple(answer for answer in ANSWERS if answer in stability.answers)
    if stability.answers != ladder:
        reason = "must list each response once, beginning with the mildest"
        yield error("stability.answers", list(stability.answers), reason, f"Use {list(ladder)}.")
    if stability.answers and not stability.watch:
        reason = "has responses to spikes, but stability.watch = false detects no spikes"
        yield error("stability.answers", list(stability.answers), reason, "Use stability.watch = true, or an empty list.")


def rewinds_have_copies(case: Case) -> Found:
    """A run rewinds to copies in memory, or else to checkpoints."""
    spec = case.spec
    if "rewind" not in spec.stability.answers:
        return
    on_disk = case.plan.state.optimizer == "disk"  # such a run makes no copies in memory
    in_memory = spec.fleet.recover and spec.fleet.memory_every > 0 and not on_disk
    copies = "" if on_disk else "Use fleet.recover = true and fleet.memory_every = 1"
    if not in_memory and not spec.checkpoint.every:
        reason = "includes rewinds, but the run has nothing to rewind to: no copies in memory, and no checkpoint before the end"
        way_out = f"{copies}, or set checkpoint.every." if copies else "Set checkpoint.every."
        yield error("stability.answers", list(spec.stability.answers), reason, way_out)
    elif not in_memory:
        reason = f"includes rewinds, but the run can only rewind to checkpoints, one every {spec.checkpoint.every} steps"
        way_out = (
            f"{copies}: copies for rewinds are made in memory every stability.keep_every steps."
            if copies
            else "Save more often, or keep the state on the device or the host, with fleet.recover = true and fleet.memory_every = 1: "
            "state on disk has no copies in memory."
        )
        yield advice("stability.answers", list(spec.stability.answers), reason, way_out)


def scales_are_powers_of_two(case: Case) -> Found:
    """The scale is a power of two, because other factors would round gradients, and begins at its floor or above."""
    scale = case.spec.loss_scale
    for name in ("initial", "floor"):
        value = getattr(scale, name)
        if value & (value - 1):
            below = 1 << (value.bit_length() - 1)
            reason = "is not a power of two, so scaling would round every gradient"
            yield error(f"loss_scale.{name}", value, reason, f"Use {below} or {2 * below}.")
    if scale.floor > scale.initial:
        reason = f"is above the scale of the first step, loss_scale.initial = {scale.initial}"
        yield error("loss_scale.floor", scale.floor, reason, f"Use floor <= {scale.initial}.")


def scale_is_used(case: Case) -> Found:
    """Only fp16 has a loss scale: other precisions have the range of fp32."""
    spec, scaled = case.spec, [name for name, row in PRECISIONS.items() if row.scaled]
    if "loss_scale" in spec.model_fields_set and spec.loss_scale.model_fields_set and spec.train.precision not in scaled:
        reason = f"changes nothing: train.precision = {spec.train.precision!r} has no loss scale"
        way_out = f'Remove this key, or set train.precision = "{scaled[0]}".'
        yield advice("loss_scale", ", ".join(sorted(spec.loss_scale.model_fields_set)), reason, way_out)
