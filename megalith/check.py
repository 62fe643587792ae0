"""Every rule of legality, and the field's advice, over a run's description: arithmetic and looks at files; no torch, all findings at once.

A rule is a small function from a Case to the problems it sees. RULES lists them; a new rule is a function and a line there.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib.metadata import version
from importlib.util import find_spec
from math import gcd
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from megalith.checkpoint import folder as checkpoints
from megalith.data.errors import DataError
from megalith.data.manifest import Domain, Manifest, check_copies, check_sizes, check_tokenizer, read_manifest
from megalith.mesh import Mesh
from megalith.schedule.table import misfits
from megalith.spec import cluster as clusters
from megalith.spec import families
from megalith.spec.base import AbsentError
from megalith.spec.cluster import ClusterSpec
from megalith.spec.model import AttentionSpec, BlockSpec, LatentAttentionSpec, MambaSpec, MlpSpec, ModelSpec, MoeSpec
from megalith.spec.plan import Plan
from megalith.spec.problem import Problem, SpecErrors, near
from megalith.spec.run import RunSpec
from megalith.spec.toml import dotted, key, literal
from megalith.spec.validate import leaves

__all__ = ["MAY_CHANGE", "RULES", "Case", "Problem", "check", "check_resume"]

PARTS: dict[str, tuple[str, ...]] = {
    "attend": (),
    "attention": ("attend",),
    "attention.core": ("attention", "attend"),
    "attention_norm": ("attend",),
    "mamba": ("attend",),
    "mamba.core": ("mamba", "attend"),
    "mamba_norm": ("attend",),
    "mlp": (),
    "mlp.experts": ("mlp",),
    "mlp.shared": ("mlp",),
    "mlp_norm": ("attend",),
}
"""The parts of a block that selective recomputation can name -> those that have this one in them."""

WIDTH = {"fp32": 4, "bf16": 2}
"""Bytes of a number, by precision."""

COMPILES_COLLECTIVES = (2, 15)
"""The first PyTorch that is shown to compile blocks that are split among ranks to the right gradients; 2.11 was seen not to."""

NAMED = 5
"""Damaged files of a folder that are named one by one."""

STATE_BYTES, GRADIENT_BYTES = 16, 4
"""Bytes a parameter: master weight, gradient and AdamW's two moments, each fp32 (Rajbhandari et al. 2019); of these the gradient."""

MAY_CHANGE: dict[str, str] = {
    "name": "a label",
    "cluster": "what MFU is measured against",
    "plan": "where the work happens, never its result (but see _other_sets)",
    "data.path": "where the data lies; that it is the same data is checked by its manifest's digest",
    "data.copies": "the same",
    "train.steps": "a run may be made longer",
    "train.device": "where the work happens",
    "validation": "looks at the weights and leaves them as they are",
    "checkpoint": "the same",
    "log": "what is written besides the event log",
    "launch": "ranks and their limits",
    "fleet": "how faults are met",
}
"""What may differ when a run is resumed, and why: keys, or whole tables."""

SPLIT_BACKWARD = ("zb-h1", "zb-h2", "zb-v", "dualpipe", "dualpipev")
"""Schedules that put weight gradients off."""

Found = Iterator[Problem]


@dataclass(frozen=True)
class Case:
    """What the rules look at. `world`: ranks there are, where known. `files`: whether to look at the disk. `begun`: whether the run has
    checkpoints to go on from."""

    spec: RunSpec
    world: int | None
    files: bool
    begun: bool = False

    @property
    def plan(self) -> Plan:
        return self.spec.plan

    @cached_property
    def model(self) -> ModelSpec | None:
        """The model as parts; None when its sizes do not make one (rules about its sizes say why)."""
        try:
            return self.spec.model.build()
        except ValidationError:
            return None

    @cached_property
    def blocks(self) -> dict[BlockSpec, str]:
        """Each distinct block and the name of the first of its kind."""
        kinds: dict[BlockSpec, str] = {}
        for number, block in enumerate(self.model.blocks if self.model else ()):
            kinds.setdefault(block, f"blocks.{number}")
        return kinds

    @cached_property
    def cluster(self) -> ClusterSpec | None:
        """The cluster; None when it is this machine, or unknown."""
        try:
            return None if self.spec.cluster == "local" else clusters.load(self.spec.cluster)
        except SpecErrors:
            return None

    @cached_property
    def manifest(self) -> Manifest | None:
        """The prepared data's manifest; None when there is none to read."""
        try:
            return read_manifest(Path(self.spec.data.path)) if self.files else None
        except (DataError, OSError):
            return None

    @cached_property
    def block_parameters(self) -> int:
        """Parameters of all blocks."""
        return sum(_parameters(block, self.model.dim) for block in self.model.blocks) if self.model else 0


def check(
    spec: RunSpec,
    *,
    world: int | None = None,
    files: bool = True,
    begun: bool = False,
    provenance: Mapping[str, str] | None = None,
) -> list[Problem]:
    """Every problem of a run, errors first. Empty: it is legal and follows the field's advice.

    `world` is the number of ranks there are, where known; with `files=False` nothing on disk is looked at; a run that has `begun` goes
    on from checkpoints of its own. `provenance` (from `spec.files`) tells where values came from. Of a spec with values that are not
    there (`spec.files.read`), rules say what they can without them.
    """
    case = Case(spec, world, files, begun)
    found = [problem for rule in RULES for problem in _seen(rule, case)]
    origins = provenance or {}
    return sorted((replace(p, source=origins.get(p.key, "")) for p in found), key=lambda p: p.severity != "error")


def _seen(rule: Callable[[Case], Found], case: Case) -> Found:
    """What a rule finds until it asks for a value that is not there."""
    with suppress(AbsentError):
        yield from rule(case)


def check_resume(saved: RunSpec, asked: RunSpec, *, provenance: Mapping[str, str] | None = None) -> list[Problem]:
    """What would make the run `asked` for another one than the `saved` run it is to go on with; empty when it may."""
    before = {dotted(leaf.path): leaf.value for leaf in leaves(saved)}
    now = {dotted(leaf.path): leaf.value for leaf in leaves(asked)}
    changed = [name for name in dict.fromkeys([*now, *before]) if now.get(name) != before.get(name)]
    reason = "the run in this folder has {}, and would no longer be the same run"
    way_out = "Set it back, or start another run with --run-dir."
    found = [
        _error(name, now.get(name), reason.format(literal(before.get(name))), way_out)
        for name in changed
        if not {name, name.partition(".")[0]} & set(MAY_CHANGE)
    ]
    found += _other_sets(saved, asked.plan, "plan")
    return [replace(problem, source=(provenance or {}).get(problem.key, "")) for problem in found]


