"""Applies the plan's actions for the tensors that blocks, or parts of blocks, save for backward. Recomputation saves only the input and
runs the block or part again (Chen et al. 2016); other actions keep the saved tensors on the device, move them off the device, or save them
in 8 bits."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megalith.kernels.deferred import recomputing
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
"""Parts of a block that are not exactly one module, and the method that computes each of them."""

FORMED = {"mlp.activation": (Mlp, Experts), EXPERTS_ACTIVATION: (Experts,)}
"""Parts whose recomputation runs no module again, and their modules. The activations of these modules are computed again from saved factors
when the gradient of the next weight needs them."""


class Checkpointed:
    """A function under activation checkpointing: forward saves only the function's inputs, and backward runs the function again."""

    def __init__(self, unwrapped: Callable[..., Any]) -> None:
        self.unwrapped = unwrapped

    def __call__(self, *args: Any) -> Any:
        # RNG state is not kept: nothing in a forward draws random numbers
        with recomputing():
            return checkpoint(self.unwrapped, *args, use_reentrant=False, preserve_rng_state=False)


class LatentsKept:
    """Latent attention that saves its latent vectors, and recomputes queries, keys and values from them for the backward of its core; the
    core itself does not run again (DeepSeek-V3, arXiv:2412.19437, section 3.2.3). torch.compile skips this function."""

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
    """True if backward runs the method `name` of this module again."""
    return isinstance(vars(module).get(name), Checkpointed)


def unwrapped(module: nn.Module, name: str) -> Callable[..., Any]:
    """Return the method `name` without checkpointing, for a caller that recomputes the method in its own way."""
    method = getattr(module, name)
    return method.unwrapped if isinstance(method, Checkpointed) else method


def apply_recompute(block: nn.Module, number: int, *, blocks: int, plan: Plan, rounding: Rounding | None = None) -> None:
    """Make a block recompute itself as a whole, or apply the actions that `plan` names to parts of the block. Parts that this block lacks
    are skipped. `rounding`: the format for tensors saved in 8 bits; None: the default one. Raises AttributeError for a part that no block
    has."""
    rounding = rounding or rounding_of(PrecisionSpec())
    if recomputed(number, blocks=blocks, policy=plan.recompute):
        apply_actions(block, plan.rounding, rounding)  # what runs again rounds as the other blocks do
        block.forward = Checkpointed(block.forward)
    else:
        apply_actions(block, plan.actions, rounding)


def apply_actions(block: nn.Module, actions: Mapping[str, Action], rounding: Rounding) -> None:
    """Apply `actions`, by the part's name, to the tensors that parts of a block save for backward. `rounding`: the format for tensors saved
    in 8 bits."""
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
    """Return the format of the tensors that parts of blocks save in 8 bits."""
    return Packed(kept_tile(choices))


def apply_rounding(part: nn.Module, plan: Plan, choices: PrecisionSpec) -> None:
    """Apply to the blocks in a part only those of the plan's actions that change numbers. The run in one process, with which the run
    under a plan is compared, uses this."""
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
    for module in block.get_submodule("mlp").modules():
        owner = module.down if isinstance(module, Mlp) else module
        if isinstance(module, FORMED[name]) and isinstance(owner.multiply, Multiply):
            yield owner.multiply


def _wrap(block: nn.Module, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
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
