"""Prediction of a forward without backward: the prefill of long prompts. Imports torch only to trace parts."""

from megalith.cost import network
from megalith.cost.constants import Calibration, calibration
from megalith.cost.estimate import Estimate, PartTimes, Time, part_times
from megalith.cost.memory import Memory, RankParts, fits, non_torch, shares
from megalith.cost.parts import Parts, parts
from megalith.cost.profile import Profile
from megalith.cost.time import Setting, SpentSeconds, line
from megalith.cost.workload import Workload
from megalith.spec.model import LatentAttentionSpec
from megalith.spec.numbers import PRECISIONS


def prefill(
    workload: Workload, figures: Calibration | None = None, traced: Parts | None = None, spent: PartTimes | None = None
) -> Estimate:
    """Predict the forward of all sequences, until keys and values of the last sequence exist. Only the last token needs logits, whose
    cost is ignored. `flops` leave out masked pairs of tokens, which are half of all pairs in long prompts."""
    figures = figures or calibration()
    traced = traced or parts(workload)
    setting = Setting.of(workload, figures)
    space = prefill_memory(workload, traced, figures)
    return Estimate(
        time=_time(workload, setting, traced, spent or part_times(traced, setting)),
        memory=space,
        fits=fits(workload, space, setting.overheads),
        limit=workload.cluster.accelerator.memory,
        flops=_flops(workload, traced),
        tokens=workload.tokens,
        devices=workload.cluster.count,
        peak=workload.cluster.accelerator.wide,
    )


def prefill_memory(workload: Workload, traced: Parts, figures: Calibration) -> Memory:
    """Return the memory of the worst rank: weights, the keys and values of all its sequences (`activations`), and temporary
    tensors of one block."""
    reserve = figures.overheads[workload.software_profile.overheads].reserve
    found = [_rank(workload, traced, rank, here, reserve) for rank, here in enumerate(shares(workload, traced).held)]
    return max(found, key=lambda memory: memory.total)


def _rank(workload: Workload, traced: Parts, rank: int, here: RankParts, reserve: float) -> Memory:
    blocks = [(traced.blocks[kind], times) for kind, times in here.blocks]
    ends = (traced.embedding.weights if here.embedding else 0) + (traced.head.weights if here.head else 0)
    numbers = sum((block.weights + block.expert_weights) * times for block, times in blocks)
    working = max((block.saved for block, _ in blocks), default=0.0)
    cache = sum(_cache(workload, kind, traced.blocks[kind]) * times for kind, times in here.blocks) * workload.microbatches
    return Memory(
        weights=PRECISIONS[workload.format].factors.width * numbers + 2.0 * ends, gradients=0.0, optimizer=0.0, activations=cache,
        working=working, logits=0.0, reserve=reserve, non_torch=non_torch(workload), rank=rank,
    )  # fmt: skip


def _cache(workload: Workload, number: int, profile: Profile) -> float:
    """Bytes of one block's keys and values of a microbatch on a rank; latent attention keeps the latents, Mamba-2 its state in
    fp32 (for any length) and the few tokens that its convolution sees. 0 for a user's own attention without a core, whose
    bytes are unknown."""
    block, plan = workload.model.blocks[number], workload.plan
    attention, mamba = block.attention, block.mamba
    tokens = plan.microbatch * workload.seq_len / plan.context
    if mamba is not None:
        inner = mamba.heads * mamba.head_dim
        convolved = (mamba.conv - 1) * (inner + 2 * mamba.groups * mamba.state)
        return plan.microbatch * (4.0 * inner * mamba.state + 2.0 * convolved) / plan.tensor
    if attention is None:
        return 0.0
    if isinstance(attention, LatentAttentionSpec):
        return 2.0 * tokens * (attention.kv_rank + attention.rope_dim)
    core = next((core for core in profile.cores if core.phase == "F"), None)
    if core is None:
        return 0.0
    return 2.0 * tokens * core.kv_heads * (core.qk_dim + core.v_dim)


def _time(workload: Workload, setting: Setting, traced: Parts, spent: PartTimes) -> Time:
    """Return the seconds by purpose: the first sequence passes through all pipeline ranks, and each further sequence adds the time of the
    slowest rank."""
    plan, microbatches = workload.plan, workload.microbatches
    stages = [_stage(here, spent) for here in shares(workload, traced).held]
    slowest = max(stages, key=lambda stage: stage.total)
    sent = 0.0
    if plan.pipeline > 1:
        size = plan.microbatch * workload.seq_len / plan.context / plan.tensor * workload.model.dim * 2
        sent = network.message(size, line("pipeline", workload), setting.wires)
    fill = sum(stage.total for stage in stages) - slowest.total
    busy = slowest * microbatches
    subtotal = busy.total + fill + sent * (plan.pipeline - 1)
    return Time(
        step=subtotal, compute=busy.products + busy.attention + busy.memory + busy.host, tensor=busy.tensor, context=busy.context,
        expert=busy.expert, pipeline=sent * (plan.pipeline - 1), data=0.0, bubble=fill, optimizer=0.0, other=0.0,
    )  # fmt: skip


def _stage(here: RankParts, spent: PartTimes) -> SpentSeconds:
    total = spent.embedding[0] if here.embedding else SpentSeconds()
    for kind, times in here.blocks:
        total = total + spent.blocks[kind][0] * times
    return total


def _flops(workload: Workload, traced: Parts) -> float:
    plan = workload.plan
    known: dict[int, float] = {}
    for block in traced.blocks:
        if id(block) not in known:
            cores = sum(core.flops for core in block.cores if core.phase == "F")
            known[id(block)] = block.flops("F") - cores / 2
    each = sum(known[id(block)] for block in traced.blocks)
    return each * plan.tensor * plan.context * workload.global_batch / plan.microbatch
