"""Channels that a plan splits among ranks, and tiles that lie across two ranks."""

from collections.abc import Callable, Iterable, Iterator
from math import gcd
from typing import NamedTuple

from megalith.check.case import Case, Found, error, next_multiple
from megalith.spec.model import AttentionSpec, BlockSpec, LatentAttentionSpec, MlpSpec, MoeSpec
from megalith.spec.sizes import own_tensors
from megalith.spec.toml import literal

Cuts = Iterator[tuple[tuple[str, ...], int, int]]


class Cut(NamedTuple):
    """Channels of a block that one axis of the plan splits."""

    axis: str
    layers: tuple[str, ...]
    """The layers, within a block, that have these channels as inputs or outputs."""
    channels: int
    share: int
    """The number of channels that one rank multiplies."""


def cuts_of(block: BlockSpec, case: Case) -> Iterator[Cut]:
    """The channels of a block that the plan splits."""
    tensor, experts = case.plan.tensor, case.plan.expert_tensor
    if tensor > 1:
        own = own_tensors(block, case.model.dim) if case.model else {}
        cuts = [] if "attention" in own else list(_mixer(block, tensor))
        cuts += [] if "mlp" in own else list(_mlp(block, tensor))
        for half, tensors in own.items():
            sizes = [
                (f"{half}.{each.name.removesuffix('.weight')}", each.shape[each.cut == "inputs"]) for each in tensors if each.cut
            ]
            cuts += [((layer,), size, size // tensor) for layer, size in sizes]
        for layers, channels, share in cuts:
            yield Cut("tensor", layers, channels, share)
    if experts > 1 and isinstance(block.mlp, MoeSpec):
        yield Cut("expert_tensor", ("mlp.experts",), block.mlp.hidden, block.mlp.hidden // experts)


def _mixer(block: BlockSpec, tensor: int) -> Cuts:
    match block.attention:
        case AttentionSpec(heads=heads, kv_heads=kv_heads, head_dim=width):
            yield ("attention.q", "attention.out"), heads * width, heads * width // tensor
            yield ("attention.k", "attention.v"), kv_heads * width, max(1, kv_heads // tensor) * width
        case LatentAttentionSpec() as latent:
            heads, query = latent.heads, latent.nope_dim + latent.rope_dim
            both = heads * (latent.nope_dim + latent.v_dim)
            yield ("attention.q", "attention.q_up"), heads * query, heads * query // tensor
            yield ("attention.kv_up",), both, both // tensor
            yield ("attention.out",), heads * latent.v_dim, heads * latent.v_dim // tensor
        case None:
            pass
    if block.mamba:
        inner, state = block.mamba.heads * block.mamba.head_dim, block.mamba.groups * block.mamba.state
        yield ("mamba.gate", "mamba.x", "mamba.out"), inner, inner // tensor
        yield ("mamba.b", "mamba.c"), state, state // tensor


def _mlp(block: BlockSpec, tensor: int) -> Cuts:
    if isinstance(block.mlp, MlpSpec):
        yield ("mlp.gate", "mlp.up", "mlp.down"), block.mlp.hidden, block.mlp.hidden // tensor
    elif block.mlp and block.mlp.shared:
        yield ("mlp.shared.gate", "mlp.shared.up", "mlp.shared.down"), block.mlp.shared, block.mlp.shared // tensor


def _stay_wide(case: Case, layers: Iterable[str]) -> str:
    """Return the setting with which these layers have no tiles."""
    return f"precision.wide = {literal([*case.spec.precision.wide, *(f'*.{layer}' for layer in layers)])}"


def tiles_across_ranks(
    case: Case,
    tile: int,
    layers_of: Callable[[int, BlockSpec, Cut], Iterable[str]],
    *,
    channels: str,
    other_way: Callable[[Case, Iterable[str]], str] = _stay_wide,
) -> Found:
    """Yield an error for each kind of cut that leaves a rank a number of channels that is not a multiple of `tile` (0: no tiles).
    `layers_of` returns, for a block's number, the block and a cut, the names of the layers whose tiles this cut crosses. `channels`:
    description of the channels, with {} for a layer's name; `other_way`: the last of the remedies that the error suggests, for layers."""
    crossed = dict[Cut, dict[str, int]]()  # the layers of each cut, with the number of their first block
    for number, block in enumerate(case.model.blocks if case.model and tile else ()):
        for cut in (cut for cut in cuts_of(block, case) if cut.share % tile):
            for layer in layers_of(number, block, cut):
                crossed.setdefault(cut, {}).setdefault(layer, number)
    for cut, layers in crossed.items():
        ranks, common, (layer, number) = getattr(case.plan, cut.axis), gcd(cut.share, tile), next(iter(layers.items()))
        reason = (
            f"leaves a rank {cut.share} of the {cut.channels} channels {channels.format(f'blocks.{number}.{layer}')}, "
            f"not a multiple of a tile's {tile} channels: two ranks would share a scale"
        )
        # heads and other sizes that `ranks` divides are divided by its divisors too
        fits = max((n for n in range(2, ranks) if ranks % n == 0 and cut.channels % (n * tile) == 0), default=1)
        smaller = common > 1 and case.spec.precision.multiply != "codes"  # 8-bit products have tiles of one size
        tiles = f"precision.tile = {common}" if smaller else _larger(case, cut, layer, tile)
        yield error(f"plan.{cut.axis}", ranks, reason, f"Use {cut.axis} = {fits}, {tiles}, or {other_way(case, layers)}.")


def _larger(case: Case, cut: Cut, layer: str, tile: int) -> str:
    """Return the next size with which each rank has whole tiles of a cut's channels, as a setting of the model if it has one."""
    size = next_multiple(cut.share, tile) * (cut.channels // cut.share)
    keys = ("expert_ffn", "ffn") if layer == "mlp.experts" else ("shared_ffn",) if layer.startswith("mlp.shared.") else ("ffn",)
    named = (key for key in keys if layer.startswith("mlp.") and getattr(case.spec.model, key, None) == cut.channels)
    return next((f"model.{key} = {size}" for key in named), f"{size} channels instead of {cut.channels}")
