"""Products in 8 bits on a GPU that has them: the codes are those of the definition, the products within its bound."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.kernels.elements import E4M3, E5M2, Element
from megalith.kernels.narrow import Narrow
from megalith.kernels.quantise import ALL, Scale, Scaling, quantise
from megalith.kernels.recipes import Blockwise, Rowwise, Tensorwise
from megalith.kernels.scaled import TILE, Factor, coded, multiplies, scaled_product
from megalith.spec.numbers import PrecisionSpec, multiplies_codes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),
]  # the compiler tells of the machine and of what is deprecated

READ = [
    ((1, TILE), False), ((TILE, 1), True), ((TILE, TILE), False), ((TILE, TILE), True),
    ((1, ALL), False), ((ALL, 1), True), ((ALL, ALL), False), ((ALL, ALL), True),
]  # fmt: skip
"""Blocks, and whether a product sums over rows."""
RECIPES: dict[str, type[Narrow]] = {"tile": Blockwise, "row": Rowwise, "tensor": Tensorwise}

CODES = PrecisionSpec(multiply="codes")


@pytest.fixture
def eight(gpu: torch.device) -> torch.device:
    """A GPU that multiplies numbers in 8 bits with scales of every kind."""
    major, minor = torch.cuda.get_device_capability(gpu)
    if not multiplies_codes("tile", major + minor / 10):
        # other devices compute these products from rounded factors in bf16, which tests/kernels holds
        pytest.skip(f"needs a GPU of compute capability 9.0, and this one has {major}.{minor}")
    return gpu


def lively(*shape: int, device: torch.device, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Numbers whose tiles differ in size by up to 2^8, so that a scale in a wrong place cannot hide."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=random)
    for dim in (0, 1):
        sizes = torch.randint(-4, 5, (-(-shape[dim] // TILE),), generator=random).repeat_interleave(TILE)[: shape[dim]]
        x = x * (2.0**sizes).view(-1, *[1] * (1 - dim))
    x[:, 5], x[3] = 0.0, 0.0
    return x.to(device, dtype)


@pytest.mark.parametrize(("block", "down"), READ, ids=str)
@pytest.mark.parametrize(("element", "scale"), [(E4M3, "up"), (E4M3, "fp32"), (E5M2, "up")], ids=str)
def test_codes_and_scales_are_those_of_the_definition_bit_for_bit(
    element: Element, scale: Scale, block: Any, down: bool, eight: torch.device
):
    scaling = Scaling(element, block, scale)
    for rows, columns in ((512, 384), (256, 640)):
        x = lively(rows, columns, device=eight)
        expected = quantise(x.cpu(), scaling)
        wanted = (expected.codes.T, expected.scales.T) if down else (expected.codes, expected.scales)
        codes, scales = coded(Factor(x, scaling, down=down))
        assert codes.is_contiguous()
        assert torch.equal(codes.view(torch.uint8).cpu(), wanted[0])
        assert torch.equal(scales.cpu(), wanted[1])


CHOICES: list[dict[str, Any]] = [{}, {"scale": "fp32"}, {"gradients": "e5m2"}]


def of_sums(inner: int) -> float:
    """Return the largest error of a sum of so many products, relative to the sum of their sizes. Hopper adds 32 products at a time to a sum
    of about 14 bits, and 128 products so before it goes on in fp32 (DeepSeek-V3, section 3.3.2)."""
    return TILE / 32 * 2.0**-13 + inner * 2.0**-23


def factors_of(shape: tuple[int, int, int], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, weight and the gradient of the outputs, for so many rows, outputs and inputs."""
    rows, outputs, inputs = shape
    sizes = (rows, inputs), (outputs, inputs), (rows, outputs)
    x, weight, grad = (lively(*size, device=device, seed=seed) for seed, size in enumerate(sizes))
    return x, weight, grad


