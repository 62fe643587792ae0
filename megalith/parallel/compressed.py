"""Attention whose queries, keys, values and output are kept for backward in 8 bits.

Forward does not change. The backward of attention and the gradient of the following weight use the rounded numbers. A tile inside the
channels of one head and token shares a scale in fp32, a power of two, so every plan rounds the same numbers in the same way.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from megalith.parallel.remade import surrounding_hooks

SHORT = (torch.bfloat16, torch.float16)
"""The dtypes of tensors that are rounded. Sums of exponentials, which are fp32, are not rounded."""


class Rounding(Protocol):
    """A format of 8 bits with scales."""

    def packed(self, x: Tensor) -> Tensor:
        """Return x [rows, columns] in the form in which it is kept."""
        ...

    def unpacked(self, kept: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
        """Return the numbers [rows, columns] of a kept form."""
        ...


@dataclass(frozen=True)
class _Packed:
    """A tensor that is kept in 8 bits. `kept` is the value that the surrounding saved-tensor hooks returned for its bytes."""

    kept: Any
    channels: int
    shape: torch.Size
    order: tuple[int, ...]
    dtype: torch.dtype


class Compressed:
    """Forward of an attention whose core keeps its tensors in 8 bits. The layer after the core keeps the same bytes of its output."""

    def __init__(self, forward: Callable[..., Tensor], core: Callable[..., Tensor], rounding: Rounding) -> None:
        self._forward, self._core, self._rounding = forward, core, rounding
        self._inside = False
        # With the tensors, so that no other one gets an address of these.
        self._known = dict[tuple[int, int, int], tuple[Tensor, Any]]()
        self._channels = 0
        self._out: Tensor | None = None

    @classmethod
    def replace(cls, attention: nn.Module, rounding: Rounding) -> None:
        """Replace the forwards of an attention and of its core. The layer `out` takes the core's output, of which it may have to make a
        copy."""
        core, out = attention.get_submodule("core"), attention.get_submodule("out")
        attention.forward = compressed = cls(attention.forward, core.forward, rounding)
        core.forward = compressed._attend
        out.register_forward_pre_hook(compressed._leave)

    def __call__(self, *args: Any) -> Tensor:
        pack, unpack = surrounding_hooks()
        rounding = self._rounding

        def back(kept: Any) -> Tensor:
            return _restored(kept, unpack(kept.kept), rounding) if isinstance(kept, _Packed) else unpack(kept)

        try:
            with saved_tensors_hooks(lambda tensor: self._put(tensor, pack), back):
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
        """Remember the input of the layer after the core."""
        self._out = args[0].detach() if torch.is_grad_enabled() else None

    def _put(self, tensor: Tensor, pack: Callable[[Tensor], Any]) -> Any:
        address = tensor.untyped_storage()._cdata
        after = self._out is not None and self._out.untyped_storage()._cdata == address
        if tensor.dtype not in SHORT or not (self._inside or after):
            return pack(tensor)
        channels = self._channels if after else tensor.shape[-1]  # heads are one dim for the layer after the core
        key = address, int(tensor.storage_offset()), tensor.numel()
        if key not in self._known:
            rows = tensor.detach().permute(_order(tensor)).reshape(-1, channels)
            self._known[key] = tensor.detach(), pack(self._rounding.packed(rows))
        return _Packed(self._known[key][1], channels, tensor.shape, _order(tensor), tensor.dtype)


def _order(tensor: Tensor) -> tuple[int, ...]:
    """Return the dims in memory order. Channels are the last."""
    *others, channels = range(tensor.dim())
    return *sorted(others, key=lambda dim: -tensor.stride(dim)), channels


def _restored(kept: _Packed, content: Tensor, rounding: Rounding) -> Tensor:
    """Return a contiguous tensor whose dims have their original order in memory."""
    rows = rounding.unpacked(content, kept.channels, kept.dtype)
    sizes = [kept.shape[dim] for dim in kept.order]
    return rows.view(sizes).permute([kept.order.index(dim) for dim in range(len(sizes))])
