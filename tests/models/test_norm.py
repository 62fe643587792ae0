"""Norms equal their formulas."""

import pytest
import torch

from megalith.models.norm import LayerNorm, RMSNorm, norm
from megalith.spec.model import NormSpec


@pytest.mark.parametrize("eps", [1e-6, 1e-5, 0.5])
def test_it_divides_by_the_root_of_the_mean_square(eps):
    made, x = RMSNorm(16, eps), torch.randn(3, 5, 16)
    torch.nn.init.normal_(made.weight)
    expected = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * made.weight
    torch.testing.assert_close(made(x), expected)


def test_the_mean_is_taken_in_fp32():
    """bf16 cannot represent 300² exactly, and would lose it in a sum of 65,536 such squares."""
    x = torch.full((4096,), 3.0, dtype=torch.bfloat16)
    x[0] = 100.0
    made = RMSNorm(4096, 1e-5).bfloat16()
    torch.nn.init.ones_(made.weight)
    expected = x.float() / x.float().square().mean().sqrt()
    assert made(x).dtype == torch.bfloat16
    torch.testing.assert_close(made(x).float(), expected, rtol=2**-8, atol=0)


def test_a_weight_with_an_offset_is_stored_less_one():
    plain, offset, x = RMSNorm(16, 1e-6), RMSNorm(16, 1e-6, offset=True), torch.randn(3, 5, 16)
    torch.nn.init.normal_(plain.weight)
    with torch.no_grad():
        offset.weight.copy_(plain.weight - 1)
    torch.testing.assert_close(offset(x), plain(x))


def test_an_offset_weight_is_not_rounded_to_bf16_once_one_is_added():
    """1 + 2^-10 is 1 in bf16, so the weight would be lost if it were added in bf16."""
    made = RMSNorm(8, 1e-6, offset=True).bfloat16()
    torch.nn.init.constant_(made.weight, 2**-10)
    many = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = many.float() / (many.float().square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + 2**-10)
    torch.testing.assert_close(made(many), exact.bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize("bias", [False, True])
def test_layer_norm_takes_the_mean_away_and_divides_by_the_spread(bias: bool):
    made, x = LayerNorm(16, 1e-3, bias), 5 + torch.randn(3, 5, 16)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    centred = x - x.mean(-1, keepdim=True)
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-3).sqrt() * made.weight
    torch.testing.assert_close(made(x), expected + made.bias if made.bias is not None else expected)
    assert (made.bias is not None) == bias


def test_a_spec_chooses_the_norm():
    plain, offset = norm(8, NormSpec(eps=0.5)), norm(8, NormSpec(offset=True))
    assert isinstance(plain, RMSNorm)
    assert isinstance(offset, RMSNorm)
    assert (plain.eps, plain.offset, offset.offset) == (0.5, False, True)
    layer = norm(8, NormSpec(kind="layer", bias=True))
    assert isinstance(layer, LayerNorm)
    assert layer.bias is not None
