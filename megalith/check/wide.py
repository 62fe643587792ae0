"""Rules about layers that stay wide in narrow precisions, or in bf16 that keeps its inputs in 8 bits."""

from fnmatch import fnmatchcase

from megalith.check.case import Case, Found, error
from megalith.spec.numbers import is_narrow, packs
from megalith.spec.problem import near
from megalith.spec.sizes import is_packed, layer_of, multiplied, stays_wide


def patterns_match_layers(case: Case) -> Found:
    """Each pattern of `precision.wide` matches the name of a layer, because a misspelt one would leave its layer narrow."""
    names = layers(case) if case.spec.precision.wide and _has_narrow_layers(case) else []
    for pattern in case.spec.precision.wide if names else ():
        if any(fnmatchcase(name, pattern) for name in names):
            continue
        known = names if pattern.startswith("blocks.") else [f"*.{name.split('.', 2)[2]}" for name in names]
        reason = f"matches none of the {len(names)} layers of blocks"
        way_out = (
            f"A pattern must match a whole name, such as {near(pattern, known) or known[0]}; * matches any characters. "
            "Embedding, head, norms and routers always stay wide."
        )
        yield error("precision.wide", pattern, reason, way_out)


def a_layer_stays_narrow(case: Case) -> Found:
    """The settings that make layers wide leave at least one layer in the format that the run asks for."""
    choices, precision, count = case.spec.precision, case.spec.train.precision, len(case.model.blocks) if case.model else 0
    if not count or not _has_narrow_layers(case):
        return
    kept, how = packs(choices, precision), {"blocks": count, "choices": choices}
    purpose, otherwise = (
        ("to keep inputs in fp8", 'precision.kept = "wide"') if kept else (f"in {precision}", 'train.precision = "bf16"')
    )
    if choices.wide_first + choices.wide_last >= count:
        reason = f"together with wide_last = {choices.wide_last} leaves none of the {count} blocks {purpose}"
        way_out = f"Use wide_first + wide_last < {count}, or {otherwise}."
        yield error("precision.wide_first", choices.wide_first, reason, way_out)
    elif choices.wide and not any(is_packed(name, **how) if kept else not stays_wide(name, **how) for name in layers(case)):
        reason = f"leaves no layer {purpose} in the {count} blocks"
        yield error("precision.wide", list(choices.wide), reason, f"Use patterns that match fewer layers, or {otherwise}.")


def a_product_stays_narrow(case: Case) -> Found:
    """At least one of the three products of a layer (forward, gradient of inputs, gradient of weights) is narrow."""
    choices, precision, blocks = case.spec.precision, case.spec.train.precision, len(case.model.blocks) if case.model else 0
    if not is_narrow(precision) or choices.forward == "narrow" or choices.input_gradient == "narrow":
        return
    narrow = [name for name in layers(case) if not stays_wide(name, blocks=blocks, choices=choices)]
    of_weights = dict.fromkeys("expert_weight_gradient" if name.endswith(".experts") else "weight_gradient" for name in narrow)
    if not narrow or any(getattr(choices, key) == "narrow" for key in of_weights):
        return
    others = " and ".join(f'{key} = "wide"' for key in ("input_gradient", *of_weights))
    reason = f"together with {others} leaves no product in {precision}"
    yield error("precision.forward", choices.forward, reason, 'Use forward = "narrow", or train.precision = "bf16".')


def layers(case: Case) -> list[str]:
    """Return the names of the layers that multiply in the model's blocks, such as `blocks.3.mlp.up`."""
    if case.model is None:
        return []
    each = ((number, weight) for number, block in enumerate(case.model.blocks) for weight in multiplied(block, case.model.dim))
    return [*dict.fromkeys(f"blocks.{number}.{layer_of(weight)}" for number, weight in each)]


def _has_narrow_layers(case: Case) -> bool:
    """Return True if the run asks for layers with narrow products, or with inputs that are kept in 8 bits."""
    choices, precision = case.spec.precision, case.spec.train.precision
    return is_narrow(precision) or packs(choices, precision)
