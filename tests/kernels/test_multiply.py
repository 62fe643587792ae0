"""Products with a weight: the plain recipe equals torch's products, and a recipe is used wherever a product is computed."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalith.kernels.cross_entropy import cross_entropy
from megalith.kernels.deferred import Queue, deferring
from megalith.kernels.grouped import Sizes
from megalith.kernels.multiply import PLAIN, Multiply
from megalith.models.linear import Linear
from megalith.models.mlp import ACTIVATIONS


class Scaled(Multiply):
    """Products with recognizable results: forward is 2 times as large, the input's gradient 3 times, the weight's gradient
    5 times."""

    def fprop(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, **how: Any) -> Tensor:
        return super().fprop(2 * x, weight, bias, **how)

    def dgrad(self, grad: Tensor, weight: Tensor, **how: Any) -> Tensor:
        return super().dgrad(3 * grad, weight, **how)

    def wgrad(self, grad: Tensor, x: Tensor, **how: Any) -> Tensor:
        return super().wgrad(5 * grad, x, **how)


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _run(multiply: Callable[..., Tensor], *shapes: tuple[int, ...], **how: Any) -> list[Tensor]:
    """Return the product of tensors of these shapes, and all gradients."""
    factors = [_random(*shape).requires_grad_() for shape in shapes]
    out = multiply(*factors, **how)
    return [out.detach(), *torch.autograd.grad(out, factors, _random(*out.shape))]


DENSE = (2, 5, 8), (6, 8), (6,)
GROUPED = (9, 8), (3, 6, 8)
SIZES = Sizes([4, 0, 5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shapes", [DENSE, DENSE[:2]], ids=["bias", "no bias"])
def test_the_plain_recipe_gives_torchs_own_numbers(dtype: torch.dtype, shapes: tuple[tuple[int, ...], ...]) -> None:
    def of_type(multiply: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *factors: multiply(*(factor.to(dtype) for factor in factors))

    for ours, theirs in zip(_run(of_type(PLAIN), *shapes), _run(of_type(F.linear), *shapes), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("shapes", "how"), [(DENSE[:2], {}), (GROUPED, {"sizes": SIZES})], ids=["dense", "grouped"])
def test_a_recipes_products_are_the_forward_and_both_gradients(shapes: tuple[tuple[int, ...], ...], how: dict[str, Any]) -> None:
    for factor, ours, plain in zip((2, 3, 5), _run(Scaled(), *shapes, **how), _run(PLAIN, *shapes, **how), strict=True):
        torch.testing.assert_close(ours, factor * plain)


def test_the_loss_is_computed_by_a_recipe_too() -> None:
    hidden, weight, targets = _random(7, 8), _random(12, 8), torch.arange(7)

    def run(multiply: Multiply, scale: float) -> list[Tensor]:
        x, w = (scale * hidden).requires_grad_(), weight.clone().requires_grad_()
        loss = cross_entropy(x, w, targets, scale=1.0, multiply=multiply, chunk=3)
        return [loss.nll, *torch.autograd.grad(loss.objective, (x, w))]

    found, expected = run(Scaled(), 1.0), run(PLAIN, 2.0)
    torch.testing.assert_close(found[0], expected[0])
    torch.testing.assert_close(found[1], 3 * expected[1])
    torch.testing.assert_close(found[2], 5 * expected[2] / 2)  # the hidden states were half as large


def test_a_recipes_weight_gradient_can_be_put_off() -> None:
    x, weight = _random(5, 8).requires_grad_(), nn.Parameter(_random(6, 8))
    queue = Queue()
    with deferring(queue):
        Scaled()(x, weight).sum().backward()
    assert x.grad is not None and weight.grad is None
    queue.run_all()
    expected = 5 * x.detach().sum(0).expand(6, -1)
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, expected)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [Multiply, Scaled])
def test_compiled_layers_use_their_recipe(recipe: type[Multiply]) -> None:
    layer = Linear(8, 6, bias=True)
    layer.multiply = recipe()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for ours, eager in zip(_run(compiled, DENSE[0]), _run(layer, DENSE[0]), strict=True):
        assert torch.equal(ours, eager)
    out = [torch.autograd.grad(run(_random(*DENSE[0])).sum(), list(layer.parameters())) for run in (compiled, layer)]
    for ours, eager in zip(*out, strict=True):
        assert torch.equal(ours, eager)


@pytest.mark.parametrize("recipe", [Multiply, Scaled])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("name", ["silu", "gelu_tanh", "relu2"])
def test_what_is_formed_again_from_its_factors_has_the_bits_that_it_had(recipe: type[Multiply], gated: bool, name: str) -> None:
    """This holds for a weight gradient that is put off, too."""

    def run(*, forms: bool, late: bool = False) -> list[Tensor]:
        multiply, queue = recipe(), Queue()
        multiply.forms = forms
        factors = [_random(2, 5, 8).requires_grad_() for _ in range(1 + gated)]
        weight = _random(6, 8).requires_grad_()
        gate, up = factors if gated else (None, *factors)
        out = multiply(multiply.activated(ACTIVATIONS[name], gate, up), weight)
        with deferring(queue) if late else nullcontext():
            out.sin().sum().backward()
        queue.run_all()
        return [out.detach(), *(x.grad for x in (*factors, weight) if x.grad is not None)]

    plain, *found = run(forms=False), run(forms=True), run(forms=True, late=True)
    assert len(plain) == 3 + gated
    assert all(torch.equal(*each) for other in found for each in zip(other, plain, strict=True))
