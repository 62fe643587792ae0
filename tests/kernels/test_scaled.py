"""Products in 8 bits, with torch's product on a CPU in place of a GPU's. What only a GPU has is in tests/gpu/test_scaled.py."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from megalith.kernels import scaled
from megalith.kernels.draws import Tokens, working_on
from megalith.kernels.elements import E4M3, E5M2
from megalith.kernels.narrow import Narrow, losses
from megalith.kernels.quantise import ALL, Scaling, quantise
from megalith.kernels.recipes import Blockwise, Rowwise, Tensorwise
from megalith.kernels.scaled import Factor, multiplies, scaled_product
from megalith.spec.numbers import PrecisionSpec, in_codes
from tests.kernels.test_narrow import lively

RECIPES: dict[str, type[Narrow]] = {"row": Rowwise, "tensor": Tensorwise}
CHOICES: list[dict[str, Any]] = [{}, {"scale": "fp32"}, {"gradients": "e5m2"}, {"scale": "ocp"}]

CODES = PrecisionSpec(multiply="codes")


@pytest.fixture
def eight(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Let this CPU count as a Hopper GPU; the list grows with each product in codes."""
    products: list[None] = []

    def counted(a: Factor, b: Factor, dtype: torch.dtype) -> Tensor:
        products.append(None)
        return scaled_product(a, b, dtype)

    monkeypatch.setattr(scaled, "capability", lambda device: 9.0)
    monkeypatch.setattr(scaled, "_compiled", lambda: scaled._encode)  # tests/gpu compares what the compiler makes of it
    monkeypatch.setattr("megalith.kernels.narrow.scaled_product", counted)
    try:
        Tensorwise(CODES).fprop(lively(16, 16), lively(16, 16))
    except NotImplementedError:
        pytest.skip(f"torch {torch.__version__} has no product of 8-bit factors on CPUs")  # 2.15 has
    products.clear()
    return products


@pytest.mark.parametrize("granularity", RECIPES)
@pytest.mark.parametrize("choices", CHOICES, ids=str)
def test_the_three_products_are_those_of_the_definition(choices: dict[str, Any], granularity: Any, eight: list[None]) -> None:
    here = RECIPES[granularity](PrecisionSpec(multiply="codes", granularity=granularity, **choices))
    x, weight, grad = lively(64, 96), lively(80, 96, seed=1), lively(64, 80, seed=2)

    def of(tensor: Tensor, scaling: Scaling) -> Tensor:
        return quantise(tensor, scaling).decoded().double()

    products = {
        "forward": (here.fprop(x, weight), of(x, here.along), of(weight, here.weight_along)),
        "of inputs": (here.dgrad(grad, weight), of(grad, here.gradient_along), of(weight, here.weight_down).T),
        "of weights": (here.wgrad(grad, x), of(grad, here.gradient_down).T, of(x, here.down).T),
    }
    assert len(eight) == 3
    for name, (found, a, b) in products.items():
        exact, sums = a @ b.T, a.shape[1] * 2.0**-23 * (a.abs() @ b.abs().T)
        assert ((found.double() - exact).abs() <= 2.0**-8 * (exact.abs() + sums) + sums).all(), name


def test_a_bias_is_added_and_the_shape_of_x_is_kept(eight: list[None]) -> None:
    x, weight, bias = lively(2, 32, 64), lively(48, 64, seed=1), lively(1, 48, seed=2)[0]
    here = Tensorwise(CODES)
    assert torch.equal(here.fprop(x, weight, bias), here.fprop(x, weight) + bias)
    out = torch.empty(64, 64, dtype=torch.bfloat16)
    grad = lively(64, 48, seed=3)
    assert here.dgrad(grad, weight, out=out) is out and torch.equal(out, here.dgrad(grad, weight))


def test_codes_lie_in_rows_whatever_the_layout_of_the_numbers(eight: list[None]) -> None:
    x = lively(96, 64).T
    for down in (False, True):
        codes, _ = scaled.coded(Factor(x, Scaling(E4M3, (ALL, ALL)), down=down))
        assert codes.is_contiguous()


