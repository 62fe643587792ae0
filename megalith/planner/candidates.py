"""Plans that are valid for a model on a number of devices. No torch."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import gcd
from typing import Any, Literal, NamedTuple

from megalith.cost.network import domain_of
from megalith.schedule import schedule_problems
from megalith.schedule.table import SCHEDULES
from megalith.spec.cluster import ClusterSpec
from megalith.spec.model import AttentionSpec, LatentAttentionSpec, ModelSpec, MoeSpec
from megalith.spec.plan import OUTSIDE, UP_PROJECTION, PartActions, Plan, RetainSpec, StateSpec, Zero
from megalith.spec.sizes import own_tensors

POLICIES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("none", ("attention.core",)),
    ("selective", ("mlp",)),
    ("full", ("attention.core",)),
)
"""Recomputation policies: nothing, the feed-forward half, everything. Fused attention keeps little, so no policy recomputes attention
alone."""

SEGMENTS, NESTED = "segments", "sqrt"
"""Recomputation policies that keep less: segments of several blocks, and nested segments."""

ACTIVATION = "mlp.activation"
"""Part of a block that can be recomputed without a matrix product."""

IN_SEGMENTS = (SEGMENTS, NESTED)
"""Beginnings of the names of policies that keep inputs of segments instead of inputs of blocks."""

MICROBATCHES = (1, 2, 4, 8)

WIDEST = 72
"""Largest number of tensor ranks: the devices of the largest domain of fast links below a pod (NVL72)."""

LONG = 16_384
"""Tokens of a sequence. A context rank gets at least a quarter of this number of tokens, so context parallelism is tried for sequences of
at least half this number."""


def searched() -> tuple[str, ...]:
    """Return the schedules that a search tries in addition to 1F1B and interleaved 1F1B."""
    return tuple(name for name, row in SCHEDULES.items() if row.searched)


def suited(names: Iterable[str], model: ModelSpec) -> tuple[str, ...]:
    """Return the schedules that suit a model. Schedules that hide the token exchange are left out for models without experts:
    ZB-V idles less."""
    experts = any(isinstance(block.mlp, MoeSpec) for block in model.blocks)
    return tuple(name for name in names if experts or not SCHEDULES[name].hides_exchange)


@dataclass(frozen=True)
class Space:
    """Choices of a search."""

    policies: tuple[tuple[str, tuple[str, ...]], ...] = POLICIES
    microbatches: tuple[int, ...] = MICROBATCHES
    most_chunks: int = 8
    zero: tuple[Zero, ...] = (1, 2, 3)
    schedules: tuple[str, ...] = field(default_factory=searched)
    """Schedules that are tried in addition to 1F1B and interleaved 1F1B."""
    sharded: bool = True
    """Also layouts with several data or context ranks that shard all of the state, that of experts too."""
    copies: bool = True
    """Under ZeRO 3, also try HSDP: two copies of the state, or one copy for each group of 1, 8 or 64 nodes."""
    exchanges: bool = True
    """Besides a ring of context ranks, try to gather keys and values, or to exchange heads (Ulysses), if one of these may be faster."""
    compile: bool = False
    """Compile blocks, unless the schedule defers weight gradients: compiled code cannot defer them."""
    compile_split: bool = True
    """Also compile blocks that are split among ranks."""
    again: tuple[str, ...] = (SEGMENTS, NESTED)
    """Recomputation policies to try if a plan with full recomputation does not fit, or leaves little memory free."""
    offload: tuple[float, ...] = (0.25, 0.5, 0.75, 1.0)
    """Shares of the optimizer's state in host memory, for plans that do not fit on the device. The smallest share that fits
    is used; if none fits, the others of `lighter_states` are tried. The same shares of blocks are tried for offloading
    activations."""

    def compiles(self, schedule: str, *, split: bool) -> bool:
        """Return True if blocks are compiled under a schedule."""
        return self.compile and not SCHEDULES[schedule].splits_backward and (self.compile_split or not split)

    @classmethod
    def of_prefill(cls) -> "Space":
        """Return the space of a prefill: without recomputation, ZeRO and interleaving, and one sequence at a time, because
        there is no backward and no gather."""
        return cls(
            policies=POLICIES[:1],
            microbatches=(1,),
            most_chunks=1,
            zero=(0,),
            schedules=(),
            exchanges=False,
            again=(),
            offload=(),
        )


def offloaded(plan: Plan, share: float) -> Plan:
    """The plan with this share of the optimizer's state in host memory."""
    return plan.model_copy(update={"state": StateSpec(optimizer="host", share=share) if share else StateSpec()})