def _other_sets(run: RunSpec, plan: Plan, name: str) -> Found:
    """Why a run could not go on under another plan, called `name`: its balance loss would be over other sets of tokens."""
    before, now = run.plan.set_sequences, plan.set_sequences
    if before != now and run.model.build().balances_microbatches:
        field = "data" if plan.data != run.plan.data else "microbatch"
        reason = (
            f"with {name}.data x {name}.microbatch = {now} balances experts over sets of {now} sequences, and the run over sets of "
            f"{before}: it would no longer be the same run"
        )
        way_out = (
            f'Use {name}.data x {name}.microbatch = {before}. Runs with model.balance_set = "sequence" are free to change it.'
        )
        yield _error(f"{name}.{field}", getattr(plan, field), reason, way_out)


def _error(name: str, value: Any, reason: str, way_out: str) -> Problem:
    return Problem("error", name, value, reason, way_out)


def _advice(name: str, value: Any, reason: str, way_out: str) -> Problem:
    return Problem("advice", name, value, reason, way_out)


# --- the model


def heads_make_up_the_width(case: Case) -> Found:
    """Attention heads split the width evenly, share keys evenly, and have pairs of channels to rotate."""
    model = case.spec.model
    implied = getattr(model, "head_dim", 0) is None  # the heads' width follows from dim
    if implied and model.dim % model.heads:
        way_out = _divisors("heads", model.dim, model.heads)
        yield _error("model.heads", model.heads, f"does not divide model.dim = {model.dim}", way_out)
    # blocks of one model differ in other things
    attention = next((block.attention for block in case.blocks if block.attention), None)
    if isinstance(attention, AttentionSpec) and attention.heads % attention.kv_heads:
        reason = f"does not divide model.heads = {attention.heads}, so groups of heads would share keys unevenly"
        way_out = _divisors("kv_heads", attention.heads, attention.kv_heads)
        yield _error("model.kv_heads", attention.kv_heads, reason, way_out)
    if isinstance(attention, AttentionSpec) and attention.rope and attention.head_dim % 2:
        name = "heads" if implied else "head_dim"
        reason = f"gives heads of {attention.head_dim} channels, and rotary positions turn channels in pairs"
        yield _error(f"model.{name}", getattr(model, name), reason, f"Use an even head_dim, such as {attention.head_dim + 1}.")
    if isinstance(attention, LatentAttentionSpec) and attention.rope_dim % 2:
        reason = "is odd, and rotary positions turn channels in pairs"
        yield _error("model.rope_dim", attention.rope_dim, reason, f"Use {attention.rope_dim + 1}, say.")
    groups, mamba_heads = getattr(model, "mamba_groups", 1), getattr(model, "mamba_heads", 1)
    if mamba_heads % groups:
        reason = f"does not divide model.mamba_heads = {mamba_heads}, so groups would have unequal numbers of heads"
        yield _error("model.mamba_groups", groups, reason, _divisors("mamba_groups", mamba_heads, groups))


def sequences_fit_the_context(case: Case) -> Found:
    """Positions beyond the model's context were never meant; learned ones are not there."""
    length, context = case.spec.train.seq_len, case.spec.model.context
    learned = case.model.embedding.positions if case.model else None
    if learned is not None and length > learned:
        reason = f"goes beyond the {learned} positions that this model learns a vector each for"
        yield _error("train.seq_len", length, reason, f"Use seq_len <= {learned}, or set model.context = {length}.")
    elif length > context:
        reason = f"goes beyond model.context = {context}, the longest sequence the positions are meant for"
        yield _advice("train.seq_len", length, reason, f"Use seq_len <= {context}, or set model.context = {length}.")


# --- the mesh


def replicate_divides_data(case: Case) -> Found:
    """Copies of the state are groups of equal size."""
    plan = case.plan
    if plan.data % plan.replicate:
        reason = f"does not divide plan.data = {plan.data}"
        yield _error("plan.replicate", plan.replicate, reason, _divisors("replicate", plan.data, plan.replicate))
    elif plan.replicate > 1 and plan.zero == 0:
        reason = "changes nothing with plan.zero = 0, which copies everything"
        yield _advice("plan.replicate", plan.replicate, reason, "Leave it out.")


def ranks_match_the_plan(case: Case) -> Found:
    """A plan uses every rank there is, and no more."""
    plan = case.plan
    axes = [("data", plan.data), ("context", plan.context), ("tensor", plan.tensor), ("pipeline", plan.pipeline)]
    sizes = " x ".join(f"{name} {size}" for name, size in axes if name != "context" or size > 1)
    need = f"{sizes} = {plan.ranks} ranks are needed"
    fixed = plan.context * plan.tensor * plan.pipeline
    if case.world is not None and case.world != plan.ranks:
        fits = case.world % fixed == 0
        way_out = f"Use plan.data = {case.world // fixed}" if fits else f"Start a multiple of {fixed} ranks"
        yield _error("plan.data", plan.data, f"{need}, and {case.world} were started", f"{way_out}, or start {plan.ranks} ranks.")
    counted = ":" in case.spec.cluster or case.spec.cluster.endswith(".toml")  # a bare name is any number of them
    if case.cluster and counted and case.cluster.count < plan.ranks:
        reason = f"has {case.cluster.count} devices, and {need}"
        way_out = f"Use {case.cluster.accelerator.name}:{plan.ranks}, or a smaller plan."
        yield _error("cluster", case.spec.cluster, reason, way_out)


def nodes_share_the_ranks(case: Case) -> Found:
    """A node fills a place of the mesh with as many ranks as any other."""
    ranks, nodes = case.plan.ranks, case.spec.fleet.nodes
    if ranks % nodes:
        yield _error("fleet.nodes", nodes, f"does not divide the plan's {ranks} ranks", _divisors("fleet.nodes", ranks, nodes))


