"""Recipes of 8 bits: products of rounded factors, cut among ranks, within the definition's bound."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.kernels.grouped import Sizes
from megalith.kernels.multiply import Multiply
from megalith.kernels.narrow import (
    INPUTS,
    OUTPUTS,
    TOKENS,
    Blockwise,
    Microscaled,
    Narrow,
    Rowwise,
    Tensorwise,
    in_slabs,
    maxima,
)
from megalith.kernels.quantise import Scaling, quantise
from megalith.spec.numbers import PrecisionSpec

RECIPES: list[type[Narrow]] = [Blockwise, Microscaled]


def lively(*shape: int, seed: int = 0) -> Tensor:
    """bf16 numbers whose tiles of 16 differ in size by up to 2^12, so that a scale in a wrong place cannot hide."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=random)
    for dim in (-2, -1):
        sizes = torch.randint(-3, 4, (-(-x.shape[dim] // 16),), generator=random).repeat_interleave(16)[: x.shape[dim]]
        x = x * (2.0**sizes).view(-1, *[1] * (-1 - dim))
    return x.bfloat16()


def small(recipe: type[Narrow], **choices: Any) -> Narrow:
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
def test_the_three_products_are_those_of_the_definition(recipe: type[Narrow]) -> None:
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
def test_a_scale_in_another_place_would_break_that_bound(recipe: type[Narrow]) -> None:
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
def test_choices_leave_products_wide(recipe: type[Narrow]) -> None:
    x, weight, grad, plain = lively(64, 96), lively(80, 96, seed=1), lively(64, 80, seed=2), Multiply()
    here = small(recipe, input_gradient="wide", weight_gradient="wide")
    assert torch.equal(here.dgrad(grad, weight), plain.dgrad(grad, weight))
    assert torch.equal(here.wgrad(grad, x), plain.wgrad(grad, x))
    assert not torch.equal(small(recipe).dgrad(grad, weight), plain.dgrad(grad, weight))
    assert not torch.equal(small(recipe, gradients="e5m2").wgrad(grad, x), small(recipe).wgrad(grad, x))


# --- cuts ---


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_rank_rounds_its_share_to_the_numbers_of_the_whole(recipe: type[Narrow], dim: int) -> None:
    """Tokens among context and data ranks, channels among tensor ranks, for every factor of the three products."""
    here, x = small(recipe), lively(64, 96)
    for scaling in (here.along, here.down, here.gradient_along, here.gradient_down, here.weight_along, here.weight_down):
        parts = [in_slabs(part, scaling) for part in x.chunk(2, dim)]
        assert torch.equal(torch.cat(parts, dim), in_slabs(x, scaling))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_group_of_experts_is_each_of_them(recipe: type[Narrow]) -> None:
    """Also one without rows; the gradients of their weights are those of bf16, whichever tokens meet."""
    here, counts = small(recipe), (24, 0, 40)
    x, weight, grad = lively(64, 96), lively(3, 80, 96, seed=1), lively(64, 80, seed=2)
    parts = zip(x.split(counts), grad.split(counts), weight, strict=True)
    each = [(here.fprop(rows, one), here.dgrad(back, one)) for rows, back, one in parts if len(rows)]
    sizes = Sizes(counts)
    assert torch.equal(here.fprop(x, weight, sizes=sizes), torch.cat([out for out, _ in each]))
    assert torch.equal(here.dgrad(grad, weight, sizes=sizes), torch.cat([of_x for _, of_x in each]))
    assert torch.equal(here.wgrad(grad, x, sizes=sizes), Multiply().wgrad(grad, x, sizes=sizes))


# --- rows and tensors ---

SPANNING: list[type[Narrow]] = [Rowwise, Tensorwise]


def of_factors(here: Narrow, x: Tensor, grad: Tensor, weight: Tensor) -> list[Tensor]:
    """Every factor of the three products, rounded: x, grad [tokens, channels], weight [outputs, inputs]."""
    return [
        here._tokens(x, here.along, INPUTS),
        here._tokens(x, here.down, INPUTS),
        here._tokens(grad, here.gradient_along, OUTPUTS),
        here._tokens(grad, here.gradient_down, OUTPUTS),
        here._weight(weight, here.weight_along),
        here._weight(weight, here.weight_down),
    ]


@pytest.mark.parametrize("recipe", SPANNING)
@pytest.mark.parametrize("cut", [TOKENS, INPUTS, OUTPUTS])
def test_with_the_maxima_of_all_ranks_a_share_has_the_numbers_of_the_whole(cut: str, recipe: type[Narrow]) -> None:
    factors = [lively(64, 96), lively(64, 80, seed=2), lively(80, 96, seed=1)]
    dims = [{TOKENS: 0, INPUTS: 1}, {TOKENS: 0, OUTPUTS: 1}, {OUTPUTS: 0, INPUTS: 1}]
    for x, d in zip(factors, dims, strict=True):
        if cut in d:
            x.narrow(d[cut], 0, x.shape[d[cut]] // 2).mul_(2.0**-14)  # by its own maximum the first rank would round less
    parts = [x.chunk(2, d[cut]) if cut in d else (x, x) for x, d in zip(factors, dims, strict=True)]
    told, heard, alone = list[list[Tensor]](), list[list[Tensor]](), list[list[Tensor]]()
    for rank in range(2):  # what each rank would tell
        here, said = recipe(), list[Tensor]()
        here.shares[cut] = lambda amax, said=said: said.append(amax.clone()) or amax
        alone.append(of_factors(here, *(both[rank] for both in parts)))
        told.append(said)
    for rank in range(2):
        here, answers = recipe(), iter([torch.maximum(*both) for both in zip(*told, strict=True)])
        here.shares[cut] = lambda _, answers=answers: next(answers)
        heard.append(of_factors(here, *(both[rank] for both in parts)))
        assert next(answers, None) is None, "asked for exactly the maxima that the cut goes through"
    whole = of_factors(recipe(), *factors)
    for number, d in enumerate([dims[0], dims[0], dims[1], dims[1], dims[2], dims[2]]):
        if cut in d:
            assert torch.equal(torch.cat([heard[0][number], heard[1][number]], d[cut]), whole[number])
    assert any(not torch.equal(one, other) for one, other in zip(alone[0], heard[0], strict=True)), (
        "a share alone has other numbers"
    )


@pytest.mark.parametrize("recipe", SPANNING)
def test_each_microbatch_is_a_tensor_of_its_own(recipe: type[Narrow]) -> None:
    here, one, x, grad, weight = recipe(), recipe(), lively(64, 96), lively(64, 80, seed=2), lively(80, 96, seed=1)
    here.microbatch = 16
    parts = [of_factors(one, *both, weight) for both in zip(x.split(16), grad.split(16), strict=True)]
    for number, found in enumerate(of_factors(here, x, grad, weight)[:4]):
        assert torch.equal(found, torch.cat([part[number] for part in parts]))
    assert torch.equal(here.fprop(x.view(2, 32, 96), weight).flatten(0, 1), here.fprop(x, weight))


def test_tokens_of_experts_share_no_scale() -> None:
    here, x, weight = Tensorwise(), lively(64, 96), lively(3, 80, 96, seed=1)
    sizes = Sizes((24, 0, 40))
    order = torch.arange(64).flip(0)
    together = here.fprop(x, weight[:1], sizes=Sizes((64,)))
    assert torch.equal(together, here.fprop(x[order], weight[:1], sizes=Sizes((64,)))[order])
    assert torch.equal(here.fprop(x, weight, sizes=sizes)[:24], together[:24])


def test_the_least_maximum_of_each_factor_is_noted() -> None:
    here, x, weight = Tensorwise(), lively(64, 96), lively(80, 96, seed=1)
    here.layer = "up"
    with maxima() as seen:
        here.fprop(x, weight)
        here.fprop(x / 2, weight)
    assert sorted(noted.value for noted in seen.values()) == sorted([float(x.abs().max()) / 2, float(weight.abs().max())])
    assert all(name.startswith("up, ") for name in seen)
