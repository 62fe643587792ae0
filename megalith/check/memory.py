"""Rules about a device's memory: state, activations and recomputation."""

import shutil
from dataclasses import replace
from typing import NamedTuple

from megalith.check.case import Case, Found, advice, error, format_bytes
from megalith.check.remedies import changed_by, cheapest
from megalith.check.retain import FREE_SPACE, activation_bytes, files_in, unusable
from megalith.kernels.chunks import tile_rows
from megalith.mesh import Mesh
from megalith.spec.cluster import HOST_MEMORY, ClusterSpec
from megalith.spec.numbers import PRECISIONS, is_narrow
from megalith.spec.optimizers import OPTIMIZERS
from megalith.spec.phases import Phases
from megalith.spec.plan import AUTO, Plan, StateSpec, segment_size
from megalith.spec.run import RunSpec
from megalith.spec.sites import kept, outer_slots
from megalith.spec.sizes import Count, block_parameters, count_model
from megalith.spec.state import DISK_SLOTS, LOWER, MASTER, UPPER, Slot, bytes_each, bytes_of, gradient
from megalith.spec.treatment import can_undo_on_disk, kinds, masters_of, rows_in_tiles, slots_of, table_kinds

PAIR = 2
"""Number of files between which updates of a rank's state on disk alternate."""

ROOM = 0.9
"""The share of a device's memory in which a run must fit after a suggested change; the rest is for temporary tensors, CUDA's
context and fragmentation."""


def segments_lie_in_a_stage(case: Case) -> Found:
    """A segment of recomputation is no longer than the longest stage."""
    plan, blocks = case.plan, case.spec.model.layers
    if case.model is None or plan.recompute == AUTO or not (size := segment_size(plan.recompute, blocks=blocks)):
        return
    longest = plan.longest_stage(blocks)
    if plan.recompute != "sqrt" and size > longest:
        reason = f"asks for segments of {size} blocks, but the longest stage has {longest}"
        yield error("plan.recompute", plan.recompute, reason, f"Use segments:auto, or segments:K with K <= {longest}.")


def state_fits(case: Case) -> Found:
    """Weights, gradients and moments alone fit into the device's memory."""
    if case.cluster is None or case.model is None or case.plan.data % case.plan.replicate:
        return
    memory, name = case.cluster.accelerator.memory, case.cluster.accelerator.name
    held = state_bytes(case, case.plan)
    if memory is not None and held > memory:
        reason = (
            f"keeps at least {format_bytes(held)} of weights, gradients and moments a rank, but {name} has {format_bytes(memory)}"
        )
        way_out = way_out_of(case, case.cluster)
        data = "plan.data" if case.plan.zero else "plan.data with plan.zero = 3"
        axes = f"plan.tensor, plan.pipeline or {data}"
        or_raise = "Or raise" if way_out else "No combination of ZeRO, recomputation, fewer bits and offloading is enough. Raise"
        yield error(
            "plan.zero",
            case.plan.zero,
            reason,
            f"{way_out}{or_raise} {axes}, or use a smaller model.",
        )


def hosts_hold_what_leaves_devices(case: Case) -> Found:
    """A host of the cluster has room for the state and activations that leave its devices. A cluster file without `host.memory` is no
    proof of a small host."""
    cluster, plan = case.cluster, case.plan
    if cluster is None or case.model is None or plan.data % plan.replicate:
        return
    needed, memory = outside_bytes(case), cluster.host.memory
    known = "a device's share of the host's"
    has = f"half of {known} memory" if memory else f"half of the {format_bytes(HOST_MEMORY)} assumed for each device"
    for place, size, room, whole, share in (
        ("host", needed.memory, cluster.host_room, memory and memory / cluster.host_devices, has),
        ("disk", needed.disk, cluster.disk_room, cluster.disk_room, f"{known} disk"),
    ):
        if room is None or size <= room:
            continue
        named = {"plan.state.optimizer": plan.state.optimizer, "plan.retain.blocks": plan.retain.blocks}
        key = next((key for key, value in named.items() if value == place), "sites.place")
        reason = f"needs about {format_bytes(size)} a rank, but training state may take {format_bytes(room)}, {share}"
        refused = whole is not None and size > whole
        way_out = way_out_of(case, cluster) if refused else ""
        table = f"larger hosts ([host] {'memory' if place == 'host' else 'disk'} of a cluster file)"
        yield (error if refused else advice)(
            key, place, reason, f"{way_out}{'Or use' if way_out else 'Use'} more ranks, or {table}."
        )


