"""Actions for the tensors that blocks, or parts of blocks, keep for backward. Recomputation keeps only the input, and runs the part again
(Chen et al. 2016); other actions keep the tensors on the device, move them off it, or keep them in 8 bits."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megalith.kernels.kept import Packed
from megalith.kernels.multiply import Multiply
from megalith.models.batch import Batch
from megalith.models.block import Block
from megalith.models.latent import LatentAttention
from megalith.models.mlp import Mlp
from megalith.models.moe import Experts, Moe
from megalith.parallel.compressed import Rounding, compress
from megalith.parallel.remade import remake
from megalith.parallel.retain import PlacedFunction
from megalith.spec.numbers import PrecisionSpec, kept_tile
from megalith.spec.plan import BLOCK, EXPERTS_ACTIVATION, UP_PROJECTION, Action, Plan, place_of, recomputed

SEAMS = {"attend": "attend", "mlp.experts": "mlp.run", "mlp.shared": "mlp.shared_expert"}
"""Parts of a block that do not correspond to exactly one module, and the methods that compute them."""

FORMED = {"mlp.activation": (Mlp, Experts), EXPERTS_ACTIVATION: (Experts,)}
"""Parts whose result is formed again from its factors for the gradient of the next weight, so that no module runs again -> their
modules."""


class Checkpointed:
    """A function under activation checkpointing: it saves only its inputs, and runs again in backward."""

    def __init__(self, unwrapped: Callable[..., Any]) -> None:
        self.unwrapped = unwrapped

    def __call__(self, *args: Any) -> Any:
        # RNG state is not kept: nothing in a forward draws random numbers
        return checkpoint(self.unwrapped, *args, use_reentrant=False, preserve_rng_state=False)


class LatentsKept:
    """Latent attention that keeps its latents, and makes queries, keys and values of them again for the backward of its core, which runs
    once (DeepSeek-V3, arXiv:2412.19437, section 3.2.3). It is not compiled."""

    def __init__(self, attention: LatentAttention) -> None:
        self.attention = attention

    @torch.compiler.disable
    def __call__(self, source: Tensor, latent: Tensor, batch: Batch) -> Tensor:
        attention = self.attention
        return remake(
            lambda source, latent: attention.expand(source, latent, batch),
            lambda q, k, v: attention.core(q, k, v, batch),
            source,
            latent,
        )


def is_checkpointed(module: nn.Module, name: str = "forward") -> bool:
    """True if this method of a module runs again in backward."""
    return isinstance(vars(module).get(name), Checkpointed)


def unwrapped(module: nn.Module, name: str) -> Callable[..., Any]:
    """Return the method without checkpointing, for a caller that recomputes it in its own way."""
    method = getattr(module, name)
    return method.unwrapped if isinstance(method, Checkpointed) else method


def apply_recompute(block: nn.Module, number: int, *, blocks: int, plan: Plan, rounding: Rounding | None = None) -> None:
    """Recompute a block, or give the parts of it that `plan` names their actions. A block with only one half lacks some of these parts.
    `rounding`: the format in 8 bits; None: the usual one. Raises AttributeError for a part that no block has."""
    rounding = rounding or rounding_of(PrecisionSpec())
    if recomputed(number, blocks=blocks, policy=plan.recompute):
        apply_actions(block, plan.rounding, rounding)  # what runs again rounds as the other blocks do
        block.forward = Checkpointed(block.forward)
    else:
        apply_actions(block, plan.actions, rounding)


def apply_actions(block: nn.Module, actions: Mapping[str, Action], rounding: Rounding) -> None:
    """Give parts of a block, by their names, their actions for the tensors that they keep for backward. `rounding`: the format in 8
    bits."""
    compress(block, actions, rounding)
    for name, action in actions.items():
        half = name.partition(".")[0]
        if name == BLOCK or action == "compress" or (half != "attend" and getattr(block, half) is None):
            continue
        if action == "recompute":
            _run_again(block, name)
        else:
            _wrap(block, name, partial(PlacedFunction, place=place_of(action)))


def rounding_of(choices: PrecisionSpec) -> Rounding:
    """Return the format in 8 bits of tensors that parts of blocks keep."""
    return Packed(kept_tile(choices))


def apply_rounding(part: nn.Module, plan: Plan, choices: PrecisionSpec) -> None:
    """Give the blocks in a part the actions that change numbers, and no others, as one process has them that proves the plan."""
    for block in (module for module in part.modules() if isinstance(module, Block)):
        apply_actions(block, plan.rounding, rounding_of(choices))


def _run_again(block: nn.Module, name: str) -> None:
    if name in FORMED:
        for multiply in _activating(block, name):
            multiply.forms = True
    elif name == UP_PROJECTION:
        attention = block.get_submodule("attention")
        if isinstance(attention, LatentAttention):
            attention.attend = LatentsKept(attention)  # pyright: ignore[reportAttributeAccessIssue]
    else:
        _wrap(block, name, Checkpointed)


def _activating(block: nn.Module, name: str) -> Iterator[Multiply]:
    """Yield the recipes (`multiply`) that compute the activations of a part in FORMED."""
    for module in block.get_submodule("mlp").modules():
        owner = module.down if isinstance(module, Mlp) else module
        if isinstance(module, FORMED[name]) and isinstance(owner.multiply, Multiply):
            yield owner.multiply


def _wrap(block: nn.Module, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the functions that compute a part."""
    if name in FORMED:
        for multiply in _activating(block, name):
            multiply.activated = wrapper(multiply.activated)
    elif name == UP_PROJECTION:
        attention = block.get_submodule("attention")
        if isinstance(attention, LatentAttention):
            attention.expand = wrapper(attention.expand)
    elif name in SEAMS:
        owner, _, method = SEAMS[name].rpartition(".")
        module = block.get_submodule(owner)
        if isinstance(module, Block | Moe):
            setattr(module, method, wrapper(getattr(module, method)))
        elif name == "mlp.shared":  # a block without experts: all tokens share all of it
            module.forward = wrapper(module.forward)
    else:
        owner, _, child = name.rpartition(".")
        part = getattr(block.get_submodule(owner), child)
        part.forward = wrapper(part.forward)
