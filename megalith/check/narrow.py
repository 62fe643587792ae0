"""Rules about narrow precisions: results do not depend on the plan, and the settings fit together and have an effect."""

from collections.abc import Iterable, Iterator
from itertools import pairwise
from math import gcd, lcm

from megalith.check.case import Case, Found, advice, error, next_multiple
from megalith.check.cuts import Cut, cuts_of, tiles_across_ranks
from megalith.mesh import Mesh
from megalith.spec.lengths import DECAYING
from megalith.spec.model import BlockSpec, ModelSpec, MoeSpec
from megalith.spec.numbers import (
    FAST,
    PRECISIONS,
    PRODUCTS,
    RECIPE,
    PrecisionSpec,
    formats_of,
    in_codes,
    is_narrow,
    multiplies_codes,
    packs,
    settled,
    tile_of,
    whole_tiles,
)
from megalith.spec.phases import Phases
from megalith.spec.sizes import Parameter, layer_of, multiplied, own_tensors, stays_wide
from megalith.spec.toml import literal


def tiles_lie_inside_shards(case: Case) -> Found:
    """Tiles lie inside one rank's share: only then is the share rounded to the same numbers as in the whole tensor."""
    choices, blocks = case.spec.precision, len(case.model.blocks) if case.model else 0

    def layers_of(number: int, block: BlockSpec, cut: Cut) -> Iterator[str]:
        return (each for each in cut.layers if not stays_wide(f"blocks.{number}.{each}", blocks=blocks, choices=choices))

    tile = _common_tile(choices, case.spec.train.precision, ("forward", "input_gradient"))
    if choices.kept != "wide" or choices.combine_gradients != "wide":  # in tiles, even if no product needs them
        tile = lcm(tile or 1, tile_of(choices, case.spec.train.precision) or 1)
    yield from tiles_across_ranks(case, tile, layers_of, channels="of {}")


def _common_tile(choices: PrecisionSpec, precision: str, products: Iterable[str]) -> int:
    """Return the number of channels or tokens that all tiles of these products divide; 0 if the products have no tiles."""
    tiles = [tile_of(choices, each) for each in formats_of(choices, precision, products)]
    return lcm(*tiles) if any(tiles) else 0


def tiles_lie_inside_sequences(case: Case) -> Found:
    """Weight gradients are summed over tiles of tokens. A tile lies inside one context rank's part of one sequence."""
    train, plan = case.spec.train, case.plan
    tile = _common_tile(case.spec.precision, train.precision, ("weight_gradient",))
    if not tile:
        return
    unit = tile * (2 * plan.context if plan.context > 1 else 1)
    if train.seq_len % unit:
        parts = f" x 2 x context {plan.context} = {unit}" if plan.context > 1 else ""
        reason = f"is not a multiple of a tile's {tile} tokens{parts}: the tokens that share a scale would depend on the plan"
        way_out = f'Use seq_len = {next_multiple(train.seq_len, unit)}, say, or precision.weight_gradient = "wide".'
        yield error("train.seq_len", train.seq_len, reason, way_out)


def maxima_can_be_shared(case: Case) -> Found:
    """The scale of a row or a tensor is set by the largest number on all ranks that hold a part of the row or tensor."""
    choices, precision, plan = case.spec.precision, case.spec.train.precision, case.plan
    if not is_narrow(precision):
        return
    whole = "nvfp4" in formats_of(choices, precision)
    if choices.granularity == "tile" and not whole:
        return
    if PRECISIONS[precision].products not in RECIPE.values() and choices.granularity != "tile":
        reason = f"does not work with train.precision = {precision!r}: the format fixes the blocks that share a scale"
        yield error("precision.granularity", choices.granularity, reason, 'Remove this key, or use train.precision = "fp8".')
    own = f'train.precision = "{precision}"' if precision == "nvfp4" else "products in nvfp4"
    asked = own if whole else f'precision.granularity = "{choices.granularity}"'
    if plan.overlap_tensor > 1 and (whole or choices.granularity == "tensor"):
        reason = f"does not work with {asked}: each piece of a message would have a scale of its own"
        yield error(
            "plan.overlap_tensor", plan.overlap_tensor, reason, f"Use overlap_tensor = 1, or {_other(precision, whole=whole)}."
        )
    if plan.expert_tensor > 1 and (experts := narrow_experts(case)):
        share = "tensor" if whole else choices.granularity
        reason = (
            f"cuts {experts}, whose weights have a scale for each {share}, but ranks that split an expert cannot share a scale"
        )
        other = _other(precision, whole=whole) if whole else 'precision.granularity = "tile"'
        yield error("plan.expert_tensor", plan.expert_tensor, reason, f"Use expert_tensor = 1, {other}, or {_NO_EXPERTS}.")


