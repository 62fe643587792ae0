"""Grouped products equal their definition."""

import pytest
import torch
from torch import Tensor

from megalith.kernels.deferred import Queue, deferring
from megalith.kernels.grouped import Sizes, grouped_plain
from megalith.kernels.multiply import PLAIN

COUNTS = [[3, 0, 5, 1], [0, 0, 0, 7], [4], [0, 0]]


def inputs(counts: list[int]) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(sum(counts), 6, requires_grad=True), torch.randn(len(counts), 10, 6, requires_grad=True)


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("known", ["host", "device"])
def test_equals_the_definition_forward_and_backward(counts: list[int], known: str) -> None:
    x, weight = inputs(counts)
    sizes = Sizes(counts if known == "host" else torch.tensor(counts))
    out, expected = PLAIN(x, weight, sizes=sizes), grouped_plain(x, weight, Sizes(counts))
    torch.testing.assert_close(out, expected)
    grad = torch.randn_like(out)
    torch.testing.assert_close(torch.autograd.grad(out, (x, weight), grad), torch.autograd.grad(expected, (x, weight), grad))


def test_a_group_without_rows_gets_a_gradient_of_zero() -> None:
    x, weight = inputs([3, 0, 5, 1])
    PLAIN(x, weight, sizes=Sizes([3, 0, 5, 1])).sum().backward()
    assert weight.grad is not None
    assert not weight.grad[1].any()
    assert all(weight.grad[group].any() for group in (0, 2, 3))


def test_the_weight_gradient_can_be_put_off() -> None:
    x, weight = inputs([3, 0, 5, 1])
    queue = Queue()
    with deferring(queue):
        PLAIN(x, weight, sizes=Sizes([3, 0, 5, 1])).sum().backward()
    assert weight.grad is None
    assert x.grad is not None
    queue.run_all()
    expected = torch.autograd.grad(grouped_plain(x, weight, Sizes([3, 0, 5, 1])).sum(), weight)
    torch.testing.assert_close((weight.grad,), expected)


def test_ends_are_running_sums_of_the_sizes() -> None:
    assert Sizes([3, 0, 5]).ends(torch.device("cpu")).tolist() == [3, 3, 8]
    assert Sizes(torch.tensor([3, 0, 5])).host == (3, 0, 5)


@pytest.mark.parametrize("counts", [[8, 0, 5, 3], [0, 0, 0, 7]])
def test_torchs_grouped_product_in_its_place_gives_the_same(counts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs use this operation. The CPU also has it, with the same layout."""
    torch.manual_seed(0)
    x = torch.randn(sum(counts), 16, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(len(counts), 24, 16, dtype=torch.bfloat16, requires_grad=True)
    expected = PLAIN(x, weight, sizes=Sizes(counts))
    grad = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, (x, weight), grad)
    monkeypatch.setattr("megalith.kernels.grouped._torch_can", lambda one, other: True)
    out = PLAIN(x, weight, sizes=Sizes(torch.tensor(counts)))
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(torch.autograd.grad(out, (x, weight), grad), gradients)
