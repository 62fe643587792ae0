"""A gather in forward is a reduce-scatter in backward: each function's backward is its adjoint."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.models.batch import Batch
from megalith.parallel.tensor import VocabularyLookup, add_up, copy, gather_sequence, scatter_sequence
from tests.models.plain import llama, logits, stage, tokens_of
from tests.parallel.running import trainer_of
from tests.ranks import run_ranks
from tests.specs import tiny_run

RANKS = 3


def _normal(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _apply(rank: int, function: Any, inner: tuple[int, ...], outer: tuple[int, ...], alike: str) -> tuple[Tensor, ...]:
    """Return (input, output, gradient of the output, gradient of the input) of one rank. `alike`: equal on all ranks,
    from one seed."""
    group = torch.distributed.group.WORLD
    x = _normal(inner, 1 if alike == "in" else 10 + rank).requires_grad_()
    out = function(x, group)
    given = _normal(outer, 2 if alike == "out" else 20 + rank)
    out.backward(given)
    assert x.grad is not None
    return x.detach(), out.detach(), given, x.grad


def apply(function: Any, inner: tuple[int, ...], outer: tuple[int, ...], alike: str = "") -> list[list[Tensor]]:
    """Return inputs, outputs, and the gradients of outputs and inputs, of all ranks."""
    return [list(column) for column in zip(*run_ranks(_apply, RANKS, function, inner, outer, alike), strict=True)]


def product(one: list[Tensor], other: list[Tensor]) -> Tensor:
    return sum((a * b).sum() for a, b in zip(one, other, strict=True))  # pyright: ignore[reportReturnType]


@pytest.mark.slow
def test_gathering_the_sequence_joins_it_in_rank_order_and_its_backward_is_the_adjoint():
    x, out, given, got = apply(gather_sequence, (2, 4, 5), (2, 12, 5))
    assert all(torch.equal(one, torch.cat(x, dim=1)) for one in out)
    torch.testing.assert_close(product(out, given), product(x, got))


@pytest.mark.slow
def test_scattering_gives_each_rank_its_part_of_the_sum_and_its_backward_is_the_adjoint():
    x, out, given, got = apply(scatter_sequence, (2, 12, 5), (2, 4, 5))
    torch.testing.assert_close(torch.cat(out, dim=1), torch.stack(x).sum(0))
    torch.testing.assert_close(product(out, given), product(x, got))


@pytest.mark.slow
def test_a_copy_sums_the_gradients_of_all_ranks():
    x, out, given, got = apply(copy, (2, 4), (2, 4), alike="in")
    assert all(torch.equal(one, x[0]) for one in out)
    for one in got:
        torch.testing.assert_close(one, torch.stack(given).sum(0))


@pytest.mark.slow
def test_a_sum_passes_the_gradient_on():
    x, out, given, got = apply(add_up, (2, 4), (2, 4), alike="out")
    for one in out:
        torch.testing.assert_close(one, torch.stack(x).sum(0))
    assert all(torch.equal(one, given[0]) for one in got)


def test_rows_of_the_table_held_elsewhere_are_zero_here():
    table, tokens = torch.randn(12, 4), torch.arange(12)[None]
    parts = [VocabularyLookup(rank)(tokens, table.chunk(3)[rank]) for rank in range(3)]
    assert torch.equal(sum(parts)[0], table)
    assert not parts[1][0, :4].any() and not parts[1][0, 8:].any()


def _logits(rank: int, sequence: bool) -> tuple[Tensor, str]:
    spec = tiny_run(plan={"tensor": 2, "sequence": sequence})
    model = trainer_of(spec).stages[0]
    with torch.no_grad():
        return logits(model, tokens_of(spec.model)), type(model.head.output).__name__


@pytest.mark.slow
@pytest.mark.parametrize("sequence", [False, True])
def test_logits_asked_for_are_whole_on_every_rank(sequence):
    expected = logits(stage(llama()), tokens_of(llama())).detach()
    for found, kind in run_ranks(_logits, 2, sequence):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert kind == "Output"  # a split module keeps the name of the model's own class


def _packed(rank: int) -> Tensor:
    spec = tiny_run(plan={"tensor": 2})
    trainer = trainer_of(spec)
    tokens = tokens_of(spec.model, seq=32)
    segments = ((10, 22), (32,))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in segments])
    with torch.no_grad():
        return trainer.stages[0](tokens, Batch(tokens, targets=tokens, positions=positions, segments=segments)).nll


@pytest.mark.slow
def test_packed_documents_stay_apart_where_the_sequence_is_split():
    tokens, segments = tokens_of(llama(), seq=32), ((10, 22), (32,))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in segments])
    expected = stage(llama())(tokens, Batch(tokens, targets=tokens, positions=positions, segments=segments)).nll
    for found in run_ranks(_packed, 2):
        torch.testing.assert_close(found, expected)