_NO_EXPERTS = 'precision.wide = ["*.experts"]'


def _other(precision: str, *, whole: bool) -> str:
    """Return the settings to use instead, whose scales do not span ranks, as text. `whole`: products in nvfp4 are in the way."""
    if precision == "nvfp4":
        return 'train.precision = "mxfp4" with precision.rounding = "nearest"'
    return "products in another format" if whole else 'granularity = "row" or "tile"'


def narrow_experts(case: Case) -> str:
    """Return the name of the first experts that multiply in the narrow format; empty if there are none."""
    mixtures = (f"blocks.{n}.mlp.experts" for n, block in enumerate(case.model.blocks if case.model else ()) if _mixes(block))
    blocks = len(case.model.blocks) if case.model else 0
    return next((name for name in mixtures if not stays_wide(name, blocks=blocks, choices=case.spec.precision)), "")


def _mixes(block: BlockSpec) -> bool:
    return isinstance(block.mlp, MoeSpec)


def draws_know_their_numbers(case: Case) -> Found:
    """Stochastic rounding depends on the position of each number in the whole tensor, and on its token."""
    plan, choices, gradients = case.plan, case.spec.precision, PRODUCTS[1:]
    formats = formats_of(choices, case.spec.train.precision, gradients)
    if not any(settled(choices, each).rounding == "stochastic" for each in formats):
        return
    nearest = 'precision.rounding = "nearest"'
    if plan.overlap_tensor > 1:
        reason = "does not work with stochastic rounding of gradients: the positions of the tokens in a piece are not known"
        yield error("plan.overlap_tensor", plan.overlap_tensor, reason, f"Use overlap_tensor = 1, or {nearest}.")
    if plan.expert_tensor > 1 and (cut := narrow_experts(case)):
        reason = (
            f"cuts {cut}, whose gradients are rounded stochastically, but a rank with a share of an expert does not know the "
            "positions of its outputs"
        )
        yield error("plan.expert_tensor", plan.expert_tensor, reason, f"Use expert_tensor = 1, {nearest}, or {_NO_EXPERTS}.")


def histories_follow_tensors(case: Case) -> Found:
    """Delayed scaling applies to whole tensors, and every rank that holds a layer has the same history."""
    choices, precision = case.spec.precision, case.spec.train.precision
    if not choices.history or not is_narrow(precision):
        return
    if choices.granularity != "tensor":
        free = PRECISIONS[precision].products in RECIPE.values()  # the format does not fix which numbers share a scale
        setting = f'precision.granularity = "{choices.granularity}"' if free else f'train.precision = "{precision}"'
        reason = f"does not work with {setting}: only scales of whole tensors can be computed from earlier steps"
        tensor = 'granularity = "tensor"' if free else 'train.precision = "fp8" with granularity = "tensor"'
        yield error("precision.history", choices.history, reason, f"Use {tensor}, or history = 0.")
    if case.spec.sites is not None:
        reason = "does not work with sites: each site would have scales of its own"
        yield error("precision.history", choices.history, reason, "Use history = 0.")
    for before, phase in pairwise(Phases.of(case.spec).all):
        was, now = (each.global_batch * each.seq_len for each in (before, phase))
        if was != now:
            late = f"{choices.history} steps" if now > was else "one step"
            reason = (
                f"sets gradient scales from earlier steps, but at sample {phase.first:,} a step changes from {was:,} to {now:,} tokens: "
                f"gradients become {was / now:.3g} times as large, and their scales adapt {late} later"
            )
            yield advice(
                "precision.history", choices.history, reason, "Use history = 0, or the same number of tokens in every step."
            )
            return


