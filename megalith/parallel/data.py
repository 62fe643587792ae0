"""Data parallelism: ZeRO 0 to 3 (Rajbhandari et al. 2019) as one mechanism, FSDP2, with different moments of gather and reduce.

ZeRO 0 shards over one rank and replicates over all: each block's gradients are one bucket, all-reduced as soon as its backward is done.
"""

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from megalith.models.stage import Stage
from megalith.spec.plan import Plan

COMPUTE_DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16}


def needed(plan: Plan, precision: str) -> bool:
    """On one data rank in fp32 there is nothing to shard, to reduce or to cast."""
    return plan.data > 1 or precision != "fp32"


def shard(module: nn.Module, *, plan: Plan, precision: str, mesh: DeviceMesh) -> None:
    """Shard what `module` holds and no earlier call took; weights compute in `precision`, gradients are summed in fp32."""
    policy = MixedPrecisionPolicy(param_dtype=COMPUTE_DTYPE[precision], reduce_dtype=torch.float32)
    axes = ("copies", "shards") if plan.copies > 1 else "shards"
    fully_shard(module, mesh=mesh[axes], mp_policy=policy, reshard_after_forward=plan.zero == 3)


def sum_gradients(stage: Stage) -> None:
    """Gradients are sums over the data ranks: the loss already carries 1 / (tokens of the global batch)."""
    for module in _sharded(stage):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def keep_prefetch_inside_backward(stage: Stage) -> None:
    """The part whose backward comes last gathers nothing ahead. FSDP would take the part that an earlier microbatch's forward left in
    its list, gather that once more, and throw it away."""
    if sharded := [part for _, part in stage.parts() if isinstance(part, FSDPModule)]:
        sharded[0].set_modules_to_backward_prefetch([sharded[0]])


def before_backward(stage: Stage, *, zero: int, last: bool) -> None:
    """Say what this backward does with weights and gradients; `last`: it is the stage's last one of the step."""
    if isinstance(stage, FSDPModule):
        stage.set_requires_gradient_sync(last or zero >= 2)
        stage.set_reshard_after_backward(last or zero == 3)
        stage.set_is_last_backward(last)


def release(stage: Stage) -> None:
    """Drop gathered weights (after a forward without backward)."""
    for module in _sharded(stage):
        module.reshard()


def _sharded(stage: Stage) -> Iterable[FSDPModule]:
    return (module for module in stage.modules() if isinstance(module, FSDPModule))
