"""Recipes of few bits: products of rounded factors, also split among ranks, are within the definition's bound."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.kernels.draws import Tokens, working_on
from megalith.kernels.elements import E2M1, E4M3
from megalith.kernels.grouped import Sizes
from megalith.kernels.hadamard import rotated
from megalith.kernels.multiply import Multiply
from megalith.kernels.narrow import INPUTS, OUTPUTS, TOKENS, Narrow, in_slabs, losses, maxima
from megalith.kernels.product import defined_product
from megalith.kernels.quantise import ALL, Scaling, quantise
from megalith.kernels.recipes import Blockwise, Microscaled, Microscaled4, NvFp4, Rowwise, Tensorwise
from megalith.spec.numbers import PrecisionSpec

RECIPES: list[type[Narrow]] = [Blockwise, Microscaled, Microscaled4]
EVERY: list[type[Narrow]] = [*RECIPES, NvFp4]
SQUARES = (Blockwise, NvFp4, Microscaled4)
"""Recipes with a scale for each square of a weight."""


def lively(*shape: int, seed: int = 0) -> Tensor:
    """Return bf16 numbers whose tiles of 16 differ in magnitude by up to 2^12, so that a misplaced scale shows."""
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
    scaling = Scaling(E4M3, block, "fp32")
    assert torch.equal(in_slabs(x, scaling), decoded(x, scaling)), "in fp32, since bf16 has not all of them"


def test_an_infinity_is_no_large_number() -> None:
    x, weight = lively(4, 32), lively(8, 32)
    x[1, 3] = torch.inf
    out = small(Blockwise).fprop(x, weight)
    assert out[1].isnan().all() and out[[0, 2, 3]].isfinite().all()


# --- products ---


def by_tiles(a: Tensor, b: Tensor, tile: int) -> Tensor:
    """Return a b, summed along each tile of the inner dim in fp32, and added up in fp32."""
    total = torch.zeros(a.shape[0], b.shape[1])
    for first in range(0, a.shape[1], tile):
        total += a[:, first : first + tile] @ b[first : first + tile]
    return total


@pytest.mark.parametrize("inner", [384, 200, 128, 40, 0])
def test_the_definition_adds_up_partial_sums_of_128(inner: int) -> None:
    a, b = lively(3, 16, inner).float(), lively(inner, 24, seed=1).float()
    found = defined_product(a, b)
    assert found.shape == (3, 16, 24)
    assert torch.equal(found.flatten(0, 1), by_tiles(a.flatten(0, 1), b, 128))
    assert torch.equal(found, a @ b) or inner > 128
    if inner == 384:  # 2^24 + 1 is no fp32 number: the second tile's sum is lost unless it is formed first
        a, b = torch.zeros(1, 384), torch.ones(384, 1)
        a[0, 0], a[0, 128:] = 2.0**24, 1.0
        assert float(defined_product(a, b)) == 2.0**24 + 256
        assert float(defined_product(a, b, tile=1)) == 2.0**24


def products_and_factors(here: Narrow, tokens: int, inputs: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return forward and both gradients of a layer of 80 outputs, each with its decoded factors a and b of a b."""
    x, weight, grad = lively(tokens, inputs), lively(80, inputs, seed=1), lively(tokens, 80, seed=2)
    return [
        (here.fprop(x, weight), decoded(x, here.along), decoded(weight, here.weight_along).T),
        (here.dgrad(grad, weight), decoded(grad, here.gradient_along), decoded(weight, here.weight_down)),
        (here.wgrad(grad, x), decoded(grad, here.gradient_down).T, decoded(x, here.down)),
    ]


WHOLE = [(recipe, choices) for recipe in (Blockwise, Rowwise, Tensorwise) for choices in ({"scale": "fp32"}, {})]


