"""Rules about the tensors that blocks keep for their backward, and the actions for parts of blocks."""

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from megalith.check.case import Case, Found, advice, error, format_bytes
from megalith.check.cuts import Cut, tiles_across_ranks
from megalith.check.packed import INPUTS
from megalith.schedule.table import kind
from megalith.spec.model import AttentionSpec, BlockSpec, LatentAttentionSpec, MlpSpec, MoeSpec
from megalith.spec.numbers import BF16, PRECISIONS, SCALE_BYTES, is_narrow, kept_tile, packs
from megalith.spec.plan import COMPRESSED, EXPERTS_ACTIVATION, NORMS, PARTS, UP_PROJECTION, Action, compresses
from megalith.spec.problem import near
from megalith.spec.sizes import own_tensors


def _key(case: Case, part: str) -> str:
    """Return the run file's key that sets a part's action: `plan.retain.parts` or `plan.recompute_parts`."""
    return "plan.retain.parts" if part in case.plan.retain.parts else "plan.recompute_parts"


def recomputation_names_what_exists(case: Case) -> Found:
    """The keys for recomputation name only parts that a block can have, and no more blocks than the model has."""
    plan = case.plan
    for key, named in (("plan.recompute_parts", plan.recompute_parts), ("plan.retain.parts", tuple(plan.retain.parts))):
        for part in (part for part in named if part not in PARTS):
            nearest = near(part, PARTS)
            hint = f'Did you mean "{nearest}"? ' if nearest else ""
            way_out = f"{hint}Known: {', '.join(PARTS)}."
            yield error(key, named, f'"{part}" is not part of a block', way_out)
    if plan.recompute == "selective" and not plan.recompute_parts:
        way_out = 'Use ["attention.core"], or recompute = "none".'
        yield error("plan.recompute_parts", (), 'names no part, but recompute = "selective" needs a part', way_out)
    again = plan.recomputed_parts
    if nested := [(part, outer) for part in again for outer in PARTS.get(part, ()) if outer in again]:
        reason = 'recomputes "{}" twice: by itself, and as a part of "{}"'.format(*nested[0])
        yield advice(_key(case, nested[0][0]), again, reason, "Name only the outer part.")
    if plan.recompute.startswith("every:") and int(plan.recompute.removeprefix("every:")) > case.spec.model.layers:
        reason = f"is more than the model's {case.spec.model.layers} blocks"
        yield error("plan.recompute", plan.recompute, reason, f"Use every:N with N <= {case.spec.model.layers}.")


def activations_are_formed_again(case: Case) -> Found:
    """Recomputing an activation saves memory only if the trainer decides whether the next product keeps the activation's result."""
    plan, parts = case.plan, case.plan.recomputed_parts
    named = [part for part in parts if part.endswith(".activation")]
    # experts are not compiled, and nothing is sent in pieces for them
    dense = [part for part in named if part != EXPERTS_ACTIVATION]
    pieces = f"plan.overlap_tensor = {plan.overlap_tensor}: the product after the activation keeps its input"
    reasons = (
        (dense, plan.compile, "plan.compile = true: compiled code decides what is kept"),
        (dense, plan.overlap_tensor > 1, pieces),
        (named, case.spec.precision.kept != "wide", 'precision.kept = "fp8": the result of the activation is kept in 8 bits'),
    )
    for useless, applies, other in reasons:
        if useless and applies:
            yield advice(_key(case, useless[0]), parts, f"{useless[0]} has no effect with {other}", "Leave it out.")
            return


def latents_make_heads_again(case: Case) -> Found:
    """Latent attention's up-projection can be recomputed only by the trainer's own graph, and only if attention keeps no copies of the
    projected heads."""
    plan, parts, key = case.plan, case.plan.recomputed_parts, _key(case, UP_PROJECTION)
    latent = case.model is None or any(isinstance(block.attention, LatentAttentionSpec) for block in case.model.blocks)
    if UP_PROJECTION not in parts:
        return
    if not latent:
        reason = f'"{UP_PROJECTION}" has no effect: no block has latent attention'
        yield advice(key, parts, reason, "Leave it out.")
    elif plan.ulysses > 1:
        reason = f'"{UP_PROJECTION}" saves nothing with plan.ulysses = {plan.ulysses}: the exchanged heads are kept'
        yield advice(key, parts, reason, "Leave it out.")


