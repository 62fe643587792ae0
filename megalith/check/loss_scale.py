"""Rules about the loss scale of fp16."""

from megalith.check.case import Case, Found, advice, error
from megalith.spec.numbers import PRECISIONS


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