def tensor_divides_the_model(case: Case) -> Found:
    """Tensor parallelism splits heads, hidden channels, vocabulary and (with `sequence`) the sequence evenly."""
    if case.plan.tensor == 1 or case.model is None:
        return
    whole = _split_sizes(case)
    if case.plan.sequence:
        whole["seq_len", "train"] = case.spec.train.seq_len
    legal = gcd(*whole.values())
    for (what, where), size in whole.items():
        if size % case.plan.tensor:
            way_out = _divisors("tensor", legal, case.plan.tensor)
            way_out += " Or plan.sequence = false." if what == "seq_len" else ""
            yield _error("plan.tensor", case.plan.tensor, f"does not divide {what} = {size} ({where})", way_out)


def kv_heads_meet_the_tensor_ranks(case: Case) -> Found:
    """Tensor ranks share out the heads of keys and values, or each has the one that its queries need."""
    tensor = case.plan.tensor
    for block, name in case.blocks.items():
        heads = block.attention.kv_heads if isinstance(block.attention, AttentionSpec) else tensor
        if heads % tensor and tensor % heads:
            reason = f"neither divides kv_heads = {heads} ({name}.attention) nor is a multiple of it"
            yield _error("plan.tensor", tensor, reason, _divisors("tensor", heads, tensor))


def context_divides_the_sequence(case: Case) -> Found:
    """Each context rank has one early and one late part of every sequence; Ulysses' ranks exchange whole heads."""
    plan, length = case.plan, case.spec.train.seq_len
    if plan.context % plan.ulysses:
        yield _error(
            "plan.ulysses",
            plan.ulysses,
            f"does not divide plan.context = {plan.context}",
            _divisors("ulysses", plan.context, plan.ulysses),
        )
    if plan.context == 1:
        return
    if mixed := next((name for block, name in case.blocks.items() if block.mamba), None):
        reason = f"splits sequences, and the state of Mamba-2 ({mixed}.mamba) would have to pass from rank to rank"
        way_out = (
            "Use context = 1; Mamba-2 keeps little for long sequences, and tensor, recomputation or more data ranks help too."
        )
        yield _error("plan.context", plan.context, reason, way_out)
    unit = 2 * plan.context * (plan.tensor if plan.sequence else 1)
    if length % unit:
        reason = f"is no multiple of 2 x context {plan.context}" + (f" x tensor {plan.tensor}" if unit > 2 * plan.context else "")
        yield _error(
            "train.seq_len", length, f"{reason} = {unit}", f"Use seq_len = {_up(length, unit)}, say, or a smaller plan.context."
        )
    for block, name in case.blocks.items():
        heads, split = block.attention.heads if block.attention else 0, plan.tensor * plan.ulysses
        if plan.ulysses > 1 and heads % split:
            reason = f"with tensor = {plan.tensor} does not divide heads = {heads} ({name}.attention)"
            yield _error("plan.ulysses", plan.ulysses, reason, "Use a smaller ulysses; the rest of the context is a ring.")


def experts_have_ranks(case: Case) -> Found:
    """Expert ranks are taken from those of one pipeline rank; they share out experts, and split the width of each, evenly."""
    plan = case.plan
    moes = {name: block.mlp for block, name in case.blocks.items() if isinstance(block.mlp, MoeSpec)}
    asked = [name for name in ("expert", "expert_tensor") if getattr(plan, name) > 1]
    if asked and case.model is not None and not moes:
        for name in asked:
            yield _error(f"plan.{name}", getattr(plan, name), "shares out experts, and the model has none", "Use 1.")
        return
    ranks = plan.data * plan.context * plan.tensor
    if ranks % (plan.expert * plan.expert_tensor):
        product = plan.expert * plan.expert_tensor
        reason = f"x expert_tensor {plan.expert_tensor} = {product} does not divide data x context x tensor = {ranks}"
        way_out = f"Use a product that does: {', '.join(str(d) for d in range(1, ranks + 1) if ranks % d == 0)}."
        yield _error("plan.expert", plan.expert, reason, way_out)
    for name, moe in moes.items():
        if moe.experts % plan.expert:
            reason = f"does not divide the {moe.experts} experts ({name}.mlp)"
            yield _error("plan.expert", plan.expert, reason, _divisors("expert", moe.experts, plan.expert))
        if moe.hidden % plan.expert_tensor:
            reason = f"does not divide an expert's width {moe.hidden} ({name}.mlp)"
            yield _error(
                "plan.expert_tensor", plan.expert_tensor, reason, _divisors("expert_tensor", moe.hidden, plan.expert_tensor)
            )


def routing_is_learnt(case: Case) -> Found:
    """Tokens that are dealt out go to experts that know nothing of them."""
    if any(isinstance(block.mlp, MoeSpec) and block.mlp.router.balanced for block in case.blocks):
        reason = "sends tokens to experts in turn, whatever their scores: it measures speed, and learns no routing"
        yield _advice("model.balanced", True, reason, "Leave it out of a run whose weights are wanted.")


def fallback_is_the_same_run(case: Case) -> Found:
    """The plan to go on with when nodes are gone leaves the sets of tokens as they are."""
    if case.spec.fleet.fallback is not None and case.model is not None:
        yield from _other_sets(case.spec, case.spec.fleet.fallback, "fleet.fallback")


