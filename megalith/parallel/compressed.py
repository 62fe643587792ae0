"""Saves tensors for the backward of blocks in 8 bits: the inputs of matrix products and norms, the factors of activations, and the queries,
keys, values and output of attention.

Forward does not change. Backward computes the gradients of weights, activations, norms and attention from the rounded tensors. The elements
of a tile share a scale, a power of two in fp32. A tile lies within the channels of one token and, in attention, of one head, so every plan
rounds each number in the same way.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from megalith.kernels.multiply import Multiply
from megalith.models.block import Block
from megalith.models.moe import Experts
from megalith.parallel.remade import surrounding_hooks
from megalith.spec.plan import EXPERTS_ACTIVATION, NORMS, Action, compresses

SHORT = (torch.bfloat16, torch.float16)
"""The dtypes of tensors that are rounded. The log-sum-exps of attention, which are fp32, are not rounded."""


class Rounding(Protocol):
    """A number format of 8 bits with scales."""

    def packed(self, x: Tensor) -> Tensor:
        """Return x [rows, columns] rounded to this format, as bytes."""
        ...

    def unpacked(self, kept: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
        """Return the numbers [rows, columns] that the bytes `kept` hold."""
        ...

    def for_layer(self, *, inputs: bool, activations: bool) -> Multiply:
        """Return a recipe whose products save their inputs in this format (`inputs`), and whose activations save their factors and results
        in it (`activations`)."""
        ...


def compress(block: nn.Module, actions: Mapping[str, Action], rounding: Rounding) -> None:
    """Make a block save tensors in 8 bits for each part whose action is "compress". Call `compress` before other actions wrap the parts."""
    if "compress" not in actions.values():
        return
    for name in NORMS:
        norm = getattr(block, name, None)
        if norm is not None and compresses(actions, name):
            norm.forward = RoundedInput(norm.forward, rounding)
    attention = block.attention if isinstance(block, Block) else None
    if attention is not None and compresses(actions, "attention.core"):
        CompressedAttention.replace(attention, rounding)
    for path, module in list(block.named_modules()):
        if type(getattr(module, "multiply", None)) is not Multiply or path == "attention.out":
            continue  # a recipe decides itself; what attention gives is kept with its other tensors
        inputs = compresses(actions, path)
        activations = compresses(actions, EXPERTS_ACTIVATION) if isinstance(module, Experts) else inputs
        if inputs or activations:
            module.multiply = rounding.for_layer(inputs=inputs, activations=activations)


@dataclass(frozen=True)
class _Packed:
    """A tensor saved in 8 bits. `kept` is the value that the surrounding saved-tensor hooks returned for the tensor's bytes."""

    kept: Any
    channels: int
    shape: torch.Size
    order: tuple[int, ...]
    dtype: torch.dtype


class RoundedInput:
    """The forward of a norm that saves its input in 8 bits. torch.compile skips it."""

    def __init__(self, forward: Callable[..., Tensor], rounding: Rounding) -> None:
        self._forward, self._rounding = forward, rounding

    @torch.compiler.disable
    def __call__(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return self._forward(x)
        pack, unpack = surrounding_hooks()
        address, channels = x.untyped_storage()._cdata, x.shape[-1]

        def put(tensor: Tensor) -> Any:
            its_input = tensor.untyped_storage()._cdata == address and tensor.numel() == x.numel()
            return _packed(tensor, channels, self._rounding, pack) if its_input and tensor.dtype in SHORT else pack(tensor)

        with saved_tensors_hooks(put, _unpacking(unpack, self._rounding)):
            return self._forward(x)


class CompressedAttention:
    """The forward of an attention layer whose core saves its tensors in 8 bits. The output projection saves the bytes of the core's output,
    which exist already. torch.compile skips this forward, because compiled code would choose the saved tensors itself."""

    def __init__(self, forward: Callable[..., Tensor], core: Callable[..., Tensor], rounding: Rounding) -> None:
        self._forward, self._core, self._rounding = forward, core, rounding
        self._inside = False
        # With the tensors, so that no other one gets an address of these.
        self._known = dict[tuple[int, int, int], tuple[Tensor, Tensor]]()
        self._channels = 0
        self._out: Tensor | None = None

    @classmethod
    def replace(cls, attention: nn.Module, rounding: Rounding) -> None:
        """Replace the forwards of an attention layer and of its core. A hook records the input of the layer `out`, which may be a copy of
        the core's output."""
        core, out = attention.get_submodule("core"), attention.get_submodule("out")
        compressed = cls(attention.forward, core.forward, rounding)
        attention.forward = compressed  # pyright: ignore[reportAttributeAccessIssue]
        core.forward = compressed._attend
        out.register_forward_pre_hook(compressed._leave)

    @torch.compiler.disable
    def __call__(self, *args: Any) -> Tensor:
        pack, unpack = surrounding_hooks()
        try:
            with saved_tensors_hooks(lambda tensor: self._put(tensor, pack), _unpacking(unpack, self._rounding)):
                return self._forward(*args)
        finally:
            self._known, self._out = {}, None

    def _attend(self, *args: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return self._core(*args)
        self._inside = True
        try:
            out = self._core(*args)
        finally:
            self._inside = False
        self._channels, address = out.shape[-1], out.untyped_storage()._cdata
        self._known = {key: known for key, known in self._known.items() if key[0] == address}
        return out

    def _leave(self, module: nn.Module, args: tuple[Tensor]) -> None:
        self._out = args[0].detach() if torch.is_grad_enabled() else None

    def _put(self, tensor: Tensor, pack: Callable[[Tensor], Any]) -> Any:
        address = tensor.untyped_storage()._cdata
        after = self._out is not None and self._out.untyped_storage()._cdata == address
        if tensor.dtype not in SHORT or not (self._inside or after):
            return pack(tensor)
        channels = self._channels if after else tensor.shape[-1]  # heads are one dim for the layer after the core
        key = address, int(tensor.storage_offset()), tensor.numel()
        if key not in self._known:
            self._known[key] = tensor.detach(), _rows(tensor, channels, self._rounding)
        # handed over each time: activation checkpointing gives what it was handed back once
        return _Packed(pack(self._known[key][1]), channels, tensor.shape, _order(tensor), tensor.dtype)


def _packed(tensor: Tensor, channels: int, rounding: Rounding, pack: Callable[[Tensor], Any]) -> _Packed:
    return _Packed(pack(_rows(tensor, channels, rounding)), channels, tensor.shape, _order(tensor), tensor.dtype)


def _rows(tensor: Tensor, channels: int, rounding: Rounding) -> Tensor:
    return rounding.packed(tensor.detach().permute(_order(tensor)).reshape(-1, channels))


def _unpacking(unpack: Callable[[Any], Tensor], rounding: Rounding) -> Callable[[Any], Tensor]:
    return lambda kept: _restored(kept, unpack(kept.kept), rounding) if isinstance(kept, _Packed) else unpack(kept)


def _order(tensor: Tensor) -> tuple[int, ...]:
    *others, channels = range(tensor.dim())
    return *sorted(others, key=lambda dim: -tensor.stride(dim)), channels


def _restored(kept: _Packed, content: Tensor, rounding: Rounding) -> Tensor:
    rows = rounding.unpacked(content, kept.channels, kept.dtype)
    sizes = [kept.shape[dim] for dim in kept.order]
    return rows.view(sizes).permute([kept.order.index(dim) for dim in range(len(sizes))])
