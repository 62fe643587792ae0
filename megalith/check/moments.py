"""Rules about moments and master weights in few bits: blocks lie inside shards, and the settings have an effect."""

from collections.abc import Iterator, Mapping
from math import gcd
from typing import NamedTuple

from megalith.check.case import Case, Found, advice, error
from megalith.mesh import Mesh
from megalith.spec.model import ModelSpec
from megalith.spec.numbers import PRECISIONS
from megalith.spec.optimizers import OPTIMIZERS
from megalith.spec.parts import Cut
from megalith.spec.plan import Plan
from megalith.spec.run import OptimizerSpec
from megalith.spec.sizes import Parameter, model_parameters, own_tensors
from megalith.spec.treatment import kinds, takes_small_moments, treatment

INPUTS = ("attention.out.weight", "mamba.out.weight", "mlp.down.weight", "mlp.shared.down.weight")
"""Ends of the names of Megalith's own matrices whose last dimension, the inputs, tensor ranks split."""


class Crossing(NamedTuple):
    """A row of a parameter that the plan cuts inside a block with one scale."""

    name: str
    axis: str
    """Key of the plan."""
    ranks: int
    """The number of ranks that share the row."""
    numbers: int
    """The number of elements in the row."""
    share: int
    """The number of elements of the row on the rank that holds the most."""


