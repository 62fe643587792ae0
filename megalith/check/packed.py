"""Rules about bf16 products that keep their inputs for backward in 8 bits."""

from collections.abc import Collection, Iterator

from megalith.check.case import Case, Found, advice, error
from megalith.check.cuts import Cut, tiles_across_ranks
from megalith.spec.model import BlockSpec
from megalith.spec.numbers import packed_tile, packs
from megalith.spec.sizes import is_packed, own_tensors

CHOICES = ("kept", "tile", "wide", "wide_first", "wide_last")
"""Keys of `[precision]` that have an effect in bf16."""

INPUTS = (".out", ".down", ".experts")
"""Ends of the names of layers whose inputs are split among ranks; in all other split layers, the outputs are."""


def packed_tiles_lie_inside_shards(case: Case) -> Found:
    """Tiles lie inside one rank's channels: only then does a rank keep the same numbers as a single process."""
    choices, blocks = case.spec.precision, len(case.model.blocks) if case.model else 0

    def layers_of(number: int, block: BlockSpec, cut: Cut) -> Iterator[str]:
        layers = (each for each in cut.layers if is_packed(f"blocks.{number}.{each}", blocks=blocks, choices=choices))
        return (each for each in layers if each.endswith(INPUTS) or each in _own_inputs(block, case))

    tile = packed_tile(choices, case.spec.train.precision)
    yield from tiles_across_ranks(case, tile, layers_of, channels="that {} keeps in fp8")


def _own_inputs(block: BlockSpec, case: Case) -> Collection[str]:
    """Return the layers of a user's own attention or MLP whose inputs are split."""
    halves = own_tensors(block, case.model.dim) if case.model else {}
    return {
        f"{half}.{each.name.removesuffix('.weight')}"
        for half, tensors in halves.items()
        for each in tensors
        if each.cut == "inputs"
    }


def inputs_can_be_packed(case: Case) -> Found:
    """Inputs are kept in 8 bits only if the trainer, not compiled code, decides which tensors are kept."""
    choices, plan, key = case.spec.precision, case.plan, "precision.kept"
    if not packs(choices, case.spec.train.precision):
        return
    if plan.overlap_tensor > 1:
        reason = f"does not work with plan.overlap_tensor = {plan.overlap_tensor}: inputs that are sent in pieces are kept wide"
        yield error(key, choices.kept, reason, 'Use kept = "wide", or overlap_tensor = 1.')
    if plan.compile:
        yield error(
            key,
            choices.kept,
            "does not work with plan.compile = true: compiled code decides what is kept",
            'Use kept = "wide", or compile = false.',
        )
    for other in (name for name in choices.model_dump(exclude_defaults=True) if name not in CHOICES):
        reason = 'changes nothing with train.precision = "bf16", which has no narrow products'
        yield advice(f"precision.{other}", getattr(choices, other), reason, "Leave it out.")
