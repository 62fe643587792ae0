"""Products in bf16 on a processor without bf16 instructions, and in fp16 on any processor."""

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from megalith.kernels import product as module
from megalith.kernels.cross_entropy import cross_entropy
from megalith.kernels.grouped import Sizes
from megalith.kernels.multiply import PLAIN
from megalith.kernels.product import linear, product, widened
from megalith.prove.meter import Meter

ROUNDING = 2.0**-8  # relative rounding error of bf16


@pytest.fixture(params=[False, True], ids=["no instructions", "instructions"])
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(module, "native", lambda: request.param)
    return request.param


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).bfloat16()


def test_a_product_is_the_exact_one_rounded_once(native: bool) -> None:
    a, b = _random(2, 3, 40), _random(40, 5)
    exact = a.double() @ b.double()
    found = product(a, b)
    assert found.dtype == torch.bfloat16 and found.shape == exact.shape
    torch.testing.assert_close(found.double(), exact, rtol=ROUNDING, atol=1e-6)
    out = torch.empty(3, 5, dtype=torch.bfloat16)
    assert product(a[0], b, out=out) is out
    assert torch.equal(out, found[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_bias_is_added_before_the_one_rounding(dtype: torch.dtype, native: bool) -> None:
    """fp32 represents the sums of these whole numbers exactly, so the bits are known."""
    random = torch.Generator().manual_seed(0)
    x, weight = (torch.randint(-32, 33, shape, generator=random).to(dtype) for shape in ((2, 30, 40), (24, 40)))
    bias = (torch.randn(24, generator=random) * 100).to(dtype)
    exact = x.double() @ weight.double().T
    found = linear(x, weight, bias)
    assert torch.equal(found, (exact + bias.double()).to(dtype))
    assert not torch.equal(found, exact.to(dtype) + bias), "two roundings would show"
    assert torch.equal(PLAIN.fprop(x, weight, bias), found)


def test_layers_give_the_same_to_rounding_either_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return outputs and all gradients of a layer with a bias, of experts, and of the loss."""

    def run(native: bool) -> list[Tensor]:
        monkeypatch.setattr(module, "native", lambda: native)
        x, w, bias, experts = (_random(*shape).requires_grad_() for shape in ((12, 16), (24, 16), (24,), (3, 16, 24)))
        hidden = PLAIN(PLAIN(x, w, bias), experts, sizes=Sizes([5, 0, 7]))
        loss = cross_entropy(hidden, w.T.contiguous().detach()[:, :16].contiguous(), torch.arange(12), scale=1 / 12)
        loss.objective.backward()
        return [hidden.detach(), loss.nll, *(p.grad for p in (x, w, bias, experts) if p.grad is not None)]

    for one, other in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(one, other, rtol=4 * ROUNDING, atol=4 * ROUNDING * float(other.abs().max()))


def test_what_is_counted_is_one_product_and_its_result(native: bool) -> None:
    a, b = nn.Parameter(_random(6, 8), requires_grad=False), _random(8, 4)
    with Meter() as meter:
        meter.begin_step()
        kept = product(a, b)
    assert meter.work().products == 2 * 6 * 8 * 4
    assert sum(meter.memory().peak.values()) == 2 * kept.numel()


def test_only_real_bf16_numbers_of_a_cpu_are_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "native", lambda: False)
    assert widened(_random(2, 2))
    assert not widened(_random(2, 2).float())
    assert not widened(torch.empty(2, 2, dtype=torch.bfloat16, device="meta"))
    with FakeTensorMode():
        assert not widened(torch.empty(2, 2, dtype=torch.bfloat16))


def test_an_fp16_product_is_that_of_its_factors_in_fp32_rounded_once(native: bool) -> None:
    """This includes a sum of fp16 products that would overflow in between."""
    a, b = (_random(*shape).half() for shape in ((7, 40), (40, 5)))
    for one in (a, a * 1000):
        assert torch.equal(product(one, b), (one.float() @ b.float()).half())
    large = torch.tensor([[60_000.0, 60_000.0, -60_000.0]]).half()
    assert float(product(large, torch.ones(3, 1).half())) == float(torch.tensor(60_000.0).half())
    assert widened(a) and not widened(a.to("meta"))