def fallback_can_be_run(case: Case) -> Found:
    """The plan to go on with is as legal as the run's own, on fewer nodes with as many ranks each."""
    fleet, ranks = case.spec.fleet, case.plan.ranks
    if fleet.fallback is None or fleet.nodes == 1 or ranks % fleet.nodes:
        return
    each, needed = ranks // fleet.nodes, fleet.fallback.ranks
    if needed % each or needed >= ranks:
        reason = f"has {needed} ranks, and whole nodes of {each} ranks each must hold them, fewer than the run's {fleet.nodes}"
        yield _error("fleet.fallback", needed, reason, f"Use a plan of {each} to {ranks - each} ranks, a multiple of {each}.")
    spec = case.spec.model_copy(
        update={"plan": fleet.fallback, "fleet": fleet.model_copy(update={"fallback": None, "nodes": max(1, needed // each)})}
    )
    for problem in check(spec, files=False):
        if problem.severity == "error" and problem.key.startswith("plan"):
            yield replace(problem, key=f"fleet.fallback{problem.key.removeprefix('plan')}")


def batch_divides(case: Case) -> Found:
    """Every data rank computes equally many whole microbatches."""
    plan, batch = case.plan, case.spec.train.global_batch
    unit = plan.data * plan.microbatch
    if batch % unit:
        near_ones = " or ".join(str(n) for n in (batch // unit * unit, _up(batch, unit)) if n)
        reason = f"is no multiple of plan.data {plan.data} x plan.microbatch {plan.microbatch} = {unit}"
        smaller = max((m for m in range(1, plan.microbatch) if batch % (plan.data * m) == 0), default=None)
        also = f", or plan.microbatch = {smaller}" if smaller else ""
        yield _error("train.global_batch", batch, reason, f"Use {near_ones}{also}.")


# --- the pipeline


def every_stage_has_a_block(case: Case) -> Found:
    """A stage without a block would only pass messages on."""
    stages, blocks = case.plan.stages, case.spec.model.layers
    if stages > blocks:
        reason = f"with chunks = {case.plan.chunks} makes {stages} stages, and the model has {blocks} blocks"
        yield _error("plan.pipeline", case.plan.pipeline, reason, f"Use pipeline x chunks <= {blocks}.")


def layers_fill_the_stages(case: Case) -> Found:
    """An explicit split names every stage and places every block."""
    layers, stages, blocks = case.plan.layers, case.plan.stages, case.spec.model.layers
    if layers is None or stages > blocks:
        return
    share, more = divmod(blocks, stages)
    way_out = f"Use {[share + (s < more) for s in range(stages)]}, say, or leave it out."
    if len(layers) != stages:
        yield _error("plan.layers", layers, f"names {len(layers)} stages, and pipeline x chunks makes {stages}", way_out)
    if sum(layers) != blocks:
        yield _error("plan.layers", layers, f"places {sum(layers)} blocks, and the model has {blocks}", way_out)


def schedule_can_be_built(case: Case) -> Found:
    """The schedule is there, and runs on this many ranks, microbatches and chunks, under this ZeRO stage."""
    plan = case.plan
    fields = {"ranks": "pipeline", "microbatches": "microbatch"}
    if case.spec.microbatches:  # else the batch does not divide, which another rule says
        for misfit in misfits(
            plan.schedule, ranks=plan.pipeline, microbatches=case.spec.microbatches, chunks=plan.chunks, zero=plan.zero
        ):
            yield _error(f"plan.{fields.get(misfit.field, misfit.field)}", misfit.value, misfit.reason, misfit.way_out)
    if plan.schedule == "interleaved" and plan.chunks == 1 and plan.pipeline > 1:
        yield _advice("plan.chunks", 1, 'interleaves nothing with schedule = "interleaved"', "Use chunks = 2 or more.")


def zero_bubble_is_worth_its_memory(case: Case) -> Found:
    """ZB-H2 fills the bubble only if the next step may begin before the global norm is known (Qi et al. 2024, section 4)."""
    plan = case.plan
    if plan.schedule == "zb-h2" and not plan.post_validation and plan.pipeline > 1:
        reason = (
            f"keeps up to {2 * plan.pipeline - 1} microbatches in flight, and still waits for all ranks at the end of each step"
        )
        yield _advice(
            "plan.schedule", plan.schedule, reason, 'Use plan.post_validation = true, or "zb-h1", which keeps half of that.'
        )
    if plan.compile and plan.schedule in SPLIT_BACKWARD:
        reason = "compiles blocks whole, so that no weight gradient can be put off"
        yield _advice("plan.compile", True, f'{reason}, which schedule = "{plan.schedule}" counts on', "Use one or the other.")


def journeys_can_hide(case: Case) -> Found:
    """What travels in pieces is started and awaited between products, which a compiler would have to see through."""
    plan = case.plan
    if plan.overlap_tensor > 1 and plan.compile:
        reason = "with compile = true, whose blocks are compiled whole"
        yield _error("plan.overlap_tensor", plan.overlap_tensor, reason, "Use one or the other.")


def compiler_keeps_collectives(case: Case) -> Found:
    """Older compilers leave out of backward what tensor ranks add up there, and say nothing (tests/promises/test_any_plan.py)."""
    plan = case.plan
    split = next((axis for axis in ("tensor", "context", "expert") if getattr(plan, axis) > 1), None)
    if not plan.compile or split is None:
        return
    installed = version("torch")  # read from disk
    if tuple(map(int, installed.split(".")[:2])) < COMPILES_COLLECTIVES:
        reason = (
            f"with plan.{split} = {getattr(plan, split)} on torch {installed}, seen to compile such blocks to wrong gradients"
        )
        yield _error("plan.compile", True, reason, f"Use torch {'.'.join(map(str, COMPILES_COLLECTIVES))}, or compile = false.")


def second_copies_are_worth_it(case: Case) -> Found:
    """DualPipe keeps every stage twice, for a bubble hardly smaller than DualPipeV's on the same ranks (Sea AI Lab, "cut in half")."""
    plan, ranks, microbatches = case.plan, case.plan.pipeline, case.spec.microbatches
    if plan.schedule != "dualpipe" or ranks == 1 or case.model is None or len(case.model.blocks) < 2 * ranks:
        return
    other = plan.model_copy(update={"schedule": "dualpipev", "chunks": 2})
    reason = f"keeps a second copy of each stage, about {_size(_state_bytes(case, plan) - _state_bytes(case, other))} a rank"
    if microbatches >= 2 * ranks:  # else both idle for more than these, which are exact where F = I = W and nothing is hidden
        own, theirs = (ranks - 2) / (3 * microbatches), (ranks - 1) / (3 * microbatches)
        reason += f", and idles for {own:.1%} of the useful time where 'dualpipev' idles for {theirs:.1%}"
    way_out = "Use schedule = 'dualpipev' and chunks = 2, unless twice the messages between stages cost more."
    yield _advice("plan.schedule", plan.schedule, reason, way_out)


def bubble_is_small(case: Case) -> Found:
    """Many more microbatches than stages, or ranks wait (Narayanan et al. 2021: (p - 1) / m of the useful time)."""
    plan, microbatches = case.plan, case.spec.microbatches
    if plan.pipeline == 1 or not 0 < microbatches < 4 * plan.pipeline or plan.schedule not in ("gpipe", "1f1b", "interleaved"):
        return
    chunks = plan.chunks if plan.schedule == "interleaved" else 1
    bubble = (plan.pipeline - 1) / (microbatches * chunks)
    reason = f"over {microbatches} microbatches leaves each rank idle for {bubble:.1%} of its useful time"
    more = 4 * plan.pipeline * plan.data * plan.microbatch
    way_out = f"Use train.global_batch >= {more}, a smaller microbatch or fewer stages."
    yield _advice("plan.pipeline", plan.pipeline, reason, way_out)


def tied_weights_stay_together(case: Case) -> Found:
    """A tied embedding is kept, and its gradient exchanged, at both ends of a pipeline."""
    model = case.spec.model
    if model.tied and case.plan.pipeline > 1:
        size = _size(4 * model.vocab * model.dim // case.plan.tensor)
        reason = f"with pipeline = {case.plan.pipeline} keeps the matrix at both ends, which exchange {size} every step"
        yield _advice("model.tied", True, reason, "Use tied = false, or no pipeline, if that is much beside the model.")


# --- memory


def recomputation_names_what_exists(case: Case) -> Found:
    """Recomputation names blocks and parts that there are."""
    plan, blocks = case.plan, case.spec.model.layers
    if plan.recompute.startswith("every:") and int(plan.recompute.removeprefix("every:")) > blocks:
        reason = f"counts past the model's {blocks} blocks"
        yield _error("plan.recompute", plan.recompute, reason, f"Use every:N with N <= {blocks}.")
    for part in plan.recompute_parts:
        if part not in PARTS:
            nearest = near(part, PARTS)
            hint = f'Did you mean "{nearest}"? ' if nearest else ""
            way_out = f"{hint}Known: {', '.join(PARTS)}."
            yield _error("plan.recompute_parts", plan.recompute_parts, f'"{part}" is no part of a block', way_out)
    if plan.recompute == "selective" and not plan.recompute_parts:
        way_out = 'Use ["attention.core"], or recompute = "none".'
        yield _error("plan.recompute_parts", (), 'names nothing, with recompute = "selective"', way_out)
    nested = [(part, outer) for part in plan.recompute_parts for outer in PARTS.get(part, ()) if outer in plan.recompute_parts]
    if plan.recompute == "selective" and nested:
        reason = "{} is computed a third time, inside {}".format(*nested[0])
        yield _advice("plan.recompute_parts", plan.recompute_parts, reason, "Name the outer part only.")


def state_fits(case: Case) -> Found:
    """Weights, gradients and moments alone fit the device."""
    memory = case.cluster.accelerator.memory if case.cluster else None
    if memory is None or case.model is None or case.plan.data % case.plan.replicate:
        return
    held = _state_bytes(case, case.plan)
    if held > memory:
        sharded = _state_bytes(case, case.plan.model_copy(update={"zero": 3, "replicate": 1}))
        name = case.cluster.accelerator.name if case.cluster else ""
        reason = f"keeps at least {_size(held)} of weights, gradients and moments a rank, and {name} has {_size(memory)}"
        way_out = f"plan.zero = 3 would keep {_size(sharded)}. " if sharded < held else ""
        yield _error("plan.zero", case.plan.zero, reason, f"{way_out}Use more of tensor, pipeline or data, or a smaller model.")


def optimizer_is_sharded(case: Case) -> Found:
    """ZeRO-1 costs no communication and saves most of the optimizer's memory (Rajbhandari et al. 2019)."""
    plan = case.plan
    if plan.zero == 0 and plan.data > 1:
        moments = 8 * case.block_parameters // (plan.tensor * plan.pipeline)
        reason = f"keeps {_size(moments)} of optimizer moments on each of {plan.data} data ranks"
        yield _advice("plan.zero", 0, reason, f"zero = 1 keeps {_size(moments // plan.data)}, for the same bytes exchanged.")


def long_sequences_recompute(case: Case) -> Found:
    """Activations grow with the sequence; recomputing trades them for time."""
    plan, train = case.plan, case.spec.train
    if plan.recompute != "none" or case.model is None or case.spec.microbatches == 0:
        return
    saved = sum(_saved_numbers(block, case.model.dim) for block in case.model.blocks)
    in_flight = case.spec.microbatches if plan.schedule == "gpipe" else min(plan.pipeline, case.spec.microbatches)
    tokens = train.seq_len * plan.microbatch * in_flight
    held = saved * tokens * WIDTH[train.precision] / (plan.pipeline * plan.tensor * plan.context)
    memory = case.cluster.accelerator.memory if case.cluster else None
    if held > memory / 2 if memory else train.seq_len >= 16_384:
        reason = f"keeps about {_size(held)} of activations a rank for backward"
        reason += f", of {_size(memory)}" if memory else f" at seq_len = {train.seq_len}"
        inputs = _size(
            held * len(case.model.blocks) * case.model.dim / saved
        )  # of each block, full recomputation keeps its input
        yield _advice("plan.recompute", "none", reason, f'"full" keeps about {inputs}, for a third more computation.')


# --- the machine


def cluster_is_known(case: Case) -> Found:
    """MFU needs a peak that is in the catalogue."""
    if case.spec.cluster != "local":
        try:
            clusters.load(case.spec.cluster)
        except SpecErrors as errors:
            yield from errors.problems


def tensor_stays_on_fast_links(case: Case) -> Found:
    """Tensor parallelism moves activations in every layer: it belongs inside the fastest domain."""
    if case.cluster is None:
        return
    device = case.cluster.accelerator
    if case.plan.tensor > device.scale_up_domain:
        slower = case.cluster.scale_out
        rates = f", from {device.scale_up / 1e9:g} to {slower / 1e9:g} GB/s a device" if device.scale_up and slower else ""
        reason = f"leaves the {device.scale_up_domain} {device.name} that fast links join{rates}"
        way_out = f"Use tensor <= {device.scale_up_domain}, and pipeline or data for more."
        yield _advice("plan.tensor", case.plan.tensor, reason, way_out)


def experts_stay_on_fast_links(case: Case) -> Found:
    """Every layer of experts sends each token there and back: inside a domain that is fast, and over the network it sets the pace."""
    if case.cluster is None:
        return
    device, plan = case.cluster.accelerator, case.plan
    line = plan.expert * plan.expert_tensor
    if line > device.scale_up_domain and plan.expert > 1:
        ranks = f"{line} neighbouring ranks" if plan.expert_tensor > 1 else "these ranks"
        reason = f"takes tokens over {ranks}, beyond the {device.scale_up_domain} {device.name} that fast links join"
        most = max(1, device.scale_up_domain // plan.expert_tensor)
        way_out = (
            f"Use expert <= {most} if that many experts fit a rank; else the messages want hiding, as by dualpipe or dualpipev."
        )
        yield _advice("plan.expert", plan.expert, reason, way_out)


def device_suits(case: Case) -> Found:
    """The device asked for is the cluster's, and computes in the precision asked for."""
    if case.cluster is None:
        return
    train, device = case.spec.train, case.cluster.accelerator
    if train.device != "auto" and (train.device == "cpu") != (device.name == "cpu"):
        yield _error("train.device", train.device, f'contradicts cluster = "{case.spec.cluster}"', 'Use "auto".')
    if device.peak and train.precision not in device.peak:
        rate = f", at fp32's {device.peak['fp32'] / 1e12:g} TFLOP/s at best" if "fp32" in device.peak else ""
        known = ", ".join(device.peak)
        yield _advice("train.precision", train.precision, f"{device.name} only emulates it{rate}", f"It computes in {known}.")


# --- the length of the run


def warmup_and_decay_fit(case: Case) -> Found:
    """Warm-up, and decay after it, end before the run does."""
    steps, optimizer = case.spec.train.steps, case.spec.optimizer
    if optimizer.warmup > steps:
        reason = f"is longer than the run's train.steps = {steps}, which would never reach optimizer.lr"
        yield _error("optimizer.warmup", optimizer.warmup, reason, f"Use warmup <= {steps}, such as {max(1, steps // 20)}.")
    elif optimizer.schedule == "wsd" and optimizer.warmup + round(optimizer.decay * steps) > steps:
        reason = f"of {steps} steps overlaps the {optimizer.warmup} of warm-up"
        way_out = f"Use decay <= {1 - optimizer.warmup / steps:.3g}, or less warm-up."
        yield _error("optimizer.decay", optimizer.decay, reason, way_out)


def long_runs_save(case: Case) -> Found:
    """A long run that saves only at its end loses everything when it dies."""
    steps, every = case.spec.train.steps, case.spec.checkpoint.every
    if every == 0 and steps >= 1000:
        way_out = f"Use checkpoint.every = {max(1, steps // 20)}, say."
        yield _advice("checkpoint.every", 0, f"saves nothing before step {steps}; a run that dies starts over", way_out)


def verification_has_a_replica(case: Case) -> Found:
    """Gradients computed again by whoever computed them show only errors that come and go."""
    plan, fleet = case.plan, case.spec.fleet
    if fleet.recover and fleet.verify_every and not Mesh.of(plan).replica_shift:
        reason = f"finds no gradient that is wrong alike each time: with plan.data = {plan.data} ranks can but repeat their own"
        once = "" if fleet.verify == "all" else ', and with fleet.verify = "one" nothing that training uses'
        way_out = 'Use more data ranks, or fleet.verify = "all" for errors that come once, or verify_every = 0.'
        yield _advice("fleet.verify_every", fleet.verify_every, reason + once, way_out)


def verification_repeats_bits(case: Case) -> Found:
    """What is computed again must give the same bits. Attention in half precision on a GPU adds gradients up in no fixed order."""
    train, fleet, cluster = case.spec.train, case.spec.fleet, case.cluster
    gpu = train.device == "cuda" or (cluster is not None and cluster.accelerator.name != "cpu" and train.device == "auto")
    if gpu and train.precision == "bf16" and fleet.recover and fleet.verify_every:
        reason = "would blame ranks that are right: on GPUs, attention in bf16 does not give the same bits twice"
        yield _error("fleet.verify_every", fleet.verify_every, reason, 'Use verify_every = 0, or train.precision = "fp32".')


# --- files


def data_is_prepared(case: Case) -> Found:
    """The data folder exists and holds a manifest."""
    if not case.files or case.manifest is not None:
        return
    path = Path(case.spec.data.path)
    way_out = f"Make it with: megalith data prepare SOURCE... --tokenizer TOKENIZER --out {path}"
    if not path.is_dir():
        absolute = f" (looked for {path.absolute()}; relative paths start at the current directory)"
        yield _error("data.path", str(path), f"no such folder{absolute}", way_out)
        return
    try:
        read_manifest(path)
    except DataError as error:
        yield _error("data.path", str(path), error.parts[0][0], way_out)
    except OSError as error:
        yield _error("data.path", str(path), f"its manifest.json cannot be read: {error}", "Give a folder that can.")


def data_is_whole(case: Case) -> Found:
    """Shards are there at their full length, with the tokenizer that they were made with, in the folder or in a copy; a copy is of the
    same data."""
    if not case.files:
        return
    path, copies, manifest = Path(case.spec.data.path), [Path(copy) for copy in case.spec.data.copies], case.manifest
    looks = [("data.copies", partial(check_copies, path, manifest, copies))]
    if manifest:
        looks += [
            ("data.path", partial(check_sizes, path, manifest, copies=copies)),
            ("data.path", partial(check_tokenizer, path, manifest)),
        ]
    for name, look in looks:
        try:
            look()
        except DataError as error:
            value = getattr(case.spec.data, name.removeprefix("data."))
            for reason, way_out in error.parts[:NAMED]:
                yield _error(name, value, reason, way_out)
            if len(error.parts) > NAMED:
                yield _error(name, value, f"so it is with {len(error.parts) - NAMED} more of its files", "Mend them likewise.")


def vocabulary_covers_the_tokens(case: Case) -> Found:
    """Every token id has a row in the embedding."""
    if case.manifest is None:
        return
    tokens, vocab = case.manifest.tokenizer.vocab_size, case.spec.model.vocab
    if tokens > vocab:
        reason = f"is smaller than the data's vocabulary of {tokens} tokens"
        unit = case.plan.tensor * case.plan.shards
        yield _error("model.vocab", vocab, reason, f"Use {_up(tokens, unit)}, or data made with a smaller tokenizer.")


def weighted_domains_exist(case: Case) -> Found:
    """A mixture weighs domains the data has, and gives at least one a share."""
    weights = case.spec.data.weights
    if weights is None:
        return
    if not any(weights.values()):
        yield _error("data.weights", weights, "gives no domain a share", "Give one a weight above 0, or leave weights out.")
    if case.manifest is None:
        return
    domains = case.manifest.domains
    for name in weights:
        if name not in domains:
            nearest = near(name, domains)
            way_out = f"{f'Did you mean {nearest}? ' if nearest else ''}It has: {', '.join(domains)}."
            yield _error(f"data.weights.{key(name)}", weights[name], "the data has no such domain", way_out)
    for name in domains:
        if name not in weights:
            reason = "the data has this domain, and the mixture does not say its share"
            yield _error(f"data.weights.{key(name)}", None, reason, f"Set it; {key(name)} = 0 leaves the domain out.")


def weighted_domains_have_text(case: Case) -> Found:
    """A sample needs a token and the next one."""
    weights = case.spec.data.weights
    for name, domain in _read_domains(case).items():
        if domain.train.tokens < 2 and _tokens(case, "train"):  # else no domain has any text, which another rule says
            reason = f"the data has {domain.train.tokens} training tokens of this domain"
            share = None if weights is None else weights[name]
            yield _error(f"data.weights.{key(name)}", share, reason, "Set it to 0, and give the other domains their shares.")


def tensorboard_is_there(case: Case) -> Found:
    """An extra that is asked for is installed."""
    if case.files and case.spec.log.tensorboard and find_spec("tensorboard") is None:
        way_out = 'Install the extra "tensorboard" (uv sync --extra tensorboard), or set log.tensorboard = false.'
        yield _error("log.tensorboard", True, "the package tensorboard is not installed", way_out)


def validation_has_text(case: Case) -> Found:
    """Validation needs held-out tokens."""
    every, held = case.spec.validation.every, _tokens(case, "validation")
    if every and held is not None and held < case.spec.train.seq_len:
        reason = f"the data holds out {held} tokens, less than one sequence of {case.spec.train.seq_len}"
        yield _error("validation.every", every, reason, "Prepare the data with a larger held-out share, or use every = 0.")


def data_is_not_worn_out(case: Case) -> Found:
    """Up to four passes over the data are nearly as good as new data (Muennighoff et al. 2023, arXiv:2305.16264)."""
    train, available = case.spec.train, _tokens(case, "train")
    wanted = train.steps * train.global_batch * train.seq_len
    if available == 0:
        yield _error("data.path", case.spec.data.path, "holds no training tokens", "Prepare it again, from sources with text.")
    elif available and wanted > 4 * available:
        reason = f"reads {wanted:,} tokens, {wanted / available:.1f} times the data's {available:,}; past 4 little is learnt"
        way_out = f"Use steps <= {max(1, 4 * available // (train.global_batch * train.seq_len))}, or more data."
        yield _advice("train.steps", train.steps, reason, way_out)


def disk_takes_copies(case: Case) -> Found:
    """Copies of the state on a node's disk are written from those in memory, into a folder that can be written to."""
    fleet = case.spec.fleet
    if not (fleet.recover and fleet.disk_every):
        return
    if not fleet.memory_every:
        reason = "is of copies that are written from those in memory, and fleet.memory_every = 0 makes none"
        yield _error("fleet.disk_every", fleet.disk_every, reason, f"Use fleet.memory_every = {fleet.disk_every}, say.")
    folder = Path(fleet.disk).absolute()
    there = next(one for one in (folder, *folder.parents) if one.exists())
    if case.files and not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        wrong = "is no folder" if not there.is_dir() else "may not be written to"
        reason = f"{there} {wrong}, so no node could keep copies of the state there"
        yield _error("fleet.disk", fleet.disk, reason, "Give a folder on each node's own disk, or set fleet.disk_every = 0.")


def first_weights_exist(case: Case) -> Found:
    """The checkpoint to start from is there, and of a model of the same sizes."""
    start = case.spec.train.init_from
    if not case.files or start is None or case.begun:
        return
    if not Path(start).exists():
        reason = f"no such checkpoint (looked for {Path(start).absolute()}; relative paths start at the current directory)"
        yield _error("train.init_from", start, reason, "Give a checkpoint folder, or leave it out.")
        return
    try:
        found = checkpoints.find_complete(Path(start))
    except (FileNotFoundError, checkpoints.DamagedCheckpointError) as error:
        yield _error(
            "train.init_from", start, f"no checkpoint to start from: {str(error).rstrip('.')}", "Give another, or leave it out."
        )
        return
    try:
        theirs = families.read(found.meta["spec"]["model"])
        fits = case.model is None or _holds(theirs.build(), case.model)
    except (KeyError, TypeError, ValidationError):
        return  # nothing is said of sizes
    if not fits:
        yield from _other_sizes(theirs, case.spec.model, start)


def _holds(theirs: ModelSpec, ours: ModelSpec) -> bool:
    """Have weights of the one model the sizes of the other's? It may have more blocks."""
    sizes = [[_parameters(block, model.dim) for block in model.blocks] for model in (theirs, ours)]
    return (theirs.dim, theirs.head.vocab) == (ours.dim, ours.head.vocab) and sizes[0][: len(sizes[1])] == sizes[1]


def _other_sizes(theirs: families.Model, ours: families.Model, start: str) -> Found:
    before = {dotted(leaf.path): leaf.value for leaf in leaves(theirs)}
    now = {dotted(leaf.path): leaf.value for leaf in leaves(ours)}
    changed = [name for name in dict.fromkeys([*now, *before]) if name != "name" and now.get(name) != before.get(name)]
    has, wants = (", ".join(f"{name} = {literal(one[name])}" for name in changed if name in one) for one in (before, now))
    way_out = "Give the run's [model] the checkpoint's sizes, or start from another."
    yield _error("train.init_from", start, f"holds weights of a model with {has}, and the run's has {wants}", way_out)


RULES: tuple[Callable[[Case], Found], ...] = (
    heads_make_up_the_width,
    sequences_fit_the_context,
    replicate_divides_data,
    ranks_match_the_plan,
    nodes_share_the_ranks,
    tensor_divides_the_model,
    kv_heads_meet_the_tensor_ranks,
    context_divides_the_sequence,
    experts_have_ranks,
    routing_is_learnt,
    fallback_is_the_same_run,
    fallback_can_be_run,
    batch_divides,
    every_stage_has_a_block,
    layers_fill_the_stages,
    schedule_can_be_built,
    zero_bubble_is_worth_its_memory,
    journeys_can_hide,
    compiler_keeps_collectives,
    second_copies_are_worth_it,
    bubble_is_small,
    tied_weights_stay_together,
    recomputation_names_what_exists,
    state_fits,
    optimizer_is_sharded,
    long_sequences_recompute,
    cluster_is_known,
    tensor_stays_on_fast_links,
    experts_stay_on_fast_links,
    device_suits,
    warmup_and_decay_fit,
    long_runs_save,
    verification_has_a_replica,
    verification_repeats_bits,
    data_is_prepared,
    data_is_whole,
    vocabulary_covers_the_tokens,
    weighted_domains_exist,
    weighted_domains_have_text,
    validation_has_text,
    tensorboard_is_there,
    data_is_not_worn_out,
    disk_takes_copies,
    first_weights_exist,
)


# --- arithmetic


def _split_sizes(case: Case) -> dict[tuple[str, str], int]:
    """What tensor parallelism splits, and where it is: (name, part) -> size."""
    assert case.model is not None
    sizes = {("vocab", "embedding, head"): case.model.embedding.vocab}
    if case.model.embedding.positions is not None:
        sizes["context", "embedding"] = case.model.embedding.positions
    for block, name in case.blocks.items():
        if block.attention:
            sizes["heads", f"{name}.attention"] = block.attention.heads
        if block.mamba:
            sizes["groups", f"{name}.mamba"] = block.mamba.groups  # and with them the heads
        if isinstance(block.mlp, MlpSpec):
            sizes["ffn", f"{name}.mlp"] = block.mlp.hidden
        elif block.mlp and block.mlp.shared:
            sizes["shared", f"{name}.mlp"] = block.mlp.shared
    return sizes


def _parameters(block: BlockSpec, dim: int) -> int:
    """Weights of one block. The trainer counts its own; here there is no torch to count with."""
    halves = bool(block.attention or block.mamba) + bool(block.mlp)
    norms = (1 if block.parallel else halves) + (2 if block.post_norms else 0)
    per_norm = dim * (2 if block.norm.kind == "layer" and block.norm.bias else 1)
    mixer = _attention_parameters(block.attention, dim) if block.attention else 0
    mixer += _mamba_parameters(block.mamba, dim) if block.mamba else 0
    return mixer + (_mlp_parameters(block.mlp, dim) if block.mlp else 0) + norms * per_norm


def _attention_parameters(attention: AttentionSpec | LatentAttentionSpec, dim: int) -> int:
    heads = attention.heads
    if isinstance(attention, AttentionSpec):
        channels = attention.head_dim
        biases = (heads + 2 * attention.kv_heads) * channels + dim if attention.bias else 0
        return 2 * dim * (heads + attention.kv_heads) * channels + biases + (2 * channels if attention.qk_norm else 0)
    queries, keys_and_values = heads * (attention.nope_dim + attention.rope_dim), heads * (attention.nope_dim + attention.v_dim)
    rank, kv_rank = attention.q_rank, attention.kv_rank
    of_queries = dim * queries if rank is None else rank * (dim + 1 + queries)
    return of_queries + dim * (kv_rank + attention.rope_dim) + kv_rank * (1 + keys_and_values) + dim * heads * attention.v_dim


def _mamba_parameters(mamba: MambaSpec, dim: int) -> int:
    inner, shared = mamba.heads * mamba.head_dim, 2 * mamba.groups * mamba.state
    return dim * (3 * inner + shared + mamba.heads) + (inner + shared) * (mamba.conv + 1) + 3 * mamba.heads + inner


def _mlp_parameters(mlp: MlpSpec | MoeSpec, dim: int) -> int:
    matrices = 3 if mlp.gated else 2
    if isinstance(mlp, MlpSpec):
        return matrices * dim * mlp.hidden + ((matrices - 1) * mlp.hidden + dim if mlp.bias else 0)
    shared = matrices * dim * mlp.shared + (dim if mlp.shared and mlp.shared_gate else 0)
    return mlp.experts * (matrices * dim * mlp.hidden + dim) + shared


def _saved_numbers(block: BlockSpec, dim: int) -> int:
    """About how many numbers a token leaves in a block for backward, with fused kernels: inputs and outputs of norms; of attention
    queries, keys, values and output; of Mamba-2 what its projections give, the recurrence's output and its norm's; the MLP's gate and
    up, activation(gate) and their product, of each expert it meets."""
    halves = bool(block.attention or block.mamba) + bool(block.mlp)
    return 2 * dim * halves + _saved_by_mixer(block) + (_saved_by_mlp(block.mlp, dim) if block.mlp else 0)


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


def _state_bytes(case: Case, plan: Plan) -> int:
    """At least what a rank holds of the blocks' state; experts are laid out apart. Below ZeRO-3 it also holds whole weights to
    compute with."""
    precision, mesh = case.spec.train.precision, Mesh.of(plan)
    places = max(1, plan.pipeline // plan.sides)  # of stages: the two directions of a pipeline keep each of them twice
    moes = [block.mlp for block in case.model.blocks if isinstance(block.mlp, MoeSpec)] if case.model else []
    experts = sum(moe.experts * (3 if moe.gated else 2) * moe.hidden for moe in moes) * (case.model.dim if case.model else 0)
    held = 0.0
    for parameters, split, shards in (
        (case.block_parameters - experts, plan.tensor, max(1, plan.shards)),  # 0 where it asks for more copies than ranks
        (experts, plan.expert * plan.expert_tensor, max(1, mesh.experts[2])),  # or for more expert ranks
    ):
        whole = WIDTH[precision] if plan.zero < 3 and (shards > 1 or precision == "bf16") else 0
        gradients = GRADIENT_BYTES * (1 if plan.zero < 2 else 1 / shards)  # whole until the end of a step, below ZeRO-2
        undoing = STATE_BYTES / shards if plan.post_validation else 0  # gradients and copies, once those are gone
        held += parameters / (split * places) * ((STATE_BYTES - GRADIENT_BYTES) / shards + max(gradients, undoing) + whole)
    return int(held)


def _tokens(case: Case, split: Literal["train", "validation"]) -> int | None:
    """Tokens of the domains the run reads; None without a manifest."""
    return None if case.manifest is None else sum(getattr(domain, split).tokens for domain in _read_domains(case).values())


def _read_domains(case: Case) -> dict[str, Domain]:
    """Those that the run reads."""
    weights = case.spec.data.weights
    domains = case.manifest.domains if case.manifest else {}
    return {name: domain for name, domain in domains.items() if weights is None or weights.get(name)}


def _up(value: int, unit: int) -> int:
    """The next multiple of `unit`."""
    return -(-value // unit) * unit


def _divisors(name: str, whole: int, near_to: int) -> str:
    """Advice to use the divisors of `whole` around a value that is none."""
    legal = [d for d in range(1, whole + 1) if whole % d == 0]
    below = [d for d in legal if d < near_to][-3:]
    above = [d for d in legal if d > near_to][:1]
    *most, last = map(str, below + above)
    return f"Use {name} = {', '.join(most)} or {last}." if most else f"Use {name} = {last}."


def _size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
