"""The code for matrix products with a weight (except those in `OUTSIDE`): forward, and the gradients of the input and of the weight.

A recipe determines how the three products are computed, for instance in narrow formats: it is a subclass of `Multiply` that overrides them,
and a row in `parallel.precision.RECIPES`. Layers, experts, the output and overlapped communication multiply by a weight only through
`Multiply`.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalith.kernels.deferred import is_recomputed, weight_gradient
from megalith.kernels.grouped import Sizes, grouped_outer_products, grouped_products
from megalith.kernels.product import linear, product
from megalith.kernels.quantise import Scaling
from megalith.spec.numbers import PrecisionSpec

OUTSIDE: Mapping[str, str] = {
    "Router": "the router computes in fp32 with any recipe, because rounded scores choose other experts (Fedus et al. 2022, section 2.4)",
    "Embedding": "the embedding looks up rows and adds up their gradients, and multiplies nothing",
    "CausalConv": "the convolution multiplies each channel by that channel's weights, elementwise, and is bound by memory",
    "CausalCore": "the attention core multiplies activations with activations, in the formats of attention kernels",
    "MambaCore": "the Mamba core multiplies activations with states in fp32, because its sums run over the whole sequence",
}
"""Map from modules that hold matrices or multiply, but do not use `Multiply`, to the reason."""


Activation = Callable[[Tensor], Tensor]
"""An elementwise function, differentiable."""


class Formed(NamedTuple):
    """The input of a product, given by the factors from which it can be computed again."""

    activation: Activation
    factors: tuple[Tensor, ...]
    """The factors: the gate, if there is one, and `up`."""

    def form(self) -> Tensor:
        """Return activation(gate) * up, or activation(up)."""
        first, *others = self.factors
        return self.activation(first) * others[0] if others else self.activation(first)

    def gradients(self, grad: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of the factors from the gradient of the input. The activation is computed again."""
        first, *others = self.factors
        first = first.detach().requires_grad_()
        with torch.enable_grad():
            out = self.activation(first)
        if not others:
            return torch.autograd.grad(out, first, grad)
        return *torch.autograd.grad(out, first, grad * others[0]), grad * out.detach()