def parts_have_one_action(case: Case) -> Found:
    """Each part of a block has one action, which is possible under the actions of the parts that contain it."""
    plan, parts, key = case.plan, case.plan.retain.parts, "plan.retain.parts"
    others = {part: action for part, action in parts.items() if action != "recompute"}
    if parts and plan.recompute not in ("none", "selective") and not plan.recompute.startswith("every:"):
        reason = f"sets actions for parts of blocks, but with plan.recompute = {plan.recompute!r} blocks keep only inputs"
        yield error(key, parts, reason, 'Use plan.recompute = "none" or "every:N", or leave the parts out.')
    if plan.recompute == "selective" and (twice := sorted(others.keys() & set(plan.recompute_parts))):
        reason = f'sets {others[twice[0]]} for "{twice[0]}", but plan.recompute_parts recomputes it'
        yield error(key, parts, reason, f'Name "{twice[0]}" in only one of the two keys.')
    again = plan.recomputed_parts
    if inside := [(part, outer) for part in others for outer in PARTS.get(part, ()) if outer in again]:
        part, outer = inside[0]
        reason = f'sets {others[part]} for "{part}", but "{outer}", which contains it, is recomputed, so its tensors are not kept'
        yield error(key, parts, reason, f'Leave "{part}" out, or recompute less than "{outer}".')


def parts_can_be_compressed(case: Case) -> Found:
    """Tensors can be kept in 8 bits if they are in bf16, and if the trainer itself decides which tensors are kept."""
    plan, parts, key = case.plan, case.plan.retain.parts, "plan.retain.parts"
    named = [part for part, action in parts.items() if action == "compress"]
    if not named:
        return
    for part in (part for part in named if part in PARTS and part not in COMPRESSED):
        reason = f'cannot compress "{part}": this part keeps sums over the whole sequence, in fp32'
        yield error(key, parts, reason, f'Keep "{part}" on the device, or offload it to the host or to disk.')
    precision = case.spec.train.precision
    products = [part for part in named if part not in (*NORMS, "attention.core")]
    if products and is_narrow(precision):
        reason = f'compresses "{products[0]}", but train.precision = "{precision}" decides how products keep their inputs'
        instead = ', and use precision.kept = "fp8"' if PRECISIONS[precision].factors.bits == 8 else ""
        yield error(key, parts, reason, f'Leave "{products[0]}" out{instead}.')
    if products and plan.compile:
        reason = f'compresses "{products[0]}" with plan.compile = true: compiled code decides how products keep their inputs'
        way_out = f'Leave "{products[0]}" out ({", ".join(("attention.core", *NORMS))} are possible), or use compile = false.'
        yield error(key, parts, reason, way_out)
    if products and plan.overlap_tensor > 1:
        reason = (
            f'compresses "{products[0]}", but inputs that are sent in pieces (plan.overlap_tensor = {plan.overlap_tensor}) are '
            "kept uncompressed"
        )
        yield error(key, parts, reason, f'Leave "{products[0]}" out, or use overlap_tensor = 1.')
    own = {half for block in case.model.blocks for half in own_tensors(block, case.model.dim)} if case.model else set[str]()
    if foreign := [part for part in named if part.partition(".")[0] in own or (part == "attend" and "attention" in own)]:
        reason = f'compresses "{foreign[0]}", a part of your own, whose layers\' inputs are not known'
        way_out = "Keep this part on the device, or offload it."
        yield error(
            key,
            parts,
            reason,
            way_out if foreign[0] == "attention.core" else f'{way_out} You can also use precision.kept = "fp8".',
        )
    if PRECISIONS[precision].compute.name != BF16.name:
        reason = f"rounds tensors for backward to 8 bits, but train.precision = {precision!r} promises more precision than bf16"
        yield error(key, parts, reason, 'Use train.precision = "bf16", or keep the part uncompressed.')


def compressed_tiles_lie_inside_shards(case: Case) -> Found:
    """A rank keeps the same rounded numbers as one process only if no tile contains channels of two ranks."""
    actions = case.plan.rounding

    def layers_of(number: int, block: BlockSpec, cut: Cut) -> Iterator[str]:
        split = [each for each in cut.layers if each.endswith(INPUTS) and each != "attention.out"]
        names = ((each, EXPERTS_ACTIVATION if each == "mlp.experts" else each) for each in split)
        return (each for each, name in names if compresses(actions, name))

    def other_way(case: Case, layers: Iterable[str]) -> str:
        return f'plan.retain.parts without "compress" for the tensors kept by {" and ".join(layers)}'

    if actions:
        yield from tiles_across_ranks(
            case, kept_tile(case.spec.precision), layers_of, channels="that {} keeps in 8 bits", other_way=other_way
        )


