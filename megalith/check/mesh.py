"""Rules about the mesh: the product of the axes equals the number of ranks, and each axis divides the dimension that it
splits."""

from math import gcd

from megalith.check.case import Case, Found, advice, divisors, error, next_multiple
from megalith.spec import cluster as clusters
from megalith.spec.model import AttentionSpec, MlpSpec, MoeSpec
from megalith.spec.sites import unit_of
from megalith.spec.sizes import own_tensors


def replicate_divides_data(case: Case) -> Found:
    """All groups of data ranks with a copy of the state have the same size."""
    plan = case.plan
    if plan.data % plan.replicate:
        reason = f"does not divide plan.data = {plan.data}"
        yield error("plan.replicate", plan.replicate, reason, divisors("replicate", plan.data, plan.replicate))
    elif plan.replicate > 1 and plan.zero == 0:
        reason = "changes nothing: with plan.zero = 0 every data rank has a full copy"
        yield advice("plan.replicate", plan.replicate, reason, "Leave it out.")


def ranks_match_the_plan(case: Case) -> Found:
    """A plan uses exactly the available ranks."""
    plan = case.plan
    axes = [("data", plan.data), ("context", plan.context), ("tensor", plan.tensor), ("pipeline", plan.pipeline)]
    sizes = " x ".join(f"{name} {size}" for name, size in axes if name != "context" or size > 1)
    sites, ranks = case.spec.sites, case.spec.ranks
    need = f"{sizes} = {ranks} ranks are needed{' in each site' if sites else ''}"
    fixed = plan.context * plan.tensor * plan.pipeline
    if case.world is not None and case.world != ranks:
        fits = case.world % fixed == 0
        way_out = f"Use plan.data = {case.world // fixed}" if fits else f"Start a multiple of {fixed} ranks"
        yield error("plan.data", plan.data, f"{need}, but {case.world} were started", f"{way_out}, or start {ranks} ranks.")
    if case.cluster and clusters.counted(case.spec.cluster) and case.cluster.count < ranks:
        reason = f"has {case.cluster.count} devices, but {need}"
        way_out = f"Use {case.cluster.accelerator.name}:{ranks}, or a smaller plan."
        yield error("cluster", case.spec.cluster, reason, way_out)


def tensor_divides_the_model(case: Case) -> Found:
    """Tensor parallelism splits heads, hidden channels, vocabulary and (with `sequence`) the sequence evenly."""
    if case.plan.tensor == 1 or case.model is None:
        return
    whole = _split_sizes(case)
    if case.plan.sequence:
        whole["seq_len", "train"] = case.spec.train.seq_len
    possible = gcd(*whole.values())
    for (what, where), size in whole.items():
        if size % case.plan.tensor:
            way_out = divisors("tensor", possible, case.plan.tensor)
            way_out += " Or plan.sequence = false." if what == "seq_len" else ""
            yield error("plan.tensor", case.plan.tensor, f"does not divide {what} = {size} ({where})", way_out)


def kv_heads_meet_the_tensor_ranks(case: Case) -> Found:
    """Tensor ranks divide the key and value heads evenly, or several ranks share each such head evenly."""
    tensor = case.plan.tensor
    for block, name in case.blocks.items():
        attention = block.attention
        heads = attention.kv_heads if isinstance(attention, AttentionSpec) and not attention.own else tensor
        if heads % tensor and tensor % heads:
            reason = f"neither divides kv_heads = {heads} ({name}.attention) nor is a multiple of {heads}"
            yield error("plan.tensor", tensor, reason, divisors("tensor", heads, tensor))


def context_divides_the_sequence(case: Case) -> Found:
    """Context ranks split every sequence into one early and one late part each; Ulysses ranks exchange whole heads."""
    plan = case.plan
    if plan.context % plan.ulysses:
        yield error(
            "plan.ulysses",
            plan.ulysses,
            f"does not divide plan.context = {plan.context}",
            divisors("ulysses", plan.context, plan.ulysses),
        )
    if plan.context == 1:
        return
    if mixed := next((name for block, name in case.blocks.items() if block.mamba), None):
        reason = f"splits sequences, but Mamba-2 ({mixed}.mamba) cannot pass its state from rank to rank"
        way_out = (
            "Use context = 1. For less memory, use plan.tensor, recomputation or more data ranks; Mamba-2 needs little "
            "memory for long sequences."
        )
        yield error("plan.context", plan.context, reason, way_out)
    for block, name in case.blocks.items():
        heads, split = block.attention.heads if block.attention else 0, plan.tensor * plan.ulysses
        if plan.ulysses > 1 and heads % split:
            reason = f"with tensor = {plan.tensor} does not divide heads = {heads} ({name}.attention)"
            way_out = "Use a smaller ulysses: plan.context_method applies between groups of plan.ulysses context ranks."
            yield error("plan.ulysses", plan.ulysses, reason, way_out)
    length = case.spec.train.seq_len
    unit = 2 * plan.context * (plan.tensor if plan.sequence else 1)
    if length % unit:
        reason = f"is not a multiple of 2 x context {plan.context}{f' x tensor {plan.tensor}' if unit > 2 * plan.context else ''}"
        yield error(
            "train.seq_len",
            length,
            f"{reason} = {unit}",
            f"Use seq_len = {next_multiple(length, unit)}, for example, or a smaller plan.context.",
        )