def crossings(model: ModelSpec, plan: Plan, optimizer: OptimizerSpec) -> Iterator[Crossing]:
    """Yield the parameters with a block of moments that would lie on two ranks."""
    if optimizer.moments != "fp8":
        return
    shards, declared = max(1, Mesh.of(plan).experts[2]), _declared(model)
    for each in model_parameters(model).values():
        axis, ranks = _cut(each, plan, shards, declared)
        if ranks == 1 or not takes_small_moments(each, optimizer):
            continue
        share = -(-each.shape[-1] // ranks)
        blocked = any(slot.block for slot in treatment(each, optimizer, model.scaling).slots)
        if blocked and share % optimizer.moment_block:
            yield Crossing(each.name, axis, ranks, each.shape[-1], share)


def _declared(model: ModelSpec) -> dict[str, Cut | None]:
    """Return how tensor ranks cut each parameter of a user's own attention or MLP."""
    blocks, ahead = {f"blocks.{number}": block for number, block in enumerate(model.blocks)}, model.head.ahead
    blocks |= {f"head.ahead.{depth}.block": ahead.block for depth in range(ahead.depth)} if ahead else {}
    return {
        f"{name}.{half}.{each.name}": each.cut
        for name, block in blocks.items()
        for half, tensors in own_tensors(block, model.dim).items()
        for each in tensors
    }


def _cut(parameter: Parameter, plan: Plan, shards: int, declared: Mapping[str, Cut | None]) -> tuple[str, int]:
    """Return the axis that cuts a parameter's last dimension, and the number of parts. `shards`: the number of ZeRO shards of
    experts."""
    if parameter.role == "experts":  # inputs of the way up are cut by ZeRO, those of the way down by `expert_tensor`
        return ("expert_tensor", plan.expert_tensor) if parameter.name.endswith("experts.down") else ("data", shards)
    name = parameter.name
    of_inputs = declared[name] == "inputs" if name in declared else name.endswith(INPUTS)
    return "tensor", plan.tensor if of_inputs else 1


def blocks_lie_inside_shards(case: Case) -> Found:
    """Blocks of moments lie inside one rank's share: only then does rounding the share give the same bytes as rounding the whole moment."""
    if case.model is None or case.plan.data % case.plan.replicate:
        return
    block, seen = case.spec.optimizer.moment_block, set[tuple[str, int]]()
    every = list(crossings(case.model, case.plan, case.spec.optimizer))
    fits = gcd(block, *(found.share for found in every))  # shares of whole blocks consist of whole smaller blocks too
    smaller = f"Use optimizer.moment_block = {fits}, or " if fits > 1 else "Use "
    for found in every:
        if (found.axis, found.numbers) in seen:
            continue
        seen.add((found.axis, found.numbers))
        reason = (
            f"leaves a rank {found.share} of the {found.numbers} numbers in a row of {found.name}, which is not a multiple of "
            f"optimizer.moment_block = {block}, so two ranks would share a scale of the moments"
        )
        yield error(f"plan.{found.axis}", getattr(case.plan, found.axis), reason, f'{smaller}optimizer.moments = "bf16".')


def halves_can_be_had(case: Case) -> Found:
    """Split master weights need compute weights in bf16, the upper half of fp32 weights."""
    spec = case.spec
    if spec.optimizer.master == "fp32":
        return
    compute = PRECISIONS[spec.train.precision].compute.name
    if compute != "bf16":
        reason = f"needs compute weights in bf16, the upper half of an fp32 weight, but the compute weights are in {compute}"
        yield error(
            "optimizer.master", spec.optimizer.master, reason, 'Use optimizer.master = "fp32", or train.precision = "bf16".'
        )
    if spec.sites is not None:
        reason = "keeps no fp32 weights, but sites merge weights in fp32"
        yield error("optimizer.master", spec.optimizer.master, reason, 'Use optimizer.master = "fp32", or leave out [sites].')
    if (
        case.plan.zero
        and case.plan.data % case.plan.replicate == 0
        and case.plan.dp_shard > 1
        and Mesh.of(case.plan).experts[2] > 1
        and spec.optimizer.master == "split16"
    ):
        reason = (
            f"saves nothing over {case.plan.dp_shard} shards: a rank keeps 2 + 2 bytes for each weight of its share, "
            "as many as in fp32"
        )
        yield advice(
            "optimizer.master",
            "split16",
            reason,
            'Remove this key, or use optimizer.master = "split8", which keeps 3 bytes for each weight.',
        )


def gradients_in_bf16_are_of_bf16(case: Case) -> Found:
    """Gradient sums in bf16 need gradients that backward computes in bf16."""
    compute = PRECISIONS[case.spec.train.precision].compute.name
    if case.spec.train.gradients == "bf16" and compute != "bf16":
        reason = f"rounds the gradients that backward computes in {compute}"
        yield error("train.gradients", "bf16", reason, 'Use train.gradients = "fp32", or train.precision = "bf16".')


def something_is_small(case: Case) -> Found:
    """Each setting of moments has an effect."""
    spec = case.spec.optimizer
    if spec.moments == "fp32":
        for key in ("moment_block", "moment_least"):
            if key in spec.model_fields_set and getattr(spec, key) != type(spec).model_fields[key].default:
                reason = 'changes nothing with optimizer.moments = "fp32"'
                yield advice(f"optimizer.{key}", getattr(spec, key), reason, 'Remove this key, or use optimizer.moments = "fp8".')
        return
    if spec.moments == "bf16" and "moment_block" in spec.model_fields_set:
        reason = 'changes nothing with optimizer.moments = "bf16", whose numbers have no common scale'
        yield advice("optimizer.moment_block", spec.moment_block, reason, 'Remove this key, or use optimizer.moments = "fp8".')
    if not any(slot.shape == "like" for kind in kinds(spec) for slot in OPTIMIZERS[kind].slots):
        reason = f"changes nothing: {spec.kind} keeps moments of rows and columns, which stay in fp32"
        yield advice("optimizer.moments", spec.moments, reason, "Leave it out.")
    elif case.model is not None and not any(takes_small_moments(each, spec) for each in model_parameters(case.model).values()):
        largest = max(each.numel for each in model_parameters(case.model).values() if each.role in ("matrix", "experts"))
        reason = (
            f"changes nothing: the model's largest matrix has {largest:,} elements, fewer than optimizer.moment_least "
            f"= {spec.moment_least:,}"
        )
        yield advice("optimizer.moments", spec.moments, reason, f"Use moment_least <= {largest}, or remove this key.")
