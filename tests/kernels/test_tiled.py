"""The loss and the look-up in tiles of the vocabulary equal those in the whole table."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalith.kernels.chunks import GRAIN, tile_rows, tiles_of
from megalith.kernels.cross_entropy import Terms, cross_entropy_plain
from megalith.kernels.tiled import ResidentTable, look_up, tiled_cross_entropy
from tests.kernels.largest import Largest
from tests.kernels.test_cross_entropy import FINISHINGS, VOCAB, assert_same, differentiate, inputs


def _tiled(rows: int) -> Any:
    def function(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Any:
        return tiled_cross_entropy(hidden, weight, ResidentTable(weight, rows), targets, Terms(**options))

    return function


@pytest.mark.parametrize("finishing", [{}, *FINISHINGS], ids=str)
@pytest.mark.parametrize("rows", [1, 7, VOCAB, 100])
def test_tiles_give_the_plain_losses_and_both_gradients(rows: int, finishing: dict[str, float]) -> None:
    expected = differentiate(cross_entropy_plain, *inputs(), z_loss=0.3, upstream=0.5, **finishing)
    found = differentiate(_tiled(rows), *inputs(), z_loss=0.3, upstream=0.5, **finishing)
    assert_same(found, expected, rtol=1e-5, atol=1e-6)


def test_no_logits_of_the_whole_vocabulary_are_in_memory() -> None:
    hidden, weight, targets = inputs(tokens=64, dim=8, vocab=1024)
    with Largest() as largest:
        differentiate(_tiled(32), hidden, weight, targets)
    assert largest.most <= weight.numel()


def test_the_gradient_of_a_whole_table_is_not_copied() -> None:
    hidden, weight, targets = inputs()
    table = _Remembering(weight.requires_grad_(), 7)
    tiled_cross_entropy(hidden, weight, table, targets, Terms(1.0)).objective.backward()
    assert weight.grad is not None and weight.grad.data_ptr() == table.first
    weight.grad = None
    look_up(targets.clamp(0), weight, table).sum().backward()
    assert weight.grad is not None and weight.grad.data_ptr() == table.first


class _Remembering(ResidentTable):
    """Remembers the address of its gradient, which must not keep the gradient alive."""

    first = 0

    def give(self, rows: range, gradient: Tensor) -> None:
        super().give(rows, gradient)
        assert self.gradient is not None
        self.first = self.gradient.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_look_up_in_tiles_is_the_same_bits(dtype: torch.dtype) -> None:
    """A rank's part of the table lacks some tokens; these give zeros, and no gradient."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(40, 8, generator=generator).to(dtype)
    tokens, grad = torch.randint(40, (3, 500), generator=generator), torch.randn(3, 500, 8, generator=generator).to(dtype)
    found, expected = weight.clone().requires_grad_(), weight.clone().requires_grad_()
    out, whole = look_up(tokens, found, ResidentTable(found, 7)), F.embedding(tokens, expected)
    out.backward(grad)
    whole.backward(grad)
    assert torch.equal(out, whole)
    assert found.grad is not None and expected.grad is not None
    assert torch.equal(found.grad, expected.grad)
    assert not look_up(tokens + 40, weight, ResidentTable(weight, 7)).any()


def test_tiles_have_a_multiple_of_the_grain() -> None:
    assert tile_rows(0, 64) == 0
    for asked, dim in ((1, 64), (1000, 96), (5000, 1024)):
        assert tile_rows(asked, dim) >= asked and tile_rows(asked, dim) * dim % GRAIN == 0
    assert tiles_of(10, 4) == (range(4), range(4, 8), range(8, 10))
