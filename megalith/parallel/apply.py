"""A plan applied to one stage, part by part, in this order: first weights, tensor split, recomputation, compilation, data shards.

Each part is built whole, filled, split and sharded before the next one exists, so no rank ever holds more than one whole part.
"""

import torch

from megalith.models.init import initialise
from megalith.models.stage import Stage
from megalith.parallel import data
from megalith.parallel.groups import Groups
from megalith.parallel.layout import split_part
from megalith.parallel.recompute import apply_recompute
from megalith.parallel.tensor import Split
from megalith.spec.model import ModelSpec
from megalith.spec.plan import Plan


def build_stage(
    spec: ModelSpec, first: int, last: int, *, plan: Plan, groups: Groups, precision: str, device: torch.device, seed: int | None
) -> Stage:
    """Parts `first` to `last - 1` on `device`, laid out as `plan` says. `seed` None: weights are left unset, to be loaded."""
    with torch.device("meta"):
        stage = Stage(spec, first, last)
    sharded = data.needed(plan, precision)
    split = Split(groups.device_mesh["tensor"], sequence=plan.sequence)
    tied = spec.head.tied and {"embedding", "head"} <= set(stage.part_names)
    for name, part in stage.parts():
        part.to_empty(device=device)
        if seed is not None:
            initialise(part, name=name, spec=spec, seed=seed)
        if name == "head" and tied:  # to_empty made a copy
            stage.head.output.weight = stage.embedding.weight
        if plan.tensor > 1:
            split_part(part, split)
        if name.startswith("blocks."):
            apply_recompute(part, int(name.removeprefix("blocks.")), blocks=len(spec.blocks), plan=plan)
            if plan.compile:
                part.compile()
        if sharded and not (tied and name in ("embedding", "head")):  # a shared weight belongs to the stage as a whole
            data.shard(part, plan=plan, precision=precision, mesh=groups.device_mesh)
    if sharded:
        data.shard(stage, plan=plan, precision=precision, mesh=groups.device_mesh)
        data.sum_gradients(stage)
        data.keep_prefetch_inside_backward(stage)
    return stage