def test_maxima_of_other_ranks_count(eight: list[None]) -> None:
    """A rank with a part of the channels has the codes that the whole tensor has there."""
    x = lively(64, 96)
    x[5, 90] = 3e4
    whole, part = Tensorwise(CODES), Tensorwise(CODES)
    part.shares["inputs"] = lambda amax: amax.copy_(torch.maximum(amax, x.abs().amax().float()))
    factor = part._factor(x[:, :48], part.along, "tokens", "inputs")
    codes, scales = scaled.coded(factor)
    wanted, wanted_scales = scaled.coded(whole._factor(x, whole.along, "tokens", "inputs"))
    assert torch.equal(codes.view(torch.uint8), wanted[:, :48].contiguous().view(torch.uint8))
    assert torch.equal(scales, wanted_scales)


def test_what_the_device_has_no_product_for_is_multiplied_as_the_definition_says(eight: list[None]) -> None:
    x, weight = lively(64, 96), lively(80, 96, seed=1)
    Tensorwise().fprop(x, weight)  # not asked for
    Tensorwise(CODES).fprop(x[:20], weight)  # 20 rows
    with losses():
        Tensorwise(CODES).fprop(x, weight)  # what is lost is counted
    Blockwise(PrecisionSpec(multiply="codes", tile=32)).fprop(x, weight)
    assert not eight


@pytest.mark.parametrize(("blocks", "known"), [(((1, 128), (128, 128)), True), (((128, 128), (1, 128)), False)], ids=str)
def test_pairs_of_blocks(blocks: Any, known: bool, eight: list[None]) -> None:
    x = torch.zeros(256, 256)
    assert multiplies(*(Factor(x, Scaling(E4M3, block)) for block in blocks)) == known
    assert not multiplies(*(Factor(x, Scaling(E5M2, (ALL, ALL))) for _ in range(2)))


@pytest.mark.slow
def test_blocks_are_compiled_once_whatever_their_names(eight: list[None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megalith.kernels.narrow.scaled_product", scaled_product)

    class Block(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(lively(64, 64, seed=number))
            self.multiply = Tensorwise(CODES)
            self.multiply.layer = f"blocks.{number}.mlp.up"

        def forward(self, x: Tensor) -> Tensor:
            return self.multiply(nn.functional.silu(x), self.weight)

    def step(blocks: nn.Sequential, number: int) -> list[Tensor]:
        x = lively(64, 64, seed=9).requires_grad_()
        with working_on(Tokens(torch.arange(4) + number, torch.arange(16))):
            out = blocks(x)
            out.float().square().mean().backward()
        found = [out.detach(), x.grad, *(parameter.grad for parameter in blocks.parameters())]
        blocks.zero_grad()
        return [tensor for tensor in found if tensor is not None]

    torch.compiler.reset()
    blocks = nn.Sequential(*map(Block, range(3)))
    expected, counter = step(blocks, 0), CompileCounterWithBackend("aot_eager")
    for block in blocks:
        block.compile(backend=counter, fullgraph=True)
    for number in range(3):
        for found, wanted in zip(step(blocks, number), expected, strict=True):
            assert torch.equal(found, wanted)
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("choices", "capability", "expected"),
    [
        ({}, 9.0, True),
        ({}, 10.0, False),
        ({}, None, False),
        ({"tile": 64}, 9.0, False),
        ({"granularity": "tensor"}, 8.9, True),
        ({"granularity": "row"}, 8.9, False),
        ({"granularity": "row"}, 10.0, True),
        ({"granularity": "tensor", "rounding": "stochastic"}, 9.0, False),
    ],
    ids=str,
)
def test_which_devices_multiply_in_8_bits(choices: dict[str, Any], capability: float | None, expected: bool) -> None:
    assert in_codes(PrecisionSpec(**choices), "fp8", capability) == expected
    assert not in_codes(PrecisionSpec(**choices), "mxfp8", capability)