def kept_tensors_can_leave(case: Case) -> Found:
    """If tensors kept for backward are to be offloaded, at least one is offloaded, and the folder for it is usable."""
    retain, plan, blocks = case.plan.retain, case.plan, len(case.model.blocks) if case.model else 0
    if not retain.places:
        for name, value, unused in (("share", retain.share, 1.0), ("folder", retain.folder, "")):
            if value != unused:
                yield advice(f"plan.retain.{name}", value, 'has no effect with plan.retain.blocks = "device"', "Leave it out.")
        return
    segmented = plan.recompute == "sqrt" or plan.recompute.startswith("segments:")
    if retain.share < 1 and segmented:
        reason = f"is a share of blocks, but with plan.recompute = {plan.recompute!r} only inputs of segments are kept"
        yield error("plan.retain.share", retain.share, reason, "Use share = 1: the inputs of segments are small.")
    elif blocks and plan.places(blocks) and not plan.retained(blocks):  # wrong plan.layers are another rule's matter
        reason = f"is less than 1 of {blocks} blocks, so nothing leaves the device"
        yield error("plan.retain.share", retain.share, reason, f"Use share >= {-(-1000 // blocks) / 1000:g}.")
    if "disk" not in retain.places and retain.folder:
        yield advice(
            "plan.retain.folder", retain.folder, "has no effect if no activations are offloaded to disk", "Leave it out."
        )
    if "disk" in retain.places and case.files:
        there, size = files_in(case, retain.folder), kept_on_disk(case)
        if unusable(there):
            yield error("plan.retain.folder", retain.folder, unusable(there), "Give a folder on each node's own disk.")
        elif size > (free := shutil.disk_usage(there).free):
            reason = f"needs about {format_bytes(size)} a rank for activations, but {there} has {format_bytes(free)} free"
            yield error("plan.retain.folder", retain.folder, reason, FREE_SPACE)


FREE_SPACE = "Free space on this disk, or name a folder on another disk."


def kept_on_disk(case: Case) -> float:
    """Return about how many bytes of activations a rank keeps on disk; those of parts of blocks are not counted."""
    return activation_bytes(case).far if case.model is not None and case.plan.retain.blocks == "disk" else 0.0


def files_in(case: Case, folder: str) -> Path:
    """Return the folder for a rank's files on disk, or its nearest parent that exists. `folder`: the folder that the plan names; "" means
    the run folder."""
    return existing(Path(folder) if folder else case.folder or Path())