def experts_have_ranks(case: Case) -> Found:
    """Expert ranks are ranks of one pipeline stage. Expert ranks divide the experts and the width of each expert evenly."""
    plan = case.plan
    moes = {name: block.mlp for block, name in case.blocks.items() if isinstance(block.mlp, MoeSpec)}
    asked = [name for name in ("expert", "expert_tensor") if getattr(plan, name) > 1]
    if asked and case.model is not None and not moes:
        for name in asked:
            yield error(
                f"plan.{name}", getattr(plan, name), "divides experts among ranks, but the model has no experts", "Use 1."
            )
        return
    ranks = plan.data * plan.context * plan.tensor
    if ranks % (plan.expert * plan.expert_tensor):
        product = plan.expert * plan.expert_tensor
        reason = f"x expert_tensor {plan.expert_tensor} = {product} does not divide data x context x tensor = {ranks}"
        way_out = f"Use a product that divides {ranks}: {', '.join(str(d) for d in range(1, ranks + 1) if ranks % d == 0)}."
        yield error("plan.expert", plan.expert, reason, way_out)
    for name, moe in moes.items():
        if moe.experts % plan.expert:
            reason = f"does not divide the {moe.experts} experts ({name}.mlp)"
            yield error("plan.expert", plan.expert, reason, divisors("expert", moe.experts, plan.expert))
        if moe.hidden % plan.expert_tensor:
            reason = f"does not divide an expert's width {moe.hidden} ({name}.mlp)"
            yield error(
                "plan.expert_tensor", plan.expert_tensor, reason, divisors("expert_tensor", moe.hidden, plan.expert_tensor)
            )


def batch_divides(case: Case) -> Found:
    """Every data rank computes the same number of whole microbatches."""
    plan, batch, sites = case.plan, case.spec.train.global_batch, case.spec.sites
    count = sites.parts if sites else 1
    unit = count * unit_of(case.spec)
    if batch % unit:
        near_ones = " or ".join(str(n) for n in (batch // unit * unit, next_multiple(batch, unit)) if n)
        factors = f"{f'sites.count {count} x ' if sites else ''}plan.data {plan.data} x plan.microbatch {plan.microbatch}"
        smaller = max((m for m in range(1, plan.microbatch) if batch % (count * plan.data * m) == 0), default=None)
        if sites and (sites.shares or sites.plans):  # sites that differ in more than their names
            factors, smaller = (
                f"{count} (sum of the sites' shares) x {unit_of(case.spec)} (samples that every site's data ranks can divide)",
                None,
            )
        reason = f"is not a multiple of {factors} = {unit}"
        also = f", or plan.microbatch = {smaller}" if smaller else ""
        yield error("train.global_batch", batch, reason, f"Use {near_ones}{also}.")


def _split_sizes(case: Case) -> dict[tuple[str, str], int]:
    """Return the value of each size that tensor parallelism splits, by (name, part)."""
    assert case.model is not None
    sizes = {("vocab", "embedding, head"): case.model.embedding.vocab}
    if case.model.embedding.positions is not None:
        sizes["context", "embedding"] = case.model.embedding.positions
    for block, name in case.blocks.items():
        declared = own_tensors(block, case.model.dim)
        sizes |= {
            (f"the {each.cut} of {each.name}", f"{name}.{half}"): each.units
            for half, tensors in declared.items()
            for each in tensors
            if each.cut
        }
        if block.attention and "attention" not in declared:
            sizes["heads", f"{name}.attention"] = block.attention.heads
        if block.mamba:
            sizes["groups", f"{name}.mamba"] = block.mamba.groups  # and with them the heads
        if isinstance(block.mlp, MlpSpec) and "mlp" not in declared:
            sizes["ffn", f"{name}.mlp"] = block.mlp.hidden
        elif isinstance(block.mlp, MoeSpec) and block.mlp.shared:
            sizes["shared", f"{name}.mlp"] = block.mlp.shared
    return sizes
