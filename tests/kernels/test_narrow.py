"""Recipes of 8 bits: products of rounded factors, cut among ranks, within the definition's bound."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.kernels.grouped import Sizes
from megalith.kernels.multiply import Multiply
from megalith.kernels.narrow import Blockwise, Microscaled, in_slabs
from megalith.kernels.quantise import Scaling, quantise
from megalith.spec.numbers import PrecisionSpec

RECIPES = [Blockwise, Microscaled]


def lively(*shape: int, seed: int = 0) -> Tensor:
    """bf16 numbers whose tiles of 16 differ in size by up to 2^12, so that a scale in a wrong place cannot hide."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=random)
    for dim in (-2, -1):
        sizes = torch.randint(-3, 4, (-(-x.shape[dim] // 16),), generator=random).repeat_interleave(16)[: x.shape[dim]]
        x = x * (2.0**sizes).view(-1, *[1] * (-1 - dim))
    return x.bfloat16()


def small(recipe: type[Blockwise], **choices: Any) -> Blockwise:
    return recipe(PrecisionSpec(tile=16, **choices))


def decoded(x: Tensor, scaling: Scaling) -> Tensor:
    return quantise(x, scaling).decoded()


# --- numbers ---


@pytest.mark.parametrize("shape", [(1000, 96), (3, 400, 130), (2, 0, 32), (5, 7)], ids=str)
@pytest.mark.parametrize("block", [(1, 16), (16, 1), (16, 16)], ids=str)
def test_slabs_have_the_numbers_of_the_definition(block: tuple[int, int], shape: tuple[int, ...], monkeypatch: Any) -> None:
    monkeypatch.setattr("megalith.kernels.narrow.SLAB", 1 << 12)
    x = lively(*shape)
    for scaling in (Blockwise().along, Blockwise(PrecisionSpec(scale="ocp", gradients="e5m2")).gradient_along):
        scaling = Scaling(scaling.element, block, scaling.scale)
        assert torch.equal(in_slabs(x, scaling).float(), decoded(x, scaling))


def test_an_infinity_is_no_large_number() -> None:
    x, weight = lively(4, 32), lively(8, 32)
    x[1, 3] = torch.inf
    out = small(Blockwise).fprop(x, weight)
    assert out[1].isnan().all() and out[[0, 2, 3]].isfinite().all()


# --- products ---


def partial_sums(a: Tensor, b: Tensor, tile: int) -> Tensor:
    """a bᵀ as the definition has it: fp32 sums along each tile of the inner dim, added up in fp32."""
    total = torch.zeros(a.shape[0], b.shape[0])
    for first in range(0, a.shape[1], tile):
        total += a[:, first : first + tile] @ b[:, first : first + tile].T
    return total


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_three_products_are_those_of_the_definition(recipe: type[Blockwise]) -> None:
    """Up to the order of fp32 sums, and the rounding of the result to bf16: a bound that follows from both, not from what was seen."""
    here, x, weight, grad = small(recipe), lively(64, 96), lively(80, 96, seed=1), lively(64, 80, seed=2)
    rows, columns = Scaling(here.along.element, (1, 16)), Scaling(here.along.element, (16, 1))
    both = Scaling(here.along.element, (16, 16))
    along, down = (both, both) if recipe is Blockwise else (rows, columns)
    factors = [
        (here.fprop(x, weight), decoded(x, rows), decoded(weight, along)),
        (here.dgrad(grad, weight), decoded(grad, rows), decoded(weight, down).T),
        (here.wgrad(grad, x), decoded(grad, columns).T, decoded(x, columns).T),
    ]
    for found, a, b in factors:
        exact, sizes = a.double() @ b.double().T, a.double().abs() @ b.double().abs().T
        inner = a.shape[1]
        assert ((partial_sums(a, b, 16) - exact).abs() <= inner * 2**-24 * sizes).all()
        assert ((found.double() - exact).abs() <= 2**-8 * exact.abs() + inner * 2**-23 * sizes).all()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_scale_in_another_place_would_break_that_bound(recipe: type[Blockwise]) -> None:
    here, x, weight = small(recipe), lively(64, 96), lively(96, 96, seed=1)
    found = quantise(weight, here.weight_along)
    moved = replace(found, scales=found.scales.T.reshape(found.scales.shape))
    right, factors = decoded(x, here.along).double(), found.decoded().double()
    gap = (right @ (moved.decoded() - factors).T).abs()
    bound = 2**-8 * (right @ factors.T).abs() + 96 * 2**-23 * (right.abs() @ factors.abs().T)
    assert (gap > bound).float().mean() > 0.9


def test_weights_in_squares_are_the_same_forward_and_backward() -> None:
    here = small(Blockwise)
    assert here.weight_along == here.weight_down
    assert small(Microscaled).weight_along != small(Microscaled).weight_down


@pytest.mark.parametrize("recipe", RECIPES)
def test_choices_leave_products_wide(recipe: type[Blockwise]) -> None:
    x, weight, grad, plain = lively(64, 96), lively(80, 96, seed=1), lively(64, 80, seed=2), Multiply()
    here = small(recipe, input_gradient="wide", weight_gradient="wide")
    assert torch.equal(here.dgrad(grad, weight), plain.dgrad(grad, weight))
    assert torch.equal(here.wgrad(grad, x), plain.wgrad(grad, x))
    assert not torch.equal(small(recipe).dgrad(grad, weight), plain.dgrad(grad, weight))
    assert not torch.equal(small(recipe, gradients="e5m2").wgrad(grad, x), small(recipe).wgrad(grad, x))


# --- cuts ---


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_rank_rounds_its_share_to_the_numbers_of_the_whole(recipe: type[Blockwise], dim: int) -> None:
    """Tokens among context and data ranks, channels among tensor ranks, for every factor of the three products."""
    here, x = small(recipe), lively(64, 96)
    for scaling in (here.along, here.down, here.gradient_along, here.gradient_down, here.weight_along, here.weight_down):
        parts = [in_slabs(part, scaling) for part in x.chunk(2, dim)]
        assert torch.equal(torch.cat(parts, dim), in_slabs(x, scaling))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_group_of_experts_is_each_of_them(recipe: type[Blockwise]) -> None:
    """Also one without rows; the gradients of their weights are those of bf16, whichever tokens meet."""
    here, counts = small(recipe), (24, 0, 40)
    x, weight, grad = lively(64, 96), lively(3, 80, 96, seed=1), lively(64, 80, seed=2)
    parts = zip(x.split(counts), grad.split(counts), weight, strict=True)
    each = [(here.fprop(rows, one), here.dgrad(back, one)) for rows, back, one in parts if len(rows)]
    sizes = Sizes(counts)
    assert torch.equal(here.fprop(x, weight, sizes=sizes), torch.cat([out for out, _ in each]))
    assert torch.equal(here.dgrad(grad, weight, sizes=sizes), torch.cat([of_x for _, of_x in each]))
    assert torch.equal(here.wgrad(grad, x, sizes=sizes), Multiply().wgrad(grad, x, sizes=sizes))