def existing(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    folder = folder.absolute()
    return next(one for one in (folder, *folder.parents) if one.exists())


def unusable(there: Path) -> str:
    """Return the reason why nothing can be written to a path; empty if there is none."""
    if not there.is_dir():
        return f"{there} is not a folder"
    return "" if os.access(there, os.W_OK | os.X_OK) else f"{there} is not writable"


class Activations(NamedTuple):
    """Approximate bytes of activations that a rank keeps for backward."""

    near: float
    """On the device."""
    far: float
    """In the place of `plan.retain.blocks`, if it is not the device."""


def activation_bytes(case: Case) -> Activations:
    """Return the bytes of the worst rank's activations. With full recomputation, a rank keeps the inputs of all blocks and the activations
    of one block. If activations are offloaded, three blocks or inputs are on the device: one computes, and two are being copied."""
    assert case.model is not None
    plan, model = case.plan, case.model
    saved: float = sum(saved_numbers(block, model.dim) for block in model.blocks)
    if packs(case.spec.precision, case.spec.train.precision) or plan.rounding:  # tried for many plans
        saved -= sum(_spared_numbers(case, block, at) for at, block in enumerate(model.blocks))
    inputs = model.dim * len(model.blocks) + saved / len(model.blocks) * plan.pipeline
    nested = model.dim * len(model.blocks) ** 0.5 * 2 + saved / len(model.blocks) * plan.pipeline
    numbers = {"full": min(inputs, saved), "sqrt": min(nested, saved)}.get(plan.recompute, saved)
    in_flight = kind(plan.schedule).in_flight(plan.pipeline, max(1, case.spec.microbatches))
    one = saved / len(model.blocks)
    beside = {"full": 3 * model.dim, "sqrt": model.dim * (3 + len(model.blocks) ** 0.5)}.get(plan.recompute, 2 * one)
    kept, moving = numbers * in_flight, min(numbers, (one + beside) * plan.pipeline)
    away = plan.retain.share if plan.retain.blocks != "device" else 0.0  # if only parts of blocks leave, most stays on the device
    tokens = case.spec.train.seq_len * plan.microbatch
    each = tokens * PRECISIONS[case.spec.train.precision].compute.width / (plan.pipeline * plan.tensor * plan.context)
    return Activations(each * (kept * (1 - away) + moving * (away > 0)), each * kept * away)


def saved_numbers(block: BlockSpec, dim: int) -> int:
    """Return approximately how many numbers a block keeps for backward per token, with fused kernels. A block keeps the inputs and outputs
    of norms; attention's queries, keys, values and output; the outputs of Mamba-2's projections, recurrence and norm; and the MLP's gate,
    up, activation(gate) and activation(gate) * up, for each expert that the token goes to."""
    halves = bool(block.attention or block.mamba) + bool(block.mlp)
    own = own_tensors(block, dim)  # for a user's own half, twice the outputs of its matrices are counted
    saved = 2 * dim * halves + 2 * sum(each.shape[0] for half in own.values() for each in half if each.role == "matrix")
    saved += 0 if "attention" in own else _saved_by_mixer(block)
    return saved + (0 if "mlp" in own or block.mlp is None else _saved_by_mlp(block.mlp, dim))


def _spared_numbers(case: Case, block: BlockSpec, number: int) -> float:
    """Approximate memory per token that a block saves by keeping tensors in 8 bits: inputs of products and of activations, and attention's
    tensors. The result is in numbers of the compute format, not in bytes."""
    assert case.model is not None
    choices, precision, spec, dim = case.spec.precision, case.spec.train.precision, case.spec, case.model.dim
    kept, spared = PRECISIONS["fp8"], 0.0
    left = (1 + SCALE_BYTES / (choices.tile or kept.tile)) / PRECISIONS[precision].compute.width
    outside = number < choices.wide_first or number >= len(case.model.blocks) - choices.wide_last
    if packs(choices, precision) and not outside and not own_tensors(block, dim):
        spared += dim * (bool(block.attention) + bool(block.mlp)) * (1 - left)
        if block.mlp is not None:
            many, factors = _saved_by_mlp(block.mlp, dim), 3 / 4 if block.mlp.gated else 1
            spared += many * (1 - factors * left)
    if actions := spec.plan.rounding:
        spared += (1 - left) * _compressed_numbers(block, dim, actions, packed=spared > 0)
    return spared


def _compressed_numbers(block: BlockSpec, dim: int, actions: Mapping[str, Action], *, packed: bool) -> float:
    """Approximately how many numbers per token a block keeps in 8 bits because of the actions for its parts. `packed`: True if inputs of
    products and factors of activations are kept in 8 bits anyway."""
    norm = "attention_norm" if block.attention else "mamba_norm"
    found: float = dim * (
        compresses(actions, norm) * bool(block.attention or block.mamba) + compresses(actions, "mlp_norm") * bool(block.mlp)
    )
    if block.attention is not None:
        found += _saved_by_mixer(block) * compresses(actions, "attention.core")
    if packed or own_tensors(block, dim):
        return found
    mixer = "attention.q" if block.attention else "mamba.x"
    found += dim * compresses(actions, mixer) * bool(block.attention or block.mamba)
    if isinstance(block.mlp, MoeSpec):
        found += dim * compresses(actions, "mlp.experts") + _saved_by_mlp(block.mlp, dim) * compresses(
            actions, EXPERTS_ACTIVATION
        )
    elif block.mlp is not None:
        found += dim * compresses(actions, "mlp.up") + _saved_by_mlp(block.mlp, dim) * compresses(actions, "mlp.down")
    return found


def _saved_by_mixer(block: BlockSpec) -> int:
    attention, mamba = block.attention, block.mamba
    if mamba:
        return 4 * mamba.heads * mamba.head_dim + 2 * mamba.groups * mamba.state + mamba.heads
    if isinstance(attention, AttentionSpec):
        return 2 * (attention.heads + attention.kv_heads) * attention.head_dim
    if attention is None:
        return 0
    attended = attention.heads * 2 * (attention.nope_dim + attention.rope_dim + attention.v_dim)
    return attended + (attention.q_rank or 0) + attention.kv_rank


def _saved_by_mlp(mlp: MlpSpec | MoeSpec, dim: int) -> int:
    kept = 4 if mlp.gated else 2
    if isinstance(mlp, MlpSpec):
        return kept * mlp.hidden
    return mlp.router.active * (kept * mlp.hidden + 2 * dim) + kept * mlp.shared