def way_out_of(case: Case, cluster: ClusterSpec) -> str:
    """Return, as a sentence, the cheapest change with which the run fits its devices and hosts; empty if there is none."""
    if not case.remedies:
        return ""
    memory = cluster.accelerator.memory

    def fits(changed: RunSpec) -> bool:
        other = replace(case, spec=changed)
        near = memory is None or rank_bytes(other) <= ROOM * memory
        return near and cluster.has_room(**outside_bytes(other)._asdict())

    return cheapest(case.spec, fits)


def optimizer_is_sharded(case: Case) -> Found:
    """Data ranks shard the optimizer: ZeRO-1 adds no communication and saves most of the optimizer's memory (Rajbhandari et
    al. 2019)."""
    plan = case.plan
    if plan.zero == 0 and plan.data > 1 and case.model is not None:
        whole, cut = (state_bytes(case, plan.model_copy(update={"zero": zero})) for zero in (0, 1))
        if cut >= whole:  # with as many copies as data ranks, or with the state elsewhere
            return
        reason = f"keeps {format_bytes(whole)} of weights, gradients and moments of the blocks on each of {plan.data} data ranks"
        way_out = f"With plan.zero = 1 each data rank keeps {format_bytes(cut)}, and ranks exchange no more bytes than now."
        yield advice("plan.zero", 0, reason, way_out)


def state_elsewhere_can_be_had(case: Case) -> Found:
    """The optimizer can update state that is not on the device."""
    state, spec = case.plan.state, case.spec
    for name in ("folder", "chunk") if state.optimizer != "disk" else ():
        if (value := getattr(state, name)) != getattr(StateSpec(), name):
            yield advice(f"plan.state.{name}", value, "has no effect if no state is kept on disk", "Leave it out.")
    if state.optimizer == "device":
        if state.share < 1:
            yield advice("plan.state.share", state.share, 'has no effect with plan.state.optimizer = "device"', "Leave it out.")
        return
    kind = next((kind for kind in kinds(spec.optimizer) if OPTIMIZERS[kind].unit != "element"), None)
    gpu = spec.train.device == "cuda" or (case.cluster is not None and not case.cluster.accelerator.is_processor)
    if gpu and kind is not None:
        reason = f"updates the state of each GPU in pieces, but {kind} needs each whole {OPTIMIZERS[kind].unit}"
        way_out = 'Use "device", or optimizer.kind = "adamw", "sgd" or "lion", which update each element on its own.'
        yield error("plan.state.optimizer", state.optimizer, reason, way_out)


def weights_elsewhere_are_gathered(case: Case) -> Found:
    """Weights that are not on the device are cast, at each gather, from master weights that are stored in the same memory or on the same
    disk."""
    state, spec, key = case.plan.state, case.spec, "plan.state.weights"
    if state.weights == "device":
        return
    if state.optimizer != state.weights:
        reason = (
            f'casts weights from master weights in the same place, but plan.state.optimizer = "{state.optimizer}" keeps master '
            "weights elsewhere"
        )
        yield error(key, state.weights, reason, f'Use plan.state.optimizer = "{state.weights}", or weights = "device".')
    if case.plan.zero != 3:
        reason = f"gathers the weights of one part at a time, but plan.zero = {case.plan.zero} keeps all weights on each rank"
        yield error(key, state.weights, reason, 'Use plan.zero = 3 (even with one data rank), or weights = "device".')
    if PRECISIONS[spec.train.precision].compute.name == MASTER.number:
        reason = (
            f"casts weights from master weights, but with train.precision = {spec.train.precision!r} the weights are the "
            "master weights and stay on the device"
        )
        yield error(key, state.weights, reason, 'Use train.precision = "bf16", or weights = "device".')
    if spec.optimizer.master in LOWER:
        reason = (
            f"casts weights from master weights, but optimizer.master = {spec.optimizer.master!r} makes the "
            f"master weights from the compute weights"
        )
        yield error(key, state.weights, reason, 'Use optimizer.master = "fp32", or weights = "device".')