@pytest.mark.parametrize("tokens", [384, 200])
@pytest.mark.parametrize(("recipe", "choices"), [*WHOLE, (NvFp4, {}), (Microscaled, {}), (Microscaled4, {})], ids=str)
def test_the_three_products_are_those_of_the_definition(recipe: type[Narrow], choices: dict[str, Any], tokens: int) -> None:
    """On a CPU products are bitwise those of the definition, rounded once, if scales are no powers of two. Products in bf16 are equal up
    to the order of fp32 sums and the rounding of the result to bf16: that bound follows from both, not from measurements."""
    here = recipe(PrecisionSpec(**choices))
    for found, a, b in products_and_factors(here, tokens, inputs=tokens):
        assert found.dtype == torch.bfloat16
        defined, sizes = by_tiles(a, b, 128), a.double().abs() @ b.double().abs()
        assert ((defined - a.double() @ b.double()).abs() <= a.shape[1] * 2**-24 * sizes).all()
        if not here.along.exact:
            assert torch.equal(found, defined.bfloat16())
        else:
            assert ((found.double() - defined).abs() <= 2**-8 * defined.abs() + a.shape[1] * 2**-23 * sizes).all()


@pytest.mark.parametrize(("recipe", "choices"), [(Blockwise, {"scale": "fp32"}), (NvFp4, {})], ids=str)
def test_products_of_experts_are_those_of_the_definition(recipe: type[Narrow], choices: dict[str, Any]) -> None:
    """One expert has no rows. A token has a scale of its own in NVFP4."""
    here, counts = recipe(PrecisionSpec(**choices)), (24, 0, 40)
    sizes, x, weight, grad = Sizes(counts), lively(64, 384), lively(3, 200, 384, seed=1), lively(64, 200, seed=2)
    alone = recipe is NvFp4
    rows, of_rows = (
        (decoded(t.unsqueeze(1), s).squeeze(1) if alone else decoded(t, s))
        for t, s in ((x, here.along), (grad, here.gradient_along))
    )
    along, down = decoded(weight, here.weight_along), decoded(weight, here.weight_down)
    parts = [by_tiles(one, matrix.T, 128) for one, matrix in zip(rows.split(counts), along, strict=True)]
    assert torch.equal(here.fprop(x, weight, sizes=sizes), torch.cat(parts).bfloat16())
    parts = [by_tiles(one, matrix, 128) for one, matrix in zip(of_rows.split(counts), down, strict=True)]
    assert torch.equal(here.dgrad(grad, weight, sizes=sizes), torch.cat(parts).bfloat16())


def test_the_largest_number_under_an_fp32_scale_becomes_the_largest_of_its_format() -> None:
    x, weight = lively(64, 96), lively(80, 96, seed=1)
    assert not torch.equal(small(Blockwise, scale="fp32").fprop(x, weight), small(Blockwise).fprop(x, weight))


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
    for recipe in SQUARES:
        assert small(recipe).weight_along == small(recipe).weight_down
    assert small(Microscaled).weight_along != small(Microscaled).weight_down


@pytest.mark.parametrize("recipe", EVERY)
def test_choices_leave_products_wide(recipe: type[Narrow]) -> None:
    x, weight, grad, plain = lively(64, 96), lively(80, 96, seed=1), lively(64, 80, seed=2), Multiply()
    assert torch.equal(small(recipe, forward="wide").fprop(x, weight), plain.fprop(x, weight))
    assert not torch.equal(small(recipe).fprop(x, weight), plain.fprop(x, weight))
    here = small(recipe, input_gradient="wide", weight_gradient="wide")
    assert torch.equal(here.dgrad(grad, weight), plain.dgrad(grad, weight))
    assert torch.equal(here.wgrad(grad, x), plain.wgrad(grad, x))
    assert not torch.equal(small(recipe).dgrad(grad, weight), plain.dgrad(grad, weight))
    finer = torch.equal(small(recipe, gradients="e5m2").wgrad(grad, x), small(recipe).wgrad(grad, x))
    assert finer == (recipe not in (Blockwise, Microscaled)), "4 bits have one layout"


@pytest.mark.parametrize("recipe", EVERY)
def test_a_wide_forward_leaves_both_gradients_narrow(recipe: type[Narrow]) -> None:
    x, weight, grad = lively(64, 96), lively(80, 96, seed=1), lively(64, 80, seed=2)
    wide, narrow = small(recipe, forward="wide"), small(recipe)
    assert torch.equal(wide.dgrad(grad, weight), narrow.dgrad(grad, weight))
    assert torch.equal(wide.wgrad(grad, x), narrow.wgrad(grad, x))