def products_of(here: Narrow, x: Tensor, weight: Tensor, grad: Tensor) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Return each product of a layer, and its decoded factors a and b of a bᵀ, in fp64."""
    of = lambda tensor, scaling: quantise(tensor, scaling).decoded().double()  # noqa: E731
    return {
        "forward": (here.fprop(x, weight), of(x, here.along), of(weight, here.weight_along)),
        "of inputs": (here.dgrad(grad, weight), of(grad, here.gradient_along), of(weight, here.weight_down).T),
        "of weights": (here.wgrad(grad, x), of(grad, here.gradient_down).T, of(x, here.down).T),
    }


@pytest.mark.parametrize("granularity", RECIPES)
@pytest.mark.parametrize("choices", CHOICES, ids=str)
@pytest.mark.parametrize("shape", [(512, 768, 1280), (256, 1024, 512), (1024, 128, 128), (128, 512, 4096)], ids=str)
def test_the_three_products_are_those_of_the_definition(shape: Any, choices: Any, granularity: Any, eight: torch.device):
    """Up to the hardware's sums and the rounding of the result to bf16. Rows of scales number 1 to 32: 10, 4 and 1 are sizes at which
    cuBLAS wants other strides."""
    here = RECIPES[granularity](PrecisionSpec(multiply="codes", granularity=granularity, **choices))
    for name, (found, a, b) in products_of(here, *factors_of(shape, eight)).items():
        assert found.dtype == torch.bfloat16
        exact, sizes = a @ b.T, a.abs() @ b.abs().T
        sums = of_sums(a.shape[1]) * sizes
        assert ((found.double() - exact).abs() <= 2.0**-8 * (exact.abs() + sums) + sums).all(), name


def ulps(found: Tensor, exact: Tensor) -> Tensor:
    """Return the distance of bf16 numbers from exact ones (fp64), in units of the last place of a bf16 number of that size."""
    return (found.double() - exact).abs() / torch.ldexp(torch.ones_like(exact), torch.frexp(exact).exponent - 8)


def test_an_ulp_is_the_distance_of_neighbours():
    one = torch.ones(1, dtype=torch.bfloat16)
    above, below = (torch.nextafter(one, towards * one) for towards in (2, 0))
    assert float(ulps(above, one.double())) == float(ulps(one, below.double())) == 1.0


@pytest.mark.any_device
@pytest.mark.parametrize("granularity", RECIPES)
@pytest.mark.parametrize("choices", CHOICES, ids=str)
def test_products_are_within_an_ulp_where_nothing_cancels_out(choices: Any, granularity: Any, gpu: torch.device):
    """Half an ulp is the rounding of the result. Where terms of both signs cancel out, ulps of the small result say nothing. A device
    without products in 8 bits computes these products from rounded factors."""
    here = RECIPES[granularity](PrecisionSpec(multiply="codes", granularity=granularity, **choices))
    positive = (each.abs() for each in factors_of((256, 384, 512), gpu))
    for name, (found, a, b) in products_of(here, *positive).items():
        most = float(ulps(found, a @ b.T).max())
        assert most <= 0.5 + 2.0**8 * of_sums(a.shape[1]) < 1, (name, most)


@pytest.mark.parametrize("block", [(1, TILE), (ALL, ALL)], ids=str)
def test_the_layout_of_the_numbers_does_not_matter(block: Any, eight: torch.device):
    x, weight = lively(384, 256, device=eight).T, lively(512, 384, device=eight, seed=1)
    columns, rows = (Factor(each, Scaling(E4M3, block)) for each in (x, x.contiguous()))
    other = Factor(weight, Scaling(E4M3, (TILE, TILE) if block[0] == 1 else block))
    assert torch.equal(scaled_product(columns, other, torch.bfloat16), scaled_product(rows, other, torch.bfloat16))


def test_products_take_the_device_s_way_and_others_the_definition_s(eight: torch.device, monkeypatch: pytest.MonkeyPatch):
    here, calls = Blockwise(CODES), []
    monkeypatch.setattr("megalith.kernels.narrow.scaled_product", lambda *args: calls.append(1) or scaled_product(*args))
    x, weight = lively(256, 384, device=eight), lively(512, 384, device=eight, seed=1)
    here.fprop(x, weight)
    here.dgrad(lively(256, 512, device=eight), weight)
    here.wgrad(lively(256, 512, device=eight), x)
    assert len(calls) == 3
    here.fprop(x[:, :200].contiguous(), weight[:, :200].contiguous())  # the last tile is short
    here.fprop(x[:100], weight)  # 100 rows are no multiple of 16
    assert len(calls) == 3


def test_a_number_that_is_none_makes_its_products_none(eight: torch.device):
    x, weight = lively(256, 256, device=eight), lively(256, 256, device=eight, seed=1)
    x[7, 9] = torch.inf
    assert Blockwise(CODES).fprop(x, weight).isnan().all(1).nonzero().flatten().tolist() == [7]


def test_two_factors_in_e5m2_have_no_product(eight: torch.device):
    x = lively(256, 256, device=eight)
    one, other = (Factor(x, Scaling(element, (ALL, ALL))) for element in (E4M3, E5M2))
    assert multiplies(one, other) and multiplies(other, one) and not multiplies(other, other)
    assert not multiplies(replace(one, numbers=x.cpu()), replace(one, numbers=x.cpu()))
