"""Recomputation: which blocks, or parts of blocks, keep only their input in forward and run again in backward (Chen et al. 2016)."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from megalith.kernels.multiply import Multiply
from megalith.models.block import Block
from megalith.models.mlp import Mlp
from megalith.models.moe import Experts, Moe
from megalith.spec.plan import Plan, recomputed

SEAMS = {"attend": "attend", "mlp.experts": "mlp.run", "mlp.shared": "mlp.shared_expert"}
"""Parts of a block that do not correspond to exactly one module, and the methods that compute them."""


FORMED = "mlp.activation"
"""The part whose result the gradient of the next weight forms again from its factors: no module runs again."""


class Checkpointed:
    """A function under activation checkpointing: it saves only its inputs, and runs again in backward."""

    def __init__(self, unwrapped: Callable[..., Any]) -> None:
        self.unwrapped = unwrapped

    def __call__(self, *args: Any) -> Any:
        # RNG state is not kept: nothing in a forward draws random numbers
        return checkpoint(self.unwrapped, *args, use_reentrant=False, preserve_rng_state=False)


def is_checkpointed(module: nn.Module, name: str = "forward") -> bool:
    """True if this method of a module runs again in backward."""
    return isinstance(vars(module).get(name), Checkpointed)


def unwrapped(module: nn.Module, name: str) -> Callable[..., Any]:
    """Return the method without checkpointing, for a caller that recomputes it in its own way."""
    method = getattr(module, name)
    return method.unwrapped if isinstance(method, Checkpointed) else method


def apply_recompute(block: nn.Module, number: int, *, blocks: int, plan: Plan) -> None:
    """Recompute a block, or the parts of it that `plan` names, in backward. A block with only one half lacks some of these parts.
    Raises AttributeError for a part that no block has."""
    if plan.recompute == "selective":
        for name in plan.recompute_parts:
            _run_again(block, name)
    elif recomputed(number, blocks=blocks, policy=plan.recompute):
        block.forward = Checkpointed(block.forward)


def _run_again(block: nn.Module, name: str) -> None:
    half = name.partition(".")[0]
    if half != "attend" and getattr(block, half) is None:
        return
    if name == FORMED:
        for module in block.get_submodule(half).modules():
            owner = module.down if isinstance(module, Mlp) else module if isinstance(module, Experts) else None
            if owner is not None and isinstance(owner.multiply, Multiply):
                owner.multiply.forms = True
        return
    if name in SEAMS:
        owner, _, method = SEAMS[name].rpartition(".")
        module = block.get_submodule(owner)
        if isinstance(module, Block | Moe):
            setattr(module, method, Checkpointed(getattr(module, method)))
        elif name == "mlp.shared":  # a block without experts: all tokens share all of it
            module.forward = Checkpointed(module.forward)
        return
    owner, _, child = name.rpartition(".")
    part = getattr(block.get_submodule(owner), child)
    part.forward = Checkpointed(part.forward)