@pytest.mark.parametrize("recipe", [Blockwise, Microscaled, Rowwise, Tensorwise])
def test_a_wide_forward_keeps_the_inputs_that_a_narrow_one_keeps(recipe: type[Narrow]) -> None:
    x, weight = lively(64, 96), lively(80, 96, seed=1)
    (out, kept), (_, narrow) = (small(recipe, forward=how, kept="fp8").keeping(x, weight) for how in ("wide", "narrow"))
    assert torch.equal(out, Multiply().fprop(x, weight)) and kept.dtype == torch.uint8 and torch.equal(kept, narrow)
    assert small(recipe, forward="wide").keeping(x, weight)[1] is x


WIDE_INPUTS = {"granularity": "tensor", "history": 2, "forward": "wide", "input_gradient": "wide"}


def test_a_history_has_no_maxima_of_factors_that_no_product_rounds() -> None:
    here, x, weight, grad = small(Tensorwise, **WIDE_INPUTS), lively(64, 96), lively(80, 96, seed=1), lively(64, 80, seed=2)
    here.remember(2, x.device)
    assert torch.equal(here.fprop(x, weight), Multiply().fprop(x, weight))
    assert torch.equal(here.dgrad(grad, weight), Multiply().dgrad(grad, weight))
    here.wgrad(grad, x)
    assert here.latest is not None
    here.take_in(here.latest)
    assert {name.split(", ")[1] for name in here.followed()} == {"inputs", "gradients of outputs"}


@pytest.mark.parametrize("recipe", EVERY)
def test_a_time_to_be_wide_leaves_every_product_wide(recipe: type[Narrow]) -> None:
    x, weight, grad, plain, here = lively(64, 96), lively(80, 96, seed=1), lively(64, 80, seed=2), Multiply(), small(recipe)
    with working_on(Tokens(torch.arange(1), torch.arange(64), wide=True)):
        assert torch.equal(here.fprop(x, weight), plain.fprop(x, weight))
        assert torch.equal(here.dgrad(grad, weight), plain.dgrad(grad, weight))
        assert torch.equal(here.wgrad(grad, x), plain.wgrad(grad, x))
    with working_on(Tokens(torch.arange(1), torch.arange(64))):
        assert not torch.equal(here.fprop(x, weight), plain.fprop(x, weight))


def test_a_bias_is_added_before_the_one_rounding() -> None:
    x, weight, bias, here = lively(64, 96), lively(80, 96, seed=1), lively(1, 80)[0], small(NvFp4)
    exact = decoded(x, here.along).double() @ decoded(weight, here.weight_along).double().T + bias.double()
    assert ((here.fprop(x, weight, bias).double() - exact).abs() <= 2**-8 * exact.abs() + 1e-3).all()


def test_a_recipe_that_names_no_blocks_is_told_so() -> None:
    with pytest.raises(TypeError, match="abstract method"):
        Narrow()  # pyright: ignore[reportAbstractUsage]


# --- cuts ---


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_rank_rounds_its_share_to_the_numbers_of_the_whole(recipe: type[Narrow], dim: int) -> None:
    """Tokens are split among context and data ranks, channels among tensor ranks, for every factor of the three products."""
    here, x = small(recipe), lively(64, 96)
    for scaling in (here.along, here.down, here.gradient_along, here.gradient_down, here.weight_along, here.weight_down):
        parts = [in_slabs(part, scaling) for part in x.chunk(2, dim)]
        assert torch.equal(torch.cat(parts, dim), in_slabs(x, scaling))


COUNTS = (24, 0, 7, 33)
"""Rows of four experts: whole tiles and a short one, none, a short one alone."""


@pytest.mark.parametrize("recipe", [*EVERY, Rowwise, Tensorwise])
def test_a_narrow_weight_gradient_of_an_expert_is_that_of_its_rows(recipe: type[Narrow]) -> None:
    """By the definition: tiles begin with each expert's first row, and its last tile is as short as it is."""
    here = small(recipe, expert_weight_gradient="narrow")
    x, grad = lively(64, 96), lively(64, 80, seed=2)
    found = here.wgrad(grad, x, sizes=Sizes(COUNTS))
    assert not torch.equal(found, Multiply().wgrad(grad, x, sizes=Sizes(COUNTS)))
    for one, rows, back in zip(found, x.split(COUNTS), grad.split(COUNTS), strict=True):
        a, b = decoded(back, here.gradient_down).T, decoded(rows, here.down).T
        exact, sizes = a.double() @ b.double().T, a.double().abs() @ b.double().abs().T
        assert ((one.double() - exact).abs() <= 2**-8 * exact.abs() + 64 * 2**-23 * sizes).all()
        assert torch.equal(one, small(recipe).wgrad(back, rows)) or not len(rows)


