"""Recomputation: which blocks, or parts of blocks, keep only their input in forward and run again in backward (Chen et al. 2016)."""

import functools
import math

from torch import nn
from torch.utils.checkpoint import checkpoint

from megalith.spec.plan import Plan


def recomputed(number: int, *, blocks: int, policy: str) -> bool:
    """Does block `number` (of the whole model's `blocks`) run again as a whole?

    `every:n` recomputes every n-th block. `sqrt` recomputes all but every sqrt(blocks)-th one, so that about sqrt(blocks) of them keep
    their inner activations.
    """
    if policy == "full":
        return True
    if policy == "sqrt":
        return number % max(2, round(math.sqrt(blocks))) != 0
    if policy.startswith("every:"):
        return number % int(policy.removeprefix("every:")) == 0
    return False


def apply_recompute(block: nn.Module, number: int, *, blocks: int, plan: Plan) -> None:
    """Make a block, or the parts of it that `plan` names, run again in backward."""
    if plan.recompute == "selective":
        for name in plan.recompute_parts:
            _run_again(block.get_submodule(name))
    elif recomputed(number, blocks=blocks, policy=plan.recompute):
        _run_again(block)


def _run_again(module: nn.Module) -> None:
    # RNG state is not kept: nothing in a forward draws random numbers
    module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False)