class Multiply(nn.Module):
    """Computes x Wᵀ + b by the plain recipe: factors in their own format, sums in fp32, rounded once.

    Every module that multiplies by a weight has a `Multiply`, which has no parameters. Another recipe is a subclass that
    overrides `fprop`, `dgrad` and `wgrad`.
    """

    forms: bool = False
    """True if the result of an activation is not kept for the gradient of the next weight, but computed again from its factors
    (`Formed`)."""
    draws: bool = False
    """True if products of this recipe round stochastically, with draws that depend on the tokens (`kernels.draws`)."""

    @classmethod
    def of(cls, choices: PrecisionSpec) -> Self:
        """Return the recipe with a run's settings. The plain recipe has no settings."""
        return cls()

    @property
    def dispatched_as(self) -> Scaling | None:
        """The format in which rows are now sent to experts that use this recipe; None: the rows' own format."""
        return None

    @property
    def gradients_dispatched_as(self) -> Scaling | None:
        """The format in which gradients of results are now sent to experts that use this recipe; None: the gradients' own format."""
        return None

    @property
    def gathered_as(self) -> Scaling | None:
        """The format in which shards of weights are now gathered for products with this recipe; None: the weights' own format."""
        return None

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, sizes: Sizes | None = None) -> Tensor:
        """x [..., in], weight [out, in], bias [out] -> [..., out]. The product is differentiable, and its weight gradient can be
        deferred. With `sizes`, the rows of x [rows, in] form consecutive groups of these sizes, and weight is [groups, out, in],
        without a bias.
        """
        if not torch.compiler.is_compiling():
            return _Multiply.apply(x, weight, bias, sizes, self, torch.is_grad_enabled())  # pyright: ignore[reportReturnType]
        assert sizes is None, "experts are not compiled, because a group's number of rows differs in every batch"
        # A compiler schedules the backward itself, so nothing is put off. It knows torch's own product best.
        return F.linear(x, weight, bias) if type(self) is Multiply else _Compiled.apply(x, weight, bias, self)  # pyright: ignore[reportReturnType]

    def fprop(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, sizes: Sizes | None = None) -> Tensor:
        """x Wᵀ + b, without a graph; shapes as in `forward`."""
        if sizes is not None:
            return grouped_products(x, weight.transpose(1, 2), sizes)
        return linear(x, weight, bias)

    def activated(self, activation: Activation, gate: Tensor | None, up: Tensor) -> Tensor:
        """Return activation(gate) * up, or activation(up) without a gate, as the input of a product with this recipe.
        Differentiable."""
        if self.forms and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            factors = (up,) if gate is None else (gate, up)
            out = _Activated.apply(activation, *factors)
            setattr(out, _FORMED, Formed(activation, tuple(each.detach() for each in factors)))
            return out  # pyright: ignore[reportReturnType]
        if gate is None:
            return activation(up)
        gate = activation(gate)  # what it was is freed, unless a backward keeps it
        return gate * up

    def keeping(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, sizes: Sizes | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the result of `fprop`, and the form of x that is kept for the weight's gradient."""
        return self.fprop(x, weight, bias, sizes=sizes), x

    def restored(self, kept: Tensor, inputs: int, dtype: torch.dtype) -> Tensor:
        """Return x [rows, inputs] in its dtype, from its kept form."""
        return _rows(kept)

    def dgrad(self, grad: Tensor, weight: Tensor, *, sizes: Sizes | None = None, out: Tensor | None = None) -> Tensor:
        """grad W, the gradient of x: grad [..., out] -> [..., in], without a graph. If `out` [rows, in] is given, the result is
        written to it."""
        return product(grad, weight, out=out) if sizes is None else grouped_products(grad, weight, sizes)

    def wgrad(self, grad: Tensor, x: Tensor, *, sizes: Sizes | None = None) -> Tensor:
        """gradᵀ x, the gradient of the weight: grad [rows, out], x [rows, in] -> [out, in] or [groups, out, in], without a graph."""
        return product(grad.T, x) if sizes is None else grouped_outer_products(grad, x, sizes)

    def gradient_of(
        self, weight: Tensor, grad: Tensor, kept: Tensor | Formed, *, sizes: Sizes | None = None, recomputed: bool
    ) -> Tensor | None:
        """Return the gradient of `weight` from grad [rows, out] and the kept form of x [..., in]; None if it is deferred. `recomputed`: as
        in `weight_gradient`."""

        def make() -> Tensor:
            x = kept.form() if isinstance(kept, Formed) else kept
            return self.wgrad(grad, self.restored(x, weight.shape[-1], grad.dtype), sizes=sizes)

        return weight_gradient(weight, make, recomputed=recomputed)


PLAIN = Multiply()


def _rows(x: Tensor) -> Tensor:
    """[..., n] -> [rows, n]."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, bias: Tensor | None, sizes: Sizes | None, multiply: Multiply, follows: bool
    ) -> Tensor:
        if not follows:
            return multiply.fprop(x, weight, bias, sizes=sizes)
        out, kept = multiply.keeping(x, weight, bias, sizes=sizes)
        ctx.formed = formed = getattr(x, _FORMED, None) if kept is x else None
        ctx.save_for_backward(*((kept,) if formed is None else formed.factors))
        if formed is not None:
            ctx.formed = formed._replace(factors=())  # what is saved is not held besides
        ctx.weight = weight  # itself, since its `.grad` may be added to later
        ctx.biased, ctx.sizes, ctx.multiply, ctx.recomputed = bias is not None, sizes, multiply, is_recomputed()
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        saved, weight, sizes, multiply = ctx.saved_tensors, ctx.weight, ctx.sizes, ctx.multiply
        kept = saved[0] if ctx.formed is None else ctx.formed._replace(factors=saved)
        if sizes is not None:
            grad = grad.contiguous()
        rows = _rows(grad)
        of_x = multiply.dgrad(grad, weight, sizes=sizes) if ctx.needs_input_grad[0] else None
        of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = multiply.gradient_of(weight, rows, kept, sizes=sizes, recomputed=ctx.recomputed)
        return of_x, of_weight, rows.sum(0) if ctx.biased else None, None, None, None


_FORMED = "_megalith_formed"
"""Attribute of a tensor that a product need not keep; it holds the factors from which the tensor can be computed again."""


class _Activated(torch.autograd.Function):
    """activation(gate) * up, or activation(up). Only the factors are kept for backward."""

    @staticmethod
    def forward(ctx, activation: Activation, *factors: Tensor) -> Tensor:
        ctx.activation = activation
        ctx.save_for_backward(*factors)
        return Formed(activation, factors).form()

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, *Formed(ctx.activation, ctx.saved_tensors).gradients(grad)


class _Compiled(torch.autograd.Function):
    """Compute the same product for a compiler, which must see all tensors that backward uses."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, multiply: Multiply) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.biased, ctx.multiply = bias is not None, multiply
        return multiply.fprop(x, weight, bias)

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        rows = _rows(grad)
        of_weight = ctx.multiply.wgrad(rows, _rows(x))
        return ctx.multiply.dgrad(grad, weight), of_weight, rows.sum(0) if ctx.biased else None, None