@pytest.mark.parametrize("recipe", [Microscaled4, NvFp4])
def test_an_experts_short_tile_is_filled_up_before_it_is_rotated_and_drawn(recipe: type[Narrow]) -> None:
    """An expert with whole tiles has the gradient of a dense layer, whatever other experts have; equal tokens give equal draws."""
    here, dense = (small(recipe, expert_weight_gradient="narrow", hadamard=True, rounding="stochastic") for _ in range(2))
    here.layer, dense.layer = "blocks.1.mlp.experts", "blocks.1.mlp.experts.up.0"  # the key of the first expert's draws
    x, grad, counts = lively(64, 96), lively(64, 80, seed=2), (32, 0, 7, 25)
    exact = [back.double().T @ rows.double() for rows, back in zip(x.split(counts), grad.split(counts), strict=True)]
    means = [torch.zeros_like(each) for each in exact]
    for step in range(40):
        sizes, numbers = Sizes(counts).of("up"), torch.arange(64) + 64 * step
        sizes.tokens = numbers
        with working_on(Tokens(torch.zeros(1, dtype=torch.int64), numbers[:32])):
            found = here.wgrad(grad, x, sizes=sizes)
            assert torch.equal(found, here.wgrad(grad, x, sizes=sizes))
            assert torch.equal(found[0], dense.wgrad(grad[:32], x[:32]))
        means = [mean + one.double() / 40 for mean, one in zip(means, found, strict=True)]
    errors = [float((mean - each).norm() / each.norm()) for mean, each in zip(means, exact, strict=True) if each.any()]
    assert max(errors) < 0.12, "rounding gradients without a bias, so only the inputs' rounding is left"


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_group_of_experts_is_each_of_them(recipe: type[Narrow]) -> None:
    """One expert has no rows. By default, weight gradients are those of bf16, whichever tokens an expert gets."""
    here, counts = small(recipe), (24, 0, 40)
    x, weight, grad = lively(64, 96), lively(3, 80, 96, seed=1), lively(64, 80, seed=2)
    parts = zip(x.split(counts), grad.split(counts), weight, strict=True)
    each = [(here.fprop(rows, one), here.dgrad(back, one)) for rows, back, one in parts if len(rows)]
    sizes = Sizes(counts)
    assert torch.equal(here.fprop(x, weight, sizes=sizes), torch.cat([out for out, _ in each]))
    assert torch.equal(here.dgrad(grad, weight, sizes=sizes), torch.cat([of_x for _, of_x in each]))
    assert torch.equal(here.wgrad(grad, x, sizes=sizes), Multiply().wgrad(grad, x, sizes=sizes))


# --- rows and tensors ---

SPANNING: list[type[Narrow]] = [Rowwise, Tensorwise, NvFp4]