def blocks_become_wide(case: Case) -> Found:
    """`precision.auto` needs comparisons of gradients, and makes the same blocks wide on all ranks, so it does not work with sites."""
    choices = case.spec.precision
    if not choices.auto or not is_narrow(case.spec.train.precision):
        return
    if not choices.watch_every:
        reason = "has no effect with precision.watch_every = 0: gradients are never compared, so no block becomes wide"
        yield error("precision.auto", choices.auto, reason, "Use watch_every = 100, for example, or auto = 0.")
    if case.spec.sites is not None:
        reason = "does not work with sites: each site would make different blocks wide"
        yield error("precision.auto", choices.auto, reason, "Use auto = 0.")


def dispatch_has_the_experts_numbers(case: Case) -> Found:
    """Tokens are sent in the format to which experts round them, with scales for which bf16 represents the rounded values exactly."""
    choices, precision = case.spec.precision, case.spec.train.precision
    if choices.dispatch == "wide" or not is_narrow(precision):
        return
    if precision != "fp8":
        reason = f'does not work with train.precision = "{precision}", whose experts round tokens to another format'
        yield error("precision.dispatch", choices.dispatch, reason, 'Use dispatch = "wide", or train.precision = "fp8".')
    elif choices.scale != "up":
        reason = (
            f'does not work with precision.scale = "{choices.scale}": only scale = "up" leaves the results of experts unchanged'
        )
        yield error("precision.dispatch", choices.dispatch, reason, 'Use scale = "up", or dispatch = "wide".')
    elif choices.forward == "wide":
        reason = 'does not work with precision.forward = "wide": experts then need unrounded tokens'
        yield error("precision.dispatch", choices.dispatch, reason, 'Use dispatch = "wide", or forward = "narrow".')
    elif case.model is not None and not narrow_experts(case):
        reason = "changes nothing: no experts multiply in fp8"
        yield advice("precision.dispatch", choices.dispatch, reason, "Leave it out.")


def gradients_of_results_are_sent(case: Case) -> Found:
    """Gradients of experts' results that are sent in 8 bits are rounded to nearest, before they are multiplied by routing weights."""
    choices, precision, key = case.spec.precision, case.spec.train.precision, "precision.combine_gradients"
    if choices.combine_gradients == "wide" or not is_narrow(precision):
        return
    wide = 'combine_gradients = "wide"'
    if precision != "fp8":
        reason = f'does not work with train.precision = "{precision}", whose gradients are rounded to another format'
        yield error(key, choices.combine_gradients, reason, f'Use {wide}, or train.precision = "fp8".')
        return
    if choices.scale != "up":
        reason = (
            f'does not work with precision.scale = "{choices.scale}": with any scale but "up", rounded gradients can saturate, '
            "or are not bf16 numbers"
        )
        yield error(key, choices.combine_gradients, reason, f'Use {wide}, or scale = "up".')
    if choices.rounding == "stochastic":
        reason = (
            'does not work with precision.rounding = "stochastic": gradients are rounded to nearest before they are sent, '
            "and rounding to nearest is biased"
        )
        yield error(key, choices.combine_gradients, reason, f'Use {wide}, or rounding = "nearest".')
    if case.plan.compile and case.plan.expert * case.plan.expert_tensor > 1:
        reason = (
            "does not work with plan.compile: compiled blocks multiply the gradients of experts' results by routing weights "
            "before sending them, and send them in the wide format"
        )
        yield error(key, choices.combine_gradients, reason, f"Use {wide}, or compile = false.")
    if case.model is not None and not narrow_experts(case):
        reason = "changes nothing: no experts multiply in fp8"
        yield advice(key, choices.combine_gradients, reason, "Leave it out.")


