"""RMSNorm in half precision is as near to the definition as torch's, with its gradients, for a few rows at a time or all."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalith.kernels import norm
from megalith.kernels.norm import rms_norm

EPS = 1e-5


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def outcome(function, x: Tensor, weight: Tensor, upstream: Tensor) -> list[Tensor]:
    """Return the norm and the gradients of x and weight."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    out = function(x, weight)
    out.backward(upstream.to(out.dtype))
    assert x.grad is not None and weight.grad is not None
    return [out.detach(), x.grad, weight.grad]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(2, 37, 48), (3, 5, 4, 16), (1, 8)])
@pytest.mark.parametrize("at_once", [1, 100, norm.AT_ONCE])
def test_as_near_to_the_definition_as_torch(monkeypatch, dtype, shape, at_once):
    monkeypatch.setattr(norm, "AT_ONCE", at_once)
    x, upstream = (numbers(*shape, seed=seed).to(dtype) for seed in (0, 1))
    weight = (1 + numbers(shape[-1], seed=2) / 4).to(dtype)
    exact = outcome(lambda x, w: F.rms_norm(x, x.shape[-1:], w, EPS), x.double(), weight.double(), upstream)
    theirs = outcome(lambda x, w: F.rms_norm(x, x.shape[-1:], w, EPS), x, weight, upstream)
    for mine, other, true in zip(outcome(lambda x, w: rms_norm(x, w, EPS), x, weight, upstream), theirs, exact, strict=True):
        assert mine.dtype == dtype
        assert (mine.double() - true).norm() <= 1.05 * (other.double() - true).norm() + 1e-12


def test_a_factor_in_fp32_is_used_as_it_is():
    """1 + weight is near 1, and in bf16 it would be 1."""
    x, weight = numbers(4, 32, seed=0).bfloat16(), 1 + numbers(32, seed=1) / 1024
    exact = F.rms_norm(x.double(), (32,), weight.double(), EPS)
    assert torch.equal(rms_norm(x, weight, EPS), exact.to(torch.bfloat16))


def test_rows_that_do_not_lie_together_and_no_rows():
    x, weight = numbers(6, 4, 32, seed=0).bfloat16(), numbers(32, seed=1).bfloat16()
    torn = x.transpose(0, 1)
    assert torch.equal(rms_norm(torn, weight, EPS), rms_norm(torn.contiguous(), weight, EPS))
    assert rms_norm(x[:0], weight, EPS).shape == (0, 4, 32)


def test_backward_keeps_a_number_a_row_beside_the_input():
    kept: list[Tensor] = []
    x, weight = numbers(4, 32, seed=0).bfloat16().requires_grad_(), numbers(32, seed=1).bfloat16()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        rms_norm(x, weight, EPS)
    assert sorted(t.numel() for t in kept) == [4, 32, 4 * 32]
