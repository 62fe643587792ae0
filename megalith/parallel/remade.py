"""After the forward, frees the tensors that a first computation passed to a second one, and computes these tensors again in backward.

Activation checkpointing would run both computations again. Here the second computation, such as attention, does not run again. Only the
inputs of the second computation are computed again, from those of the first, with a graph for their gradients.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megalith.kernels.deferred import recomputing

Pack = Callable[[Tensor], Any]
Unpack = Callable[[Any], Tensor]


def same(kept: Any) -> Any:
    return kept


def surrounding_hooks() -> tuple[Pack, Unpack]:
    """Return the saved-tensor hooks that are active now. Hooks that are set later replace these hooks, and must call them to keep their
    effect."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)  # pyright: ignore[reportAttributeAccessIssue]
    return hooks or (same, same)


@dataclass(frozen=True)
class _Remade:
    """A view of an output of `_Make`, with the autograd node that computes the output again."""

    node: Any
    number: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        return _again(self.node).outs[self.number].detach().as_strided(self.size, self.stride, self.offset)


class _Again(NamedTuple):
    inputs: tuple[Tensor, ...]
    outs: tuple[Tensor, ...]


def _again(node: Any) -> _Again:
    if node.again is None:
        inputs = tuple(
            x.detach().requires_grad_(needed) for x, needed in zip(node.saved_tensors, node.needs_input_grad[1:], strict=True)
        )
        with torch.enable_grad(), recomputing():
            node.again = _Again(inputs, node.make(*inputs))
    return node.again


class _Make(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, make: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.make, ctx.again = make, None
        ctx.save_for_backward(*inputs)
        return make(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        inputs, outs = _again(ctx)
        ctx.again = None
        torch.autograd.backward(outs, grads)
        return None, *(x.grad for x in inputs)


@contextmanager
def _freed(outs: Sequence[Tensor]) -> Iterator[None]:
    """In this context, autograd saves outputs of `_Make`, and views of them, not as tensors but as references to the node that computes
    them again."""
    pack, unpack = surrounding_hooks()
    node, places = outs[0].grad_fn, {out.untyped_storage()._cdata: number for number, out in enumerate(outs)}

    def freed(tensor: Tensor) -> Any:
        number = places.get(tensor.untyped_storage()._cdata)
        if number is None:
            return pack(tensor)
        return _Remade(node, number, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def back(kept: Any) -> Tensor:
        return kept.tensor() if isinstance(kept, _Remade) else unpack(kept)

    with saved_tensors_hooks(freed, back):
        yield


def remake(make: Callable[..., tuple[Tensor, ...]], use: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return use(*make(*inputs)). The results of `make` are freed after the forward, and `make` runs once more when the backward of `use`
    needs them. `use` runs only once. If `make` is deterministic, the gradients have the same bits as without recomputation."""
    if not torch.is_grad_enabled():
        return use(*make(*inputs))
    outs: Any = _Make.apply(make, *inputs)
    with _freed(outs):
        return use(*outs)