def of_factors(here: Narrow, x: Tensor, grad: Tensor, weight: Tensor) -> list[Tensor]:
    """Return every rounded factor of the three products: x, grad [tokens, channels], weight [outputs, inputs]."""
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
    factors = [lively(64, 96), lively(64, 64, seed=2), lively(64, 96, seed=1)]
    dims = [{TOKENS: 0, INPUTS: 1}, {TOKENS: 0, OUTPUTS: 1}, {OUTPUTS: 0, INPUTS: 1}]
    for x, d in zip(factors, dims, strict=True):
        if cut in d:
            x.narrow(d[cut], 0, x.shape[d[cut]] // 2).mul_(2.0**-14)  # with its own maximum the first rank would round less
    parts = [x.chunk(2, d[cut]) if cut in d else (x, x) for x, d in zip(factors, dims, strict=True)]
    told, heard, alone = list[list[Tensor]](), list[list[Tensor]](), list[list[Tensor]]()
    for rank in range(2):  # the maximum that each rank would send
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


@pytest.mark.parametrize("alone", [Tensorwise, NvFp4])
def test_tokens_of_experts_have_the_same_numbers_in_any_order(alone: type[Narrow]) -> None:
    here, x, weight, order = alone(), lively(64, 96), lively(1, 80, 96, seed=1), torch.arange(64).flip(0)
    sizes = Sizes((64,))
    assert torch.equal(here.fprop(x, weight, sizes=sizes), here.fprop(x[order], weight, sizes=sizes)[order])


# --- scales that follow earlier steps ---


@pytest.mark.parametrize("scale", ["up", "fp32"])
def test_a_delayed_scale_follows_the_largest_number_of_earlier_steps(scale: str) -> None:
    choices = PrecisionSpec(granularity="tensor", scale=scale, history=2)  # pyright: ignore[reportArgumentType]
    here, now, x, weight = Tensorwise(choices), Tensorwise(choices), lively(64, 96), lively(80, 96, seed=1)
    here.remember(2, x.device)
    assert here.latest is not None
    assert torch.equal(here.fprop(x, weight), now.fprop(x, weight)), "nothing is earlier: the numbers of now"
    here.fprop(x / 2, weight)
    assert here.latest.tolist() == [float(x.abs().max()), float(weight.abs().max()), 0.0], "over all microbatches"
    here.take_in(here.latest.clone())
    assert not here.latest.any()
    less = x / 64
    whole = now._tokens(torch.cat((x, less)), now.along, INPUTS)
    assert torch.equal(here._tokens(less, here.along, INPUTS), whole[64:]), "as coarse as the scale of what was"
    assert not torch.equal(here._tokens(less, here.along, INPUTS), now._tokens(less, now.along, INPUTS))
    most = float(here._tokens(x * 64, here.along, INPUTS).abs().max())
    assert 0.99 < most / float(x.abs().max()) < 2, "larger numbers saturate"
    for _ in range(2):
        here.take_in(torch.zeros(3))
    assert torch.equal(here._tokens(less, here.along, INPUTS), now._tokens(less, now.along, INPUTS)), "forgotten after two steps"


def test_gradients_that_are_a_part_of_a_sum_have_the_scale_of_their_numbers_of_now() -> None:
    """The maximum of a rank's part depends on the plan, so no history of it is continued under another plan."""
    here, now = (Tensorwise(PrecisionSpec(granularity="tensor", history=steps)) for steps in (2, 0))
    grad = lively(64, 96)
    here.remember(2, grad.device)
    here.partial = True
    assert here.latest is not None
    here.take_in(torch.full((3,), 2.0**-20))
    assert torch.equal(here._tokens(grad, here.gradient_along, OUTPUTS), now._tokens(grad, now.gradient_along, OUTPUTS))
    assert here.latest.tolist() == [0.0, 0.0, 0.0]
    here._tokens(grad, here.along, INPUTS)
    assert here.latest.tolist() == [float(grad.abs().max()), 0.0, 0.0], "other tensors of the layer are whole"


def test_an_infinity_does_not_saturate_in_a_delayed_scale() -> None:
    here, x = Tensorwise(PrecisionSpec(granularity="tensor", history=2)), lively(64, 96)
    here.remember(2, x.device)
    here.take_in(torch.ones(3))
    x[3, 5] = torch.inf
    assert here._tokens(x, here.along, INPUTS).isnan().all()


# --- stochastic rounding ---

DRAWING: list[type[Narrow]] = [Blockwise, Microscaled4, NvFp4]


def tokens(sample: int = 0, *, first: int = 0, count: int = 64) -> Tokens:
    """Return `count` consecutive tokens of one sample."""
    return Tokens(torch.tensor([sample]), torch.arange(first, first + count))


def of_gradients(here: Narrow, grad: Tensor, work: Tokens) -> tuple[Tensor, Tensor]:
    """Return gradients [tokens, outputs], rounded for the input gradient and for the weight gradient."""
    with working_on(work):
        along = here._tokens(grad, here.gradient_along, OUTPUTS, draws=here._draws(grad, "of inputs"))
        down = here._tokens(grad, here.gradient_down, OUTPUTS, draws=here._draws(grad, "of weights"))
    return along.float(), down.float()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", DRAWING)
def test_256_draws_are_unbiased_and_the_nearest_number_is_not(recipe: type[Narrow]) -> None:
    """The mean of the draws equals the gradient within 4 standard errors, along the gradient and number by number. Saturated numbers are
    left out: in NVFP4 the largest numbers of a block whose E4M3 scale was rounded down."""
    here, near, grad = small(recipe, rounding="stochastic"), small(recipe), lively(64, 80)
    drawn = torch.stack([torch.stack(of_gradients(here, grad, tokens(sample))) for sample in range(256)]).double()
    nearest = torch.stack(of_gradients(near, grad, tokens())).double()
    for product, scaling in enumerate((here.gradient_along, here.gradient_down)):
        exact = grad.double()
        inside = (drawn[:, product].amin(0) <= exact) & (exact <= drawn[:, product].amax(0))
        moves = inside & (drawn[:, product].var(0) > 0)
        assert inside.float().mean() > (0.85 if recipe is NvFp4 else 0.95), scaling
        mean, error = drawn[:, product].mean(0)[moves], (drawn[:, product].var(0)[moves] / 256).sqrt()
        off, exact = mean - exact[moves], exact[moves]
        assert (off * exact).sum().abs() < 4 * (error * exact).norm()
        assert (off / error).square().mean() < 2
        assert ((nearest[product][moves] - exact) / error).square().mean() > 16
    assert not torch.equal(drawn[0], drawn[1]), "every sample has draws of its own"
    assert not torch.equal(drawn[0, 0] - nearest[0], drawn[0, 1] - nearest[1]), "and every product"


@pytest.mark.parametrize("recipe", DRAWING)
def test_a_share_of_the_gradients_is_drawn_as_the_whole(recipe: type[Narrow]) -> None:
    """The draws are equal whichever tokens and outputs a rank has, and when they are repeated."""
    here, grad = small(recipe, rounding="stochastic"), lively(64, 96)
    here.layer = "blocks.1.mlp.up"
    whole = of_gradients(here, grad, tokens(5))
    assert all(map(torch.equal, whole, of_gradients(here, grad, tokens(5))))
    part = small(recipe, rounding="stochastic")
    part.layer, part.first_output = here.layer, 48
    for dim in (TOKENS, OUTPUTS):
        part.shares[dim] = lambda amax: amax.fill_(float(grad.abs().max()))  # the maximum over all ranks
    found = of_gradients(part, grad[32:, 48:], tokens(5, first=32, count=32))
    assert all(torch.equal(share, all_of_it[32:, 48:]) for share, all_of_it in zip(found, whole, strict=True))
    part.first_output = 0
    moved = of_gradients(part, grad[32:, 48:], tokens(5, first=32, count=32))
    assert not any(map(torch.equal, found, moved))


@pytest.mark.parametrize("recipe", DRAWING)
def test_rows_of_experts_are_drawn_by_their_tokens(recipe: type[Narrow]) -> None:
    here, grad, weight, order = small(recipe, rounding="stochastic"), lively(64, 80), lively(1, 80, 96), torch.randperm(64)
    one, other = Sizes((64,)), Sizes((64,))
    one.tokens, other.tokens = torch.arange(64), torch.arange(64)[order]
    with working_on(tokens()):
        assert torch.equal(here.dgrad(grad, weight, sizes=one)[order], here.dgrad(grad[order], weight, sizes=other))
        assert not torch.equal(here.dgrad(grad, weight, sizes=one)[order], here.dgrad(grad[order], weight, sizes=one))


@pytest.mark.parametrize("recipe", DRAWING)
def test_matrices_of_experts_have_draws_of_their_own(recipe: type[Narrow]) -> None:
    """A token that is sent to three experts has other draws at each of them, and for each of an expert's weights. A rank with the last two
    experts has the draws of the process that has all three."""
    here, part, grad = small(recipe, rounding="stochastic"), small(recipe, rounding="stochastic"), lively(16, 80).repeat(3, 1)
    here.layer = part.layer = "blocks.1.mlp.experts"
    part.first_expert = 1

    def draws(of: Narrow, weight: str, counts: list[int]) -> Tensor:
        sizes = Sizes(counts).of(weight)
        sizes.tokens = torch.arange(16).repeat(len(counts))
        found = of._draws(grad[: sum(counts)], "of inputs", sizes)
        assert found is not None
        return found

    with working_on(tokens()):
        gate, up, share = draws(here, "gate", [16] * 3), draws(here, "up", [16] * 3), draws(part, "up", [16] * 2)
    every = [*gate.split(16), *up.split(16)]
    for number, one in enumerate(every):
        assert all((one == other).float().mean() < 0.01 for other in every[:number])
    assert torch.equal(share, up[16:])


def test_who_does_not_say_which_tokens_are_at_work_is_told_how() -> None:
    here, grad, weight = small(NvFp4, rounding="stochastic"), lively(64, 80), lively(80, 96)
    here.layer = "blocks.1.mlp.up"
    with pytest.raises(RuntimeError, match=r"blocks.1.mlp.up rounds .* inside kernels.draws.working_on"):
        here.dgrad(grad, weight)


# --- Hadamard transforms ---


@pytest.mark.parametrize("size", [1, 4, 16, 32])
def test_a_rotation_is_orthogonal(size: int) -> None:
    """The transform's matrix has entries of one magnitude, and the product of two rotated factors is that of the factors."""
    matrix = rotated(torch.eye(size), size)
    assert torch.equal(matrix.abs(), torch.full((size, size), size**-0.5))
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size), atol=1e-6, rtol=0)
    grad, x = lively(64, 80), lively(64, 96)
    torch.testing.assert_close(rotated(grad, size).T @ rotated(x, size), grad.float().T @ x.float(), rtol=1e-4, atol=1e-2)
    assert torch.equal(rotated(x, size)[32:], rotated(x[32:], size)), "a share is rotated as the whole"