def kept_are_the_forwards_numbers(case: Case) -> Found:
    """Inputs are kept for backward as forward rounded them: to 8-bit numbers whose scales are powers of two."""
    choices, precision = case.spec.precision, case.spec.train.precision
    if choices.kept == "wide" or not is_narrow(precision):
        return
    if PRECISIONS[precision].factors.bits != 8:
        reason = f'does not work with train.precision = "{precision}", whose products do not round to 8 bits'
        yield error("precision.kept", choices.kept, reason, 'Use kept = "wide", or train.precision = "fp8".')
    if choices.scale == "fp32":
        reason = 'does not work with precision.scale = "fp32": rounded inputs are not bf16 numbers, so keeping them would round them again'
        yield error("precision.kept", choices.kept, reason, 'Use kept = "wide", or scale = "up".')
    if case.plan.overlap_tensor > 1:
        reason = (
            f"does not work with plan.overlap_tensor = {case.plan.overlap_tensor}: inputs that are sent in pieces are kept wide"
        )
        yield error("precision.kept", choices.kept, reason, 'Use kept = "wide", or overlap_tensor = 1.')


def gathers_have_the_products_numbers(case: Case) -> Found:
    """Weight shards are gathered in 8 bits only if all products round the whole weight to the same numbers."""
    choices, precision, plan = case.spec.precision, case.spec.train.precision, case.plan
    if choices.gather == "wide" or not is_narrow(precision):
        return
    wide = 'gather = "wide"'
    if precision != "fp8":
        reason = f'does not work with train.precision = "{precision}": only in fp8 do all products round a weight to the same 8-bit numbers'
        yield error("precision.gather", choices.gather, reason, f'Use {wide}, or train.precision = "fp8".')
        return
    if choices.granularity != "tile":
        reason = f'does not work with precision.granularity = "{choices.granularity}": several shards would share a scale'
        yield error("precision.gather", choices.gather, reason, f'Use {wide}, or granularity = "tile".')
    for key, products in (("forward", "its products"), ("input_gradient", "input gradients")):
        if getattr(choices, key) == "wide":
            reason = f'does not work with precision.{key} = "wide": {products} then need unrounded weights'
            yield error("precision.gather", choices.gather, reason, f'Use {wide}, or {key} = "narrow".')
    mesh = Mesh.of(plan)
    experts = case.model is not None and any(isinstance(block.mlp, MoeSpec) for block in case.model.blocks)
    shards = max(mesh.state[2], mesh.experts[2] if experts else 1)
    if plan.zero == 0 or shards == 1:
        reason = f"changes nothing with plan.zero = {plan.zero} and {shards} shards: no weights are gathered"
        yield advice("precision.gather", choices.gather, reason, "Leave it out.")
    elif choices.granularity == "tile":
        yield from _cut_by_shards(case, case.model) if case.model is not None else ()


