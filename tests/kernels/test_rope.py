"""Rotations: the fast one equals the plain one, lengths are preserved, and only differences of positions matter."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megalith.kernels.rope import rotate, rotate_plain

HEADS, HEAD_DIM = 3, 8


def tables(positions: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return cos and sin [seq, 1, head_dim / 2] of each position's angles."""
    turn = 10_000.0 ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
    angles = (positions.double().unsqueeze(-1) * turn).unsqueeze(-2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def heads(seq: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(2, seq, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_and_its_gradient_are_the_plain_ones(dtype):
    cos, sin = tables(torch.arange(6))
    upstream = heads(6, dtype, seed=1)
    found = []
    for function in (rotate, rotate_plain):
        x = heads(6, dtype).requires_grad_()
        out = function(x, cos, sin)
        out.backward(upstream)
        assert out.dtype == dtype and x.grad is not None
        found.append((out.detach(), x.grad))
    for fast, plain in zip(*found, strict=True):
        torch.testing.assert_close(fast, plain, rtol=2**-8 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)


def test_the_gradient_is_right_to_fp64():
    cos, sin = tables(torch.arange(4), torch.float64)
    assert torch.autograd.gradcheck(lambda x: rotate(x, cos, sin), heads(4, torch.float64).requires_grad_())


def test_a_view_that_is_not_contiguous_is_rotated_alike():
    cos, sin = tables(torch.arange(6))
    x = heads(6).transpose(1, 2).contiguous().transpose(1, 2)
    assert not x.is_contiguous()
    assert torch.equal(rotate(x, cos, sin), rotate(x.contiguous(), cos, sin))


def test_lengths_are_kept():
    x = heads(50, torch.float64)
    rotated = rotate(x, *tables(torch.arange(50) * 37, torch.float64))
    torch.testing.assert_close(rotated.norm(dim=-1), x.norm(dim=-1), rtol=1e-12, atol=0)
    assert (rotated[:, 1:] - x[:, 1:]).norm(dim=-1).min() > 0.1  # the rotation is not the identity


def test_position_zero_is_not_turned():
    x = heads(1)
    assert torch.equal(rotate(x, *tables(torch.zeros(1))), x)


@settings(max_examples=30, deadline=None)
@given(first=st.integers(0, 5000), second=st.integers(0, 5000), shift=st.integers(0, 5000))
def test_products_depend_on_the_difference_of_positions_only(first, second, shift):
    q, k = heads(1, torch.float64, seed=1), heads(1, torch.float64, seed=2)

    def score(of_q: int, of_k: int) -> Tensor:
        at_q, at_k = (rotate(x, *tables(torch.tensor([p]), torch.float64)) for x, p in ((q, of_q), (k, of_k)))
        return (at_q * at_k).sum(-1)

    torch.testing.assert_close(score(first, second), score(first + shift, second + shift), rtol=0, atol=1e-9)


def test_products_do_depend_on_the_difference():
    q, k = heads(1, seed=1), heads(1, seed=2)
    scores = [(rotate(q, *tables(torch.tensor([p]))) * k).sum(-1) for p in (0, 1, 7)]
    assert (scores[0] - scores[1]).abs().max() > 1e-2 and (scores[1] - scores[2]).abs().max() > 1e-2


def test_turning_back_gives_the_same():
    cos, sin = tables(torch.arange(9), torch.float64)
    x = heads(9, torch.float64)
    torch.testing.assert_close(rotate(rotate(x, cos, sin), cos, -sin), x)


@pytest.mark.parametrize("function", [rotate, rotate_plain])
def test_channels_before_the_last_pairs_are_passed_on_and_so_are_their_gradients(function):
    cos, sin = tables(torch.arange(6))
    whole, upstream = torch.randn(2, 6, HEADS, 5 + HEAD_DIM).requires_grad_(), torch.randn(2, 6, HEADS, 5 + HEAD_DIM)
    tail = whole.detach()[..., 5:].clone().requires_grad_()
    out, turned = function(whole, cos, sin), function(tail, cos, sin)
    out.backward(upstream)
    turned.backward(upstream[..., 5:])
    assert torch.equal(out[..., :5], whole[..., :5]) and torch.equal(out[..., 5:], turned)
    assert whole.grad is not None and tail.grad is not None
    assert torch.equal(whole.grad[..., :5], upstream[..., :5]) and torch.equal(whole.grad[..., 5:], tail.grad)
