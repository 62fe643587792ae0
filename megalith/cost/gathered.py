"""Bytes of the weights of a part that ZeRO gathers: two or four bytes a number, or one byte if layers are gathered in 8 bits. No torch."""

from math import prod
from typing import TYPE_CHECKING

from megalith.cost.parts import Numbers, Parts
from megalith.cost.profile import MultipliedWeight, Profile
from megalith.cost.workload import Narrow, Workload
from megalith.spec.numbers import SCALE_BYTES, whole_tiles

if TYPE_CHECKING:
    from megalith.cost.memory import RankParts

TILES = 2
"""Number of tiles of a table that are in memory at once: one is used while the next one is read."""


def gathered(workload: Workload, profile: Profile, block: int | None) -> Numbers:
    """Return the bytes of a part's weights in a gather, over all ranks. `block`: the part's number, if it is a block."""
    dense, expert = wide(workload, Numbers(profile.weights, profile.expert_weights))
    if (packed := _packed(workload)) is not None and block is not None:
        for weight in _narrow(workload, packed, profile, block):
            spared = workload.width * prod(weight.shape) - packed_bytes(weight.shape, packed.tile)
            dense, expert = (dense, expert - spared) if weight.expert else (dense - spared, expert)
    return Numbers(dense, expert)


def wide(workload: Workload, weights: Numbers) -> Numbers:
    """Return the bytes of weights in the compute format."""
    return Numbers(workload.width * weights.dense, workload.width * weights.expert)


def ends(workload: Workload, traced: Parts, here: "RankParts", *, tiles: int = 0) -> tuple[float, float]:
    """Return the numbers of weights of the embedding and of the head that are in memory at once, if these parts are on this rank. `tiles`:
    the number of tiles in memory, if tables are read in tiles."""
    less = workload.cut - tiles * workload.tile_numbers
    return traced.embedding.weights - less if here.embedding else 0.0, sum(traced.output) - less if here.head else 0.0


def widths(workload: Workload, traced: Parts) -> Numbers:
    """Return the mean bytes of a gathered number, over the whole model."""
    if _packed(workload) is None:
        return Numbers(workload.width, workload.width)
    ends = (wide(workload, Numbers(traced.embedding.weights, 0)), wide(workload, traced.output))
    bytes = (*ends, *(gathered(workload, block, number) for number, block in enumerate(traced.blocks)))
    numbers = (part for part in (traced.embedding, *traced.blocks))
    held = (traced.output, *(Numbers(part.weights, part.expert_weights) for part in numbers))
    mean = (sum(sent) / max(1.0, sum(all)) for sent, all in zip(zip(*bytes, strict=True), zip(*held, strict=True), strict=True))
    return Numbers(*mean)


def kept(workload: Workload, profile: Profile, block: int) -> float:
    """Return the bytes of a rank's rounded shards of a block that ZeRO 3 keeps until the end of the step, for all gathers. If weights are
    offloaded, no rounded shards are kept."""
    if (packed := _packed(workload)) is None or workload.plan.zero < 3 or workload.plan.state.weights_away:
        return 0.0
    experts = {weight.expert for weight in _narrow(workload, packed, profile, block)}
    by_kind = zip((False, True), gathered(workload, profile, block), workload.shards, strict=True)
    return sum(size / shards for kind, size, shards in by_kind if kind in experts)


def _packed(workload: Workload) -> Narrow | None:
    """Return the narrow precision if weights of narrow layers are gathered in 8 bits; otherwise None."""
    return workload.narrow if workload.narrow is not None and workload.narrow.choices.gather != "wide" else None


def _narrow(workload: Workload, packed: Narrow, profile: Profile, block: int) -> list[MultipliedWeight]:
    """Return the block's weights that are gathered in 8 bits."""
    return [
        weight
        for weight in profile.multiplied
        if (shards := workload.shards[weight.expert]) > 1
        and weight.layer in workload.narrow_layers[block]
        and whole_tiles(weight.shape[weight.cut], shards, packed.tile)
    ]


def packed_bytes(shape: tuple[int, ...], tile: int) -> int:
    """Return the bytes of 8-bit codes and of their tiles' scales."""
    *matrices, rows, columns = shape
    return prod(shape) + SCALE_BYTES * prod(matrices) * -(-rows // tile) * -(-columns // tile)