def retained(plan: Plan, blocks: int, shares: Iterable[float]) -> list[Plan]:
    """Return the plan with the activations of these shares of blocks in host memory, and then with all activations on disk.
    If blocks are recomputed in segments, only share 1 is tried, because segments only keep inputs."""
    some = [share for share in shares if share == 1 or not plan.recompute.startswith(IN_SEGMENTS)]
    places = [*({"blocks": "host", "share": share} for share in some), *([{"blocks": "disk", "share": 1.0}] if some else [])]
    plans = [plan.model_copy(update={"retain": plan.retain.model_copy(update=place)}) for place in places]
    return [one for one in plans if one.retained(blocks)]


def finer(plan: Plan, model: ModelSpec) -> list[Plan]:
    """Return variants of a plan that recomputes or offloads whole blocks or MLPs, in which smaller parts are recomputed or offloaded. The
    first variants recompute least."""
    light = () if plan.compile else (ACTIVATION,)  # compiled code decides what an activation keeps
    latent = any(isinstance(block.attention, LatentAttentionSpec) for block in set(model.blocks))
    heads = (UP_PROJECTION,) if latent else ()
    kinds = [light, heads, (*light, *heads)]
    if plan.recompute != "selective":
        kinds += [("mlp", *heads), ("attend", *light)]
    parts = (parts for parts in dict.fromkeys(kinds) if parts)
    found = [plan.model_copy(update={"recompute": "selective", "recompute_parts": one}) for one in parts]
    if plan.retain.blocks == "device":
        return found if plan.recompute != "none" else []
    stays = [one.model_copy(update={"retain": RetainSpec()}) for one in found]
    some = [PartActions({part: plan.retain.blocks}) for part in ("attend", "mlp")] if plan.recompute == "none" else []
    return stays + [plan.model_copy(update={"retain": RetainSpec(parts=parts, folder=plan.retain.folder)}) for parts in some]


def lighter_states(shares: Sequence[float]) -> list[list[StateSpec]]:
    """Return groups of states that hold less on the device, in the order in which they are tried: some in host memory, all on disk, there
    with gradients released too, weights cast from the offloaded state, and gradients released with state in memory, where each step is
    computed twice. `shares`: the shares in host memory; none: nothing may be offloaded."""
    if not shares:
        return []
    some = [StateSpec(optimizer="host", share=share) for share in shares]
    host, disk = ({"optimizer": place, "weights": place} for place in OUTSIDE)
    return [
        some,
        [StateSpec(optimizer="disk")],
        [StateSpec(optimizer="disk", release=True)],
        [StateSpec.model_validate(host)],
        [StateSpec.model_validate(disk)],
        [StateSpec.model_validate(disk | {"release": True})],
        [StateSpec(release=True)],
        [StateSpec(optimizer="host", release=True)],
        [StateSpec.model_validate(host | {"release": True})],
    ]


def lightened(state: StateSpec) -> tuple[str, ...]:
    """Return the categories of a rank's memory that a state lightens."""
    away, weights = state.optimizer != "device", state.weights != "device"
    return ("optimizer",) * away + ("weights",) * weights + ("gradients",) * state.release


def with_state(plan: Plan, state: StateSpec) -> Plan:
    """Return the plan with another state. Weights off the device need ZeRO 3, which the search does not try for a single data rank."""
    zero = {"zero": 3} if state.weights != "device" and plan.dp_size == 1 else {}
    return plan.model_copy(update={"state": state, **zero})


def but_microbatch(plan: Plan) -> tuple[Any, ...]:
    """Return all choices of a plan except the microbatch."""
    split = plan.tensor, plan.context, plan.context_method, plan.ulysses, plan.pipeline, plan.expert, plan.expert_tensor
    return *split, plan.schedule, plan.chunks, plan.zero, plan.replicate, plan.recompute, plan.recompute_parts


