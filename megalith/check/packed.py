"""Rules about wide products that keep their inputs for backward in 8 bits."""

from collections.abc import Collection
from math import gcd

from megalith.check.case import Case, Found, advice, error
from megalith.check.narrow import cuts_of
from megalith.spec.model import BlockSpec
from megalith.spec.numbers import is_packed, packed_tile, packs
from megalith.spec.sizes import own_tensors

CHOICES = ("kept", "tile", "wide", "wide_first", "wide_last")
"""Choices of `[precision]` that have an effect in bf16."""

INPUTS = (".out", ".down", ".experts")
"""Ends of the names of layers whose inputs are split among ranks; the split channels of all others are outputs."""


def packed_tiles_lie_inside_shards(case: Case) -> Found:
    """A rank keeps the numbers that one process keeps only if no tile lies across the border of two ranks' channels."""
    choices, tile = case.spec.precision, packed_tile(case.spec.precision, case.spec.train.precision)
    if not tile or case.model is None:
        return
    blocks, seen = len(case.model.blocks), set[object]()
    for number, block in enumerate(case.model.blocks):
        for cut in cuts_of(block, case):
            kept = [layer for layer in cut.layers if is_packed(f"blocks.{number}.{layer}", blocks=blocks, choices=choices)]
            layers = [layer for layer in kept if layer.endswith(INPUTS) or layer in _own_inputs(block, case)]
            if not layers or cut.share % tile == 0 or cut in seen:
                continue
            seen.add(cut)
            ranks = getattr(case.plan, cut.axis)
            reason = (
                f"leaves a rank {cut.share} of the {cut.channels} channels that blocks.{number}.{layers[-1]} keeps in fp8, no multiple "
                f"of a tile's {tile}: a scale would lie across two ranks"
            )
            fits = [n for n in range(1, ranks) if cut.channels % (n * tile) == 0]
            common = gcd(cut.share, tile)
            tiles = f"precision.tile = {common}" if common > 1 else "other sizes"
            way_out = f'Use {cut.axis} = {fits[-1] if fits else 1}, {tiles}, or precision.wide = ["*.{layers[-1]}"].'
            yield error(f"plan.{cut.axis}", ranks, reason, way_out)


def _own_inputs(block: BlockSpec, case: Case) -> Collection[str]:
    """Return the layers of a block's own halves whose inputs are split."""
    halves = own_tensors(block, case.model.dim) if case.model else {}
    return {
        f"{half}.{each.name.removesuffix('.weight')}"
        for half, tensors in halves.items()
        for each in tensors
        if each.cut == "inputs"
    }


def inputs_can_be_packed(case: Case) -> Found:
    """The trainer itself decides what is kept, and some blocks keep it in 8 bits."""
    choices, plan, key = case.spec.precision, case.plan, "precision.kept"
    if not packs(choices, case.spec.train.precision):
        return
    if plan.overlap_tensor > 1:
        reason = f"with plan.overlap_tensor = {plan.overlap_tensor}: inputs that are sent in pieces are kept wide"
        yield error(key, choices.kept, reason, 'Use kept = "wide", or overlap_tensor = 1.')
    if plan.compile:
        yield error(
            key,
            choices.kept,
            "with plan.compile = true: compiled code decides what is kept",
            'Use kept = "wide", or compile = false.',
        )
    for other in (name for name in choices.model_dump(exclude_defaults=True) if name not in CHOICES):
        reason = 'changes nothing with train.precision = "bf16", which has no narrow products'
        yield advice(f"precision.{other}", getattr(choices, other), reason, "Leave it out.")
    if case.model is not None and choices.wide_first + choices.wide_last >= len(case.model.blocks):
        blocks = len(case.model.blocks)
        reason = f"with wide_last = {choices.wide_last} leaves none of the {blocks} blocks to keep inputs in fp8"
        way_out = f'Use wide_first + wide_last < {blocks}, or precision.kept = "wide".'
        yield error("precision.wide_first", choices.wide_first, reason, way_out)
