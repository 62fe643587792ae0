"""Permuting copies of tokens into the order of their keys, and back."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from megalith.kernels.permute import Order, permute, permute_plain, unpermute, unpermute_plain


def order_of(copies: int, dropped: int) -> tuple[Order, Tensor]:
    torch.manual_seed(0)
    keys = torch.randint(4, (9, copies))
    return Order.sorted_by(keys, keys.numel() - dropped), keys


CASES = [(1, 0), (2, 0), (3, 5), (1, 9)]


@pytest.mark.parametrize(("copies", "dropped"), CASES)
def test_spreading_equals_its_definition(copies: int, dropped: int) -> None:
    order, _ = order_of(copies, dropped)
    x = torch.randn(9, 5, requires_grad=True)
    out, expected = permute(x, order), permute_plain(x, order)
    assert torch.equal(out, expected)
    grad = torch.randn_like(out)
    torch.testing.assert_close(torch.autograd.grad(out, x, grad), torch.autograd.grad(expected, x, grad))


@pytest.mark.parametrize(("copies", "dropped"), CASES)
def test_collecting_equals_its_definition(copies: int, dropped: int) -> None:
    order, _ = order_of(copies, dropped)
    rows = torch.randn(order.rows, 5, requires_grad=True)
    weights = torch.rand(9, copies, requires_grad=True)
    out, expected = unpermute(rows, weights, order), unpermute_plain(rows, weights, order)
    torch.testing.assert_close(out, expected)
    grad = torch.randn_like(out)
    inputs = (rows, weights)
    torch.testing.assert_close(torch.autograd.grad(out, inputs, grad), torch.autograd.grad(expected, inputs, grad))


def test_equal_keys_stay_in_the_order_of_tokens() -> None:
    order, keys = order_of(2, 0)
    numbers = order.order
    for one, other in pairwise(numbers.tolist()):
        assert (keys.flatten()[one], one) < (keys.flatten()[other], other)


def test_places_are_the_inverse_of_the_order() -> None:
    order, _ = order_of(3, 0)
    assert torch.equal(order.order[order.places.flatten()], torch.arange(27))


def test_bf16_copies_are_summed_in_fp32() -> None:
    order, _ = order_of(3, 0)
    rows, weights = torch.randn(27, 64).bfloat16(), torch.rand(9, 3)
    exact = unpermute_plain(rows.double(), weights.double(), order)
    assert torch.equal(unpermute(rows, weights, order), exact.bfloat16())