def ratio_of_errors(recipe: type[Narrow], grad: Tensor, x: Tensor) -> float:
    """Return the ratio of the errors of a weight gradient with rotated factors and one without rotation."""
    exact = grad.double().T @ x.double()
    rotates, plain = ((recipe(PrecisionSpec(hadamard=h)).wgrad(grad, x).double() - exact).norm() for h in (True, False))
    return float(rotates / plain)


def ordinary(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_rotation_lowers_the_error_of_weight_gradients_with_outliers() -> None:
    """A power-of-two scale represents an outlier no better than another number, so MXFP4 gains. NVFP4's scale follows the outlier,
    which is then nearly exact; a rotation spreads it over all tokens and gains nothing."""
    grad, x = ordinary(512, 80, seed=0), ordinary(512, 96, seed=1)
    x[5::16] *= 16
    assert ratio_of_errors(Microscaled4, grad.bfloat16(), x.bfloat16()) < 0.8
    assert 1 < ratio_of_errors(NvFp4, grad.bfloat16(), x.bfloat16()) < 1.2


@pytest.mark.parametrize("recipe", [Microscaled4, NvFp4])
def test_a_rotation_saves_what_outliers_would_hide(recipe: type[Narrow]) -> None:
    """A few tokens have large activations and no gradient. Without rotation, the component that all other tokens share is
    rounded to 0."""
    grad, x = 1 + 0.2 * ordinary(512, 80, seed=0), 1 + 0.2 * ordinary(512, 96, seed=1)
    grad[5::16], x[5::16] = 0, 32
    assert ratio_of_errors(recipe, grad.bfloat16(), x.bfloat16()) < 0.3


@pytest.mark.parametrize(
    ("scaling", "saturated", "zeroed"),
    [
        (Scaling(E4M3, (1, 4), "up"), 0, 1),
        (Scaling(E4M3, (1, 4), "down"), 1, 1),
        (Scaling(E4M3, (1, 4), "fp32"), 0, 1),
        (Scaling(E2M1, (1, 4), "e4m3"), 0, 2),
    ],
    ids=str,
)
def test_numbers_that_are_cut_off_or_become_0_are_counted(scaling: Scaling, saturated: int, zeroed: int) -> None:
    """OCP's scale leaves 511, which is above 448. 2^-12 of the largest number is below E4M3's subnormals, and 1 is below E2M1's too."""
    x = torch.tensor([[511.0, 2.0**-12, 1.0, 0.0]])
    lost = torch.zeros(3, dtype=torch.int64)
    found = in_slabs(x, scaling, lost=lost)
    assert lost.tolist() == [4, saturated, zeroed] and int((found == 0).sum()) == zeroed + 1


def test_counts_are_those_of_a_part_and_of_narrow_products_alone() -> None:
    one, other = Tensorwise(), Tensorwise()
    one.layer, other.layer = "blocks.1.mlp.up", "blocks.2.mlp.up"
    x, weight = torch.ones(8, 4), torch.ones(2, 4)
    with losses() as lost:
        one.fprop(x, weight)
        with working_on(Tokens(torch.arange(1), torch.arange(8), raised=frozenset({"blocks.2"}))):
            other.fprop(x, weight)
            one.fprop(x, weight)
    assert {part: counts.tolist() for part, counts in lost.items()} == {"blocks.1": [80, 0, 0]}


# --- inputs kept in 8 bits ---

KEEPING: dict[str, Narrow] = {
    "tiles": small(Blockwise, kept="fp8"),
    "tiles, OCP's scales": small(Blockwise, kept="fp8", scale="ocp"),
    "blocks": small(Microscaled, kept="fp8"),
    "rows": small(Rowwise, kept="fp8"),
    "tensors": small(Tensorwise, kept="fp8"),
}


@pytest.mark.parametrize("here", KEEPING.values(), ids=KEEPING)
def test_inputs_are_kept_as_forward_rounds_them(here: Narrow) -> None:
    """Inputs take little more than half of the bytes, and the result equals that of a product that keeps them wide."""
    x, weight = lively(4, 16, 96), lively(32, 96, seed=1)
    out, kept = here.keeping(x, weight)
    assert torch.equal(out, here.fprop(x, weight))
    assert torch.equal(here.restored(kept, 96, x.dtype), here._tokens(x, here.along, INPUTS).flatten(0, 1))
    blocks = 1 if here.along.block[1] == ALL else 96 // 16
    assert kept.dtype == torch.uint8 and kept.nbytes == 64 * (96 + 4 * blocks)
    grad = lively(64, 32, seed=2)
    assert torch.equal(here.restored(x, 96, x.dtype), x.flatten(0, 1)), "what was kept while products were wide"
    exact = torch.equal(here.wgrad(grad, here.restored(kept, 96, x.dtype)), here.wgrad(grad, x.flatten(0, 1)))
    assert exact == (here is not KEEPING["tiles, OCP's scales"]), "these cut off the largest number of a tile twice"


def test_a_number_that_is_not_finite_is_kept_as_one() -> None:
    here, x = small(Blockwise, kept="fp8"), torch.ones(2, 32, dtype=torch.bfloat16)
    x[0, 3] = torch.inf
    found = here.restored(here.keeping(x, lively(8, 32))[1], 32, x.dtype)
    assert found[0, :16].isnan().all() and found[1].equal(x[1]) and found[0, 16:].equal(x[0, 16:])


def test_layers_that_multiply_the_same_tensor_keep_it_once() -> None:
    """A tensor that was modified in place counts as another tensor."""
    one, other = small(Blockwise, kept="fp8"), small(Blockwise, kept="fp8")
    x, weight = lively(32, 32).requires_grad_(), lively(16, 32).requires_grad_()
    saved = set[int]()

    def keep(tensor: Tensor) -> Tensor:
        saved.add(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outs = one(x, weight), other(x, weight)
        assert len(saved) == 1
        with torch.no_grad():
            x.mul_(2)
        outs = *outs, one(x, weight)
        assert len(saved) == 2
    grads = torch.autograd.grad(outs, weight, [torch.ones_like(out) for out in outs])
    before = x.detach() / 2
    ones, rounded = torch.ones(32, 16).bfloat16(), [in_slabs(each, one.along) for each in (before, before, x.detach())]
    expected = torch.stack([one.wgrad(ones, each).float() for each in rounded]).sum(0)
    assert torch.allclose(grads[0].float(), expected, rtol=2**-7)


def test_nothing_is_kept_without_a_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megalith.kernels.narrow.pack", None)
    with torch.no_grad():
        small(Blockwise, kept="fp8")(lively(32, 32), lively(16, 32))
