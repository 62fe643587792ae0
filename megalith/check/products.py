"""Rules about which layers and products are narrow, and about the formats of a layer's three products, which must work together."""

from fnmatch import fnmatchcase

from megalith.check.case import Case, Found, advice, error
from megalith.check.narrow import formats_of_weight_gradients, narrow_experts
from megalith.spec.numbers import PRECISIONS, PRODUCTS, PrecisionSpec, format_of, formats_of, is_narrow, packs, settled, tile_of
from megalith.spec.problem import near
from megalith.spec.sizes import is_packed, layer_of, multiplied, stays_wide
from megalith.spec.toml import literal


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
    if not is_narrow(precision) or choices.forward != "wide" or choices.input_gradient != "wide":
        return
    narrow = [name for name in layers(case) if not stays_wide(name, blocks=blocks, choices=choices)]
    of_weights = dict.fromkeys("expert_weight_gradient" if name.endswith(".experts") else "weight_gradient" for name in narrow)
    if not narrow or any(getattr(choices, key) != "wide" for key in of_weights):
        return
    others = " and ".join(f'{key} = "wide"' for key in ("input_gradient", *of_weights))
    reason = f"together with {others} leaves no product in {precision}"
    yield error("precision.forward", choices.forward, reason, 'Use forward = "narrow", or train.precision = "bf16".')


WHOLE = {
    "granularity": "tile",
    "history": 0,
    "multiply": "wide",
    "dispatch": "wide",
    "combine_gradients": "wide",
    "kept": "wide",
    "gather": "wide",
}
"""Keys of `[precision]` that describe a whole layer's numbers, with their values for a layer whose products have several formats."""


def formats_can_be_mixed(case: Case) -> Found:
    """If the products of a layer have several formats, each rounds its own factors in tiles, and nothing else rounds them."""
    choices, precision = case.spec.precision, case.spec.train.precision
    others = _mixed(choices, precision)
    for key, value in WHOLE.items() if others else ():
        if (asked := getattr(choices, key)) == value:
            continue
        product, other = next(iter(others.items()))
        narrow = " and ".join(f'{each} = "narrow"' for each in others)
        reason = f'does not work with precision.{product} = "{other}" in {precision}: it needs all products in one format'
        yield error(f"precision.{key}", asked, reason, f"Use {key} = {literal(value)}, or {narrow}.")


def experts_gradients_follow_the_plan(case: Case) -> Found:
    """The plan decides which tokens of an expert share a scale, so narrow weight gradients of experts differ between plans."""
    choices, precision, key = case.spec.precision, case.spec.train.precision, "precision.expert_weight_gradient"
    asked = choices.expert_weight_gradient
    if asked == "wide" or not is_narrow(precision):
        return
    if case.model is not None and not narrow_experts(case):
        yield advice(key, asked, f"changes nothing: no experts multiply in {precision}", "Leave it out.")
        return
    reason = "lets the plan decide which tokens of an expert share a scale, so that another plan gives other bits"
    yield advice(key, asked, reason, 'Use expert_weight_gradient = "wide" if results must not depend on the plan.')


def rotations_fit(case: Case) -> Found:
    """A Hadamard transform applies to tiles of tokens, and the number of tokens in a tile is a power of two."""
    choices = case.spec.precision
    rotated = [each for each in formats_of_weight_gradients(case) if settled(choices, each).hadamard]
    if rotated and choices.granularity != "tile":
        reason = f'does not work with precision.granularity = "{choices.granularity}": the transform needs tiles of tokens'
        yield error("precision.hadamard", True, reason, 'Use granularity = "tile", or hadamard = false.')
    for tile in {tile_of(choices, each) for each in rotated} if choices.granularity == "tile" else ():
        if tile & (tile - 1):
            reason = "is not a power of two, but precision.hadamard needs a power of two"
            yield error("precision.tile", tile, reason, f"Use tile = {1 << (tile.bit_length() - 1)}, or hadamard = false.")


def scales_are_the_formats(case: Case) -> Found:
    """The blocks of MXFP8 and MXFP4 have powers of two as scales (OCP Microscaling Formats 1.0, section 5.3.4)."""
    choices, precision = case.spec.precision, case.spec.train.precision
    powers = [each for each in formats_of(choices, precision) if PRECISIONS[each].factors.name in ("mxfp8", "mxfp4")]
    if choices.scale == "fp32" and powers:
        asked = f"train.precision = {precision!r}" if precision in powers else f"products in {powers[0]}"
        reason = f"does not work with {asked}, whose scales are powers of two"
        yield error("precision.scale", choices.scale, reason, 'Use scale = "up", or train.precision = "fp8".')


def _mixed(choices: PrecisionSpec, precision: str) -> dict[str, str]:
    """Return the products in another narrow format than that of `precision`, each with the precision that has this format."""
    each = {product: format_of(product, choices, precision) for product in PRODUCTS}
    return {product: other for product, other in each.items() if other not in ("", precision)}


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