def vocabulary_is_cut(case: Case) -> Found:
    """The loss can be computed in tiles of the vocabulary, and is, where a table would be the largest part in memory."""
    model, rows, key = case.model, case.spec.train.vocab_tile, "train.vocab_tile"
    if rows and case.spec.train.loss is not None:
        reason = (
            f"computes the loss from a few columns of logits at a time, but {case.spec.train.loss} (train.loss) needs whole rows"
        )
        yield error(key, rows, reason, "Use vocab_tile = 0, or remove train.loss.")
    if rows and model is not None and model.head.ahead is not None:
        reason = "computes one loss in tiles, but multi-token prediction computes several losses with the same output layer"
        yield error(key, rows, reason, "Use vocab_tile = 0, or a model without multi-token prediction.")
    if rows or model is None or model.head.ahead is not None:
        return
    table, width = model.embedding.vocab * model.dim, PRECISIONS[case.spec.train.precision].compute.width
    block = max(sum(each.numel for each in block_parameters(block, model.dim)) for block in case.blocks)
    advised = max(1, block // (model.dim * case.plan.tensor))
    if table > block and case.spec.train.loss is None and _cuts_tables(case, advised):
        sizes = f"{format_bytes(width * table)}, and of a block {format_bytes(width * block)}"
        reason = f"keeps the embedding's and the head's table whole while they compute: weights of {sizes}"
        way_out = f"vocab_tile = {advised} reads, computes and updates them in tiles; its sums round in another order."
        yield advice(key, rows, reason, way_out)


def _cuts_tables(case: Case, rows: int) -> bool:
    """Return True if embedding and output are read in tiles with this `train.vocab_tile`."""
    assert case.model is not None
    used, tile = table_kinds(case.spec.optimizer), tile_rows(rows, case.model.dim)
    return rows_in_tiles(case.model, case.plan, used, tile=tile) > 0


def released_gradients_save_memory(case: Case) -> Found:
    """With `plan.state.release`, freeing gradients inside the backward saves memory, at the price of a second pass over each step whose
    update could not be undone."""
    state, spec, key = case.plan.state, case.spec, "plan.state.release"
    if not state.release:
        return
    if not can_undo_on_disk(state, spec.train.precision, spec.optimizer.master):
        saved = bytes_each([gradient(spec.train.gradients)])
        reason = (
            f"saves {saved:g} bytes a parameter on each device, but computes every step twice: the first time only for the gradient norm, "
            "because an update in memory cannot be undone"
        )
        way_out = (
            'Only clipped steps are computed twice with plan.state.optimizer = "disk", share = 1, optimizer.master = "fp32", and a '
            "train.precision below fp32."
        )
        yield advice(key, True, reason, way_out)
    if spec.microbatches > 1:
        reason = f"saves nothing with {spec.microbatches} microbatches a step: all gradients are added up before the first can be freed"
        one_batch = not case.later and len({phase.global_batch for phase in Phases.of(spec).all}) == 1
        way_out = f"plan.microbatch = {spec.microbatches * case.plan.microbatch}, or " if one_batch else ""
        yield error(key, True, reason, f"Use {way_out}release = false.")


def released_gradients_are_updated_by_parts(case: Case) -> Found:
    """With `plan.state.release`, no setting needs all gradients at once: an update inside the backward has only those of one part, on one
    rank."""
    spec, key = case.spec, "plan.state.release"
    if not case.plan.state.release:
        return
    whole = next((kind for kind in kinds(spec.optimizer) if OPTIMIZERS[kind].unit != "element"), None)
    if whole is not None:
        reason = f"updates part by part inside the backward, but {whole} needs each whole {OPTIMIZERS[whole].unit} from all ranks"
        yield error(key, True, reason, 'Use optimizer.kind = "adamw", "sgd" or "lion", or release = false.')
    for other, value in (
        ("optimizer.adaptive_clip", spec.optimizer.adaptive_clip),
        ("optimizer.qk_clip", spec.optimizer.qk_clip),
        ("fleet.verify_every", spec.fleet.recover and spec.fleet.verify_every),
        ("precision.watch_every", is_narrow(spec.train.precision) and spec.precision.watch_every),
        ("plan.post_validation", case.plan.post_validation),
    ):
        if value:
            reason = (
                f"frees gradients inside the backward, but {other} = {str(value).lower()} needs all gradients after the backward"
            )
            yield error(key, True, reason, f"Leave out {other}, or use release = false.")


def disk_takes_the_state(case: Case) -> Found:
    """State on disk fits into a writable folder. A run with state on disk makes no copies of its state in memory, so a fault
    costs the steps since the newest checkpoint."""
    state, fleet = case.plan.state, case.spec.fleet
    if state.optimizer != "disk":
        return
    if fleet.recover and fleet.memory_every:
        reason = (
            f"makes no copies in memory, despite fleet.memory_every = {fleet.memory_every}: a copy would hold all the "
            "state that is on disk"
        )
        saved = case.spec.checkpoint.every
        way_out = (
            f"After a fault the run resumes from its newest checkpoint, at most {saved} steps back."
            if saved
            else "Set checkpoint.every: after a fault the run resumes from its newest checkpoint."
        )
        yield advice("plan.state.optimizer", state.optimizer, reason, way_out)
    if not case.files or case.model is None or case.plan.data % case.plan.replicate:
        return
    there = files_in(case, state.folder)
    if unusable(there):
        yield error("plan.state.folder", state.folder, unusable(there), "Give a folder on each node's own disk.")
        return
    slot, free = disk_bytes(case, case.plan), shutil.disk_usage(there).free
    has = f"but {there} has {format_bytes(free)} free"
    saved = 0 if not case.spec.checkpoint.every else 1 if state.folder else 1 + kept(case.spec)
    if (least := state_on_disk(case)) > free:
        files = "two files of its state" + (", and for its master weights while the model is built" if state.weights_away else "")
        reason = f"needs at least {format_bytes(least)} a rank for {files}, {has}"
        yield error("plan.state.folder", state.folder, reason, FREE_SPACE)
    elif (PAIR + saved) * slot > free:
        reason = (
            f"needs at least {format_bytes((PAIR + saved) * slot)} a rank for state files, including those of checkpoints, {has}"
        )
        yield advice(
            "plan.state.folder", state.folder, reason, f"{FREE_SPACE} Without enough free space, a save fails or training waits."
        )


def long_sequences_recompute(case: Case) -> Found:
    """Long sequences use recomputation: activations grow with the sequence, and recomputation saves activations at the cost of time."""
    plan, train = case.plan, case.spec.train
    if plan.recompute != "none" or plan.retain.parts or case.model is None or case.spec.microbatches == 0:
        return  # parts that have actions are recomputed or moved as they say
    held, memory = activation_bytes(case).near, case.cluster.accelerator.memory if case.cluster else None
    if held > memory / 2 if memory else train.seq_len * (1 - plan.retain.away) >= 16_384:
        reason = f"keeps about {format_bytes(held)} of activations a rank for backward"
        reason += f", of {format_bytes(memory)}" if memory else f" at seq_len = {train.seq_len}"
        less = activation_bytes(replace(case, spec=changed_by(case.spec, {"plan.recompute": "full"}))).near
        yield advice(
            "plan.recompute",
            "none",
            reason,
            f'recompute = "full" keeps about {format_bytes(less)}, for a third more computation.',
        )


def state_bytes(case: Case, plan: Plan) -> int:
    """Lower bound of a rank's bytes for the blocks' state; experts are sharded separately. Below ZeRO-3 a rank also holds unsharded
    compute weights."""
    places = max(1, plan.pipeline // plan.sides)  # in a bidirectional pipeline, two ranks keep the same stages
    return int(_held(case, plan, case.parameters, places))


def rank_bytes(case: Case) -> float:
    """Approximate bytes of the worst rank: state, activations, and the gradients of a part during their reduction."""
    assert case.model is not None
    plan, blocks = case.plan, case.parameters
    places = max(1, plan.pipeline // plan.sides)
    state = state_bytes(case, plan) + _held(case, plan, _ends(case), places=1) / min(
        places, 2
    )  # embedding and head are on two ranks
    each = bytes_each([gradient(case.spec.train.gradients)])
    ends = 0 if _cuts_tables(case, case.spec.train.vocab_tile) else _ends(case).total / 2
    part = max(ends, blocks.total / len(case.model.blocks) / max(1, plan.expert)) / plan.tensor
    return state + activation_bytes(case).near + 2 * part * (each * (plan.dp_size > 1) + each)


def _elsewhere(case: Case) -> list[Slot]:
    """The tensors of optimizer state that may be kept outside the device, including master weights if compute weights have another
    format."""
    narrow = PRECISIONS[case.spec.train.precision].compute.name != MASTER.number
    return [*(masters_of(case.spec.optimizer) if narrow else []), *slots_of(case.spec.optimizer)]


def disk_bytes(case: Case, plan: Plan) -> int:
    """Lower bound of the size of one state file of a rank, counting the blocks' state."""
    places = max(1, plan.pipeline // plan.sides)
    numbers = plan.state.away * _own_numbers(plan, case.parameters) / places
    return int(bytes_each(_elsewhere(case)) * numbers) if plan.state.optimizer == "disk" else 0


def state_on_disk(case: Case) -> float:
    """Lower bound of the bytes that a rank writes for its state on disk: two files, and one for master weights while the model is built."""
    state, slot = case.plan.state, disk_bytes(case, case.plan)
    return slot and slot * (PAIR + bool(state.weights_away) / state.share * bytes_each([MASTER]) / bytes_each(_elsewhere(case)))


def _own_numbers(plan: Plan, count: Count) -> float:
    """Return how many of these parameters a rank updates."""
    shards = max(1, Mesh.of(plan).experts[2])
    return count.dense / (plan.tensor * max(1, plan.dp_shard)) + count.experts / (plan.expert * plan.expert_tensor * shards)


class OutsideBytes(NamedTuple):
    """Approximate bytes that a rank keeps outside its device."""

    memory: float
    disk: float


def outside_bytes(case: Case) -> OutsideBytes:
    """Return what the worst rank keeps outside its device: state, with buffers for gradients and weights on the host, or with the files
    of `DISK_SLOTS` on disk; tensors of merges; activations."""
    spec, plan, places = case.spec, case.plan, max(1, case.plan.pipeline // case.plan.sides)
    own = _own_numbers(plan, case.parameters) / places + _own_numbers(plan, _ends(case)) / min(places, 2)
    merged = bytes_each(slot for slot in outer_slots(spec.sites) if slot.place == "host") * own
    far = activation_bytes(case).far if plan.retain.blocks != "device" else 0.0
    state, each = plan.state.away * own, bytes_each(_elsewhere(case))
    carried = bytes_each([gradient(spec.train.gradients)]) + PRECISIONS[spec.train.precision].compute.width
    slots = DISK_SLOTS if spec.checkpoint.every else PAIR
    return OutsideBytes(
        merged + far * (plan.retain.blocks == "host") + state * (each + carried) * (plan.state.optimizer == "host"),
        far * (plan.retain.blocks == "disk") + state * each * slots * (plan.state.optimizer == "disk"),
    )


def _ends(case: Case) -> Count:
    """The numbers of parameters outside of all blocks: the embedding and the head."""
    assert case.model is not None
    whole, blocks = count_model(case.model), case.parameters
    return Count(whole.dense - blocks.dense, whole.experts - blocks.experts)


def total_state_bytes(case: Case, plan: Plan) -> int:
    """Return the bytes of the whole model's state over all ranks. The embedding and the head are each on one stage."""
    return plan.ranks * state_bytes(case, plan) + int(plan.ranks / plan.pipeline * _held(case, plan, _ends(case), places=1))


def _held(case: Case, plan: Plan, parameters: Count, places: int) -> float:
    """Bytes of a rank's state for its share of `parameters`, which are distributed over `places` stages."""
    compute, mesh = PRECISIONS[case.spec.train.precision].compute, Mesh.of(plan)
    held = 0.0
    for count, split, shards in (
        (parameters.dense, plan.tensor, max(1, plan.dp_shard)),  # dp_shard is 0 if the plan asks for more copies than ranks
        (parameters.experts, plan.expert * plan.expert_tensor, max(1, mesh.experts[2])),  # 0 if it asks for too many expert ranks
    ):
        cut = {"zero": plan.zero, "shards": shards}
        numbers = count / (split * places)
        lasting = [
            *masters_of(case.spec.optimizer),
            *slots_of(case.spec.optimizer),
            *outer_slots(case.spec.sites, on_device=True),
        ]
        if case.spec.optimizer.master in LOWER and (shards > 1 or plan.zero == 3):
            lasting.append(UPPER)
        kept = (
            sum(bytes_of(lasting, numbers, **cut).values())
            - sum(bytes_of(_elsewhere(case), numbers, **cut).values()) * plan.state.away
        )
        apart = shards > 1 or compute.name != MASTER.number
        lasting_share = plan.state.away / shards if not plan.state.weights_away and compute.name != MASTER.number else 0
        whole = numbers * compute.width * ((1 if apart else 0) if plan.zero < 3 else lasting_share)
        gradients = bytes_of([gradient(case.spec.train.gradients)], numbers, **cut)[
            "gradients"
        ]  # below ZeRO-2, gradients are unsharded until the end of a step
        own = kept + numbers * bytes_each([gradient(case.spec.train.gradients)]) / shards
        undoing = own if plan.post_validation else 0  # sharded gradients and copies, once the unsharded gradients are freed
        held += kept + (0 if plan.state.release else max(gradients, undoing)) + whole
    return held