def segmented(plan: Plan, blocks: int) -> list[Plan]:
    """Return the plan with recomputation in segments of 2, 3, 4, 6, 8, 12, ... blocks, up to the length of a stage."""
    longest = plan.longest_stage(blocks)
    sizes = [size for size in (*_powers(longest), *(3 * power for power in _powers(longest // 3))) if size > 1]
    return [plan.model_copy(update={"recompute": f"segments:{size}"}) for size in sorted(sizes)]


def candidates(
    model: ModelSpec, cluster: ClusterSpec, *, seq_len: int, global_batch: int, space: Space | None = None
) -> Iterator[Plan]:
    """Yield every valid plan of the usual kinds: tensor ranks inside fast links, ZeRO 2 and 3 only without a pipeline, and interleaving
    only with equal stages, where embedding and head may count as blocks."""
    devices, space, blocks = cluster.count, space or Space(), len(model.blocks)
    for tensor, context, pipeline in splits(model, cluster, seq_len):
        data = devices // (tensor * context * pipeline)
        if global_batch % data:
            continue
        exchanges = _exchanges(model, cluster, tensor, context) if space.exchanges else [ContextExchange()]
        for (expert, parts_of_one), micro in product(_experts(model, data * context * tensor, tensor), space.microbatches):
            sharded = data * context > 1 and data * context * tensor > expert * parts_of_one
            if (global_batch // data) % micro or (sharded and not space.sharded):
                continue
            rounds = global_batch // data // micro
            shares = _shares(cluster, data, context, tensor * context, pipeline, space)
            schedules = _schedules(model, pipeline, rounds, space)
            for (schedule, chunks), (zero, copies), (method, ulysses) in product(schedules, shares, exchanges):
                for policy, parts in space.policies:
                    yield Plan(
                        data=data, replicate=copies, zero=zero, tensor=tensor, sequence=seq_len % (context * tensor) == 0,
                        context=context, context_method=method, ulysses=ulysses, pipeline=pipeline, schedule=schedule, chunks=chunks,
                        expert=expert, expert_tensor=parts_of_one, microbatch=micro,
                        compile=space.compiles(schedule, split=tensor * context * expert > 1),
                        recompute=policy, recompute_parts=parts, layers=even_layers(blocks, pipeline * chunks),
                    )  # fmt: skip


def splits(model: ModelSpec, cluster: ClusterSpec, seq_len: int) -> Iterator[tuple[int, int, int]]:
    """Yield sizes of the tensor, context and pipeline axes that divide the devices; data ranks are the rest. A context rank
    has a part from each end of a sequence."""
    devices = cluster.count
    for tensor, context, pipeline in product(_tensors(model, cluster), _contexts(seq_len, devices), _pipelines(model, devices)):
        if devices % (tensor * context * pipeline) == 0 and seq_len % (2 * context) == 0:
            yield tensor, context, pipeline


def even_layers(blocks: int, stages: int) -> tuple[int, ...] | None:
    """Return uneven stages that are balanced if embedding and head each count as a block; None if the plan's default division
    is as good. For the 126 blocks of Llama 3 405B in 128 stages, embedding and head are stages of their own."""
    each, left = divmod(blocks + 2, stages)
    if stages > 1 and blocks % stages and left == 0:
        return (each - 1, *(each,) * (stages - 2), each - 1)
    return None


def _powers(most: int) -> list[int]:
    return [1 << bit for bit in range(most.bit_length()) if 1 << bit <= most]


def _sizes(devices: int, most: int) -> list[int]:
    """Return the powers of two, and three times powers of two, that divide the devices: usual sizes of nodes and clusters."""
    return sorted(size for size in (*_powers(most), *(3 * power for power in _powers(most // 3))) if devices % size == 0)


def _tensors(model: ModelSpec, cluster: ClusterSpec) -> list[int]:
    """Return tensor sizes that divide heads and hidden sizes and stay inside one domain of fast links; ranks may share a key head. All
    divisors of the domain are tried, because a domain of 72 devices has divisors that `_sizes` lacks."""
    domain = cluster.accelerator.scale_up_domain
    fast = min(domain, cluster.count, WIDEST)

    def divides(size: int) -> bool:
        for block in set(model.blocks):
            heads = block.attention.heads if block.attention else size
            shared = block.attention.kv_heads if isinstance(block.attention, AttentionSpec) else heads
            groups = block.mamba.groups if block.mamba else size
            hidden = block.mlp.shared if isinstance(block.mlp, MoeSpec) else block.mlp.hidden if block.mlp else size
            if own := own_tensors(block, model.dim):
                heads, shared = (size, size) if "attention" in own else (heads, shared)
                hidden = size if "mlp" in own else hidden
                if any(each.units % size for tensors in own.values() for each in tensors):
                    return False
            if heads % size or (shared % size and size % shared) or groups % size or hidden % size:
                return False
        return model.embedding.vocab % size == 0 and model.head.vocab % size == 0

    whole = (size for size in range(1, fast + 1) if domain % size == cluster.count % size == 0)
    return [size for size in sorted({*_sizes(cluster.count, fast), *whole}) if divides(size)]


def _contexts(seq_len: int, devices: int) -> list[int]:
    return [size for size in _powers(min(devices, 256)) if size == 1 or seq_len // size >= LONG // 4]


class ContextExchange(NamedTuple):
    """The way in which queries of a context rank reach the keys of other ranks."""

    method: Literal["ring", "gather"] = "ring"
    ulysses: int = 1


def is_ring(plan: Plan) -> bool:
    """True if keys and values go around a ring of all context ranks, or there is only one context rank."""
    return (plan.context_method, plan.ulysses) == ContextExchange()


def _exchanges(model: ModelSpec, cluster: ClusterSpec, tensor: int, context: int) -> list[ContextExchange]:
    """Return the exchanges to try: a ring, which hides behind attention; a gather, if several ranks of a domain can send into
    the network, of which a ring uses one; and Ulysses on as many ranks of one domain as possible, if it sends less than a
    ring."""
    found, domain = [ContextExchange()], max(1, domain_of(cluster) // tensor)
    if 1 < domain < context:
        found.append(ContextExchange("gather"))
    attentions = [block.attention for block in set(model.blocks) if block.attention]
    for ranks in reversed(_powers(min(domain, context))[1:]):
        if attentions and all(_sends_less(attention, tensor, ranks) for attention in attentions):
            return [*found, ContextExchange(ulysses=ranks)]
    return found


def _sends_less(attention: AttentionSpec | LatentAttentionSpec, tensor: int, ranks: int) -> bool:
    """True if Ulysses sends fewer bytes than a ring of the same ranks: queries, outputs and each rank's keys once, instead of
    all keys `ranks - 1` times."""
    grouped = isinstance(attention, AttentionSpec)
    if attention.heads % (tensor * ranks) or (grouped and attention.own):
        return False
    heads = attention.heads // tensor
    shared = max(1, attention.kv_heads // tensor) if grouped else heads
    return heads + shared * ranks // gcd(ranks, shared) < ranks * shared


def _pipelines(model: ModelSpec, devices: int) -> list[int]:
    return _sizes(devices, min(devices, len(model.blocks)))


def _experts(model: ModelSpec, ranks: int, tensor: int) -> list[tuple[int, int]]:
    """Return pairs: a size of the expert axis, which divides the number of experts, and the number of parts of an expert; their product
    divides `ranks`. Experts at least as wide as the model may be split like attention; matrix products of smaller experts are already
    small."""
    mixtures = [block.mlp for block in set(model.blocks) if isinstance(block.mlp, MoeSpec)]
    if not mixtures:
        return [(1, 1)]
    most = min(mlp.experts for mlp in mixtures)
    wide = all(mlp.hidden >= model.dim and mlp.hidden % tensor == 0 for mlp in mixtures)
    return [
        (size, parts)
        for size, parts in product(_powers(most), (1, tensor) if wide and tensor > 1 else (1,))
        if ranks % (size * parts) == 0 and all(mlp.experts % size == 0 for mlp in mixtures) and size >= min(8, most)
    ]


def _schedules(model: ModelSpec, pipeline: int, rounds: int, space: Space) -> list[tuple[str, int]]:
    if pipeline == 1:
        return [("1f1b", 1)]
    blocks = len(model.blocks)
    chunked = range(2, space.most_chunks + 1) if rounds >= pipeline else ()
    found = [("1f1b", 1)]
    for chunks in chunked:
        stages = pipeline * chunks
        if blocks % stages == 0 or (blocks + 2) % stages == 0:
            found.append(("interleaved", chunks))
    for name in suited(space.schedules, model):
        chunks = SCHEDULES[name].chunks.usual
        valid = not schedule_problems(name, ranks=pipeline, microbatches=rounds, chunks=chunks)
        if valid and rounds >= pipeline and pipeline * chunks <= blocks:
            found.append((name, chunks))
    return found


class Share(NamedTuple):
    """Sharding of the state: the ZeRO stage, and the number of copies."""

    zero: Zero
    copies: int


def _shares(cluster: ClusterSpec, data: int, context: int, stride: int, pipeline: int, space: Space) -> list[Share]:
    if data * context == 1:
        return [Share(0, 1)]
    found = [Share(zero, 1) for zero in space.zero if zero < 2 or pipeline == 1]
    if space.copies and 3 in space.zero and pipeline == 1:
        node = max(1, cluster.per_node // stride)
        groups = {2, *(data // (node * times) for times in (1, 8, 64) if data % (node * times) == 0)}
        found += [Share(3, copies) for copies in sorted(groups) if 1 < copies < data and data % copies == 0]
    return found