def _cut_by_shards(case: Case, model: ModelSpec) -> Found:
    """Yield advice about layers whose shards would cut a tile, so that they are gathered in the wide format."""
    tile, plan = tile_of(case.spec.precision, "fp8"), case.plan
    blocks, seen, mesh = len(model.blocks), set[tuple[str, int]](), Mesh.of(plan)
    for number, block in enumerate(model.blocks):
        for weight in multiplied(block, model.dim):
            layer = layer_of(weight)
            if stays_wide(f"blocks.{number}.{layer}", blocks=blocks, choices=case.spec.precision):
                continue
            shards = max(1, (mesh.experts if weight.role == "experts" else mesh.state)[2])
            length = model.dim if weight.role == "experts" else _held(layer, weight.shape[0], block, case)
            if whole_tiles(length, shards, tile) or (layer, length) in seen:
                continue
            seen.add((layer, length))
            reason = (
                f"leaves each of {shards} shards {-(-length // shards)} of the {length} rows of blocks.{number}.{layer}, "
                f"not a multiple of a tile's {tile}, so the layer is gathered in bf16"
            )
            fewer = next((n for n in range(shards - 1, 1, -1) if length % (n * tile) == 0), 0)
            smaller = gcd(-(-length // shards), tile)
            ways = [f"{fewer} shards (plan.replicate)"] * (fewer > 0)
            ways += [f"precision.tile = {smaller}"] * (smaller > 1 and case.spec.precision.multiply != "codes")
            larger = f"{next_multiple(length, shards * tile)} rows instead of {length}"
            yield advice("precision.gather", "fp8", reason, f"Use {' or '.join(ways) or larger} to gather the layer in 8 bits.")


def _held(layer: str, rows: int, block: BlockSpec, case: Case) -> int:
    """Return the number of rows of a layer's weight on a tensor rank."""
    own = own_tensors(block, case.model.dim) if case.model else {}
    declared = {f"{half}.{each.name.removesuffix('.weight')}": each.cut for half, tensors in own.items() for each in tensors}
    if declared[layer] == "inputs" if layer in declared else layer.endswith((".out", ".down")):
        return rows
    shares = (cut.share for cut in cuts_of(block, case) if cut.axis == "tensor" and layer in cut.layers)
    # ranks that share a head have its whole weight
    return next((share for share in shares if share * case.plan.tensor == rows), rows)


def something_is_narrow(case: Case) -> Found:
    """Each setting of `[precision]` has an effect."""
    choices, precision = case.spec.precision, case.spec.train.precision
    if packs(choices, precision):
        return
    if not is_narrow(precision):
        able = " or ".join(f'"{name}"' for name, row in PRECISIONS.items() if row.tile)
        for key in choices.model_dump(exclude_defaults=True):
            if key == "tile" and case.plan.rounding:
                continue  # it is that of parts kept in 8 bits
            reason = f'changes nothing with train.precision = "{precision}", which has no narrow products'
            yield advice(f"precision.{key}", getattr(choices, key), reason, f"Remove this key, or use train.precision = {able}.")
        return
    for key, cause in _idle(case):
        yield advice(f"precision.{key}", getattr(choices, key), f"changes nothing with {cause}", "Leave it out.")
    branch = case.spec.branch
    if choices.wide_decay and case.spec.optimizer.schedule not in DECAYING and not (branch and branch.decay):
        reason = f'changes nothing with optimizer.schedule = "{case.spec.optimizer.schedule}", which has no decay phase'
        yield advice(
            "precision.wide_decay", True, reason, f"Remove this key, or use schedule = {' or '.join(map(repr, DECAYING))}."
        )
    if choices.tile and choices.granularity != "tile":
        reason = f'changes nothing with precision.granularity = "{choices.granularity}"'
        yield advice("precision.tile", choices.tile, reason, "Remove precision.tile or precision.granularity.")


def _idle(case: Case) -> Iterator[tuple[str, str]]:
    """Yield the keys that have no effect in a narrow format, each with the other setting that is the cause."""
    precision, choices = case.spec.train.precision, case.spec.precision
    factors, asked = PRECISIONS[precision].factors, choices.model_dump(exclude_defaults=True)
    formats = formats_of(choices, precision)
    if "gradients" in asked and not any(PRECISIONS[each].factors.bits == 8 for each in formats):
        yield "gradients", f'train.precision = "{precision}"'
    if "scale" in asked and formats == ("nvfp4",):
        yield "scale", f'train.precision = "{precision}"'
    if not formats_of_weight_gradients(case):
        if "hadamard" in asked:
            yield "hadamard", 'precision.weight_gradient = "wide": only factors of weight gradients are transformed'
        if choices.input_gradient == "wide":
            idle = ["rounding", *["gradients"] * (factors.bits == 8 and choices.combine_gradients == "wide")]
            for key in (each for each in idle if each in asked):
                yield key, 'precision.input_gradient = "wide" and weight_gradient = "wide": no product rounds a gradient'


def formats_of_weight_gradients(case: Case) -> tuple[str, ...]:
    """Return the narrow precisions in whose formats weight gradients of dense layers, or of experts, are computed."""
    experts = case.model is None or bool(narrow_experts(case))
    products = ("weight_gradient", *["expert_weight_gradient"] * experts)
    return formats_of(case.spec.precision, case.spec.train.precision, products)


def narrow_is_emulated(case: Case) -> Found:
    """The trainer emulates narrow formats, unless a GPU multiplies their codes (`precision.multiply = "codes"`)."""
    precision, asked = case.spec.train.precision, case.spec.precision.multiply == "codes"
    if precision in FAST:
        return
    if not asked:
        reason = (
            "is emulated: results are exactly those of the format, but numbers are rounded to the format first, and then "
            "multiplied in bf16 or fp32, which is slower than bf16 alone"
        )
        yield advice("train.precision", precision, reason, "Use the format to see its effect on the model, and bf16 for speed.")
    if case.plan.compile and not asked:
        reason = (
            f'does not work with train.precision = "{precision}": a compiler may leave out the roundings that emulate the format'
        )
        yield error("plan.compile", True, reason, 'Use compile = false, or train.precision = "bf16".')


def codes_can_be_multiplied(case: Case) -> Found:
    """Only some devices have 8-bit products, and each supports only some kinds of scales."""
    precision, choices = case.spec.train.precision, case.spec.precision
    if choices.multiply != "codes" or not is_narrow(precision):
        return
    device = case.cluster.accelerator if case.cluster is not None else None
    if not in_codes(choices, precision, device.compute_capability if device is not None else None):
        asked = choices.model_dump(include={"granularity", "tile", "rounding", "hadamard"}, exclude_defaults=True)
        scales = ", ".join(f"precision.{key} = {literal(value)}" for key, value in asked.items())
        products = f'matrix products in 8 bits for train.precision = "{precision}" with {scales or "scales of tiles"}'
        reason = (
            f"is not possible: {device.name} has no {products}"
            if device is not None
            else f"is not possible: no cluster is set, and not every device has {products}"
        )
        way_out = "" if device is not None else 'Set cluster to the name of the GPU, such as cluster = "h100". '
        way_out += (
            'Use fp8 without precision.tile, hadamard or stochastic rounding on an H100 or H200, or multiply = "wide"; '
            'newer GPUs need granularity = "row" or "tensor", GPUs of compute capability 8.9 need "tensor".'
        )
        yield error("precision.multiply", "codes", reason, way_out)
    if choices.kept != "wide":
        reason = (
            'does not work with precision.multiply = "codes": kept inputs are a by-product of rounding in bf16, which it skips'
        )
        yield error("precision.kept", choices.kept, reason, 'Use kept = "wide", or multiply = "wide".')
    if case.plan.compile and _follows_others(case):
        reason = (
            'does not work with precision.multiply = "codes" if scales depend on numbers of other ranks or steps, which a '
            "compiler cannot see"
        )
        tiles = device is not None and multiplies_codes("tile", device.compute_capability)
        tiles_too = ', or precision.granularity = "tile" with history = 0' * tiles
        yield error("plan.compile", True, reason, f"Use compile = false{tiles_too}.")


def _follows_others(case: Case) -> bool:
    """Return True if a scale depends on numbers that are not in this rank's product."""
    choices, plan = case.spec.precision, case.plan
    return choices.history > 0 or (choices.granularity != "tile" and plan.tensor * plan.context > 1)


def on_a_rank(weight: Parameter, block: BlockSpec, case: Case) -> tuple[int, ...]:
    """Return the shape of a block's weight as one rank multiplies it: [outputs, inputs], or [experts, outputs, inputs]."""
    layer, (*experts, outputs, inputs), plan = layer_of(weight), weight.shape, case.plan
    own = own_tensors(block, case.model.dim) if case.model else {}
    declared = {f"{half}.{each.name.removesuffix('.weight')}": each.cut for half, tensors in own.items() for each in tensors}
    of_inputs = (
        declared[layer] == "inputs" if layer in declared else weight.name.endswith((".out.weight", ".down.weight", ".down"))
    )
    if experts:
        share = (inputs if of_inputs else outputs) // plan.expert_tensor
    else:
        split = (cut.share for cut in cuts_of(block, case) if cut.axis == "tensor" and layer in cut.layers)
        share = next(split, inputs if of_inputs else outputs)
    return *(count // plan.expert for count in experts), *((outputs, share) if of_inputs else (share, inputs))
