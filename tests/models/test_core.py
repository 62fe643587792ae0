"""The core of attention equals the textbook formula, without its matrix of scores."""

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from megalith.models.batch import Batch
from megalith.models.core import CausalCore
from tests.kernels.largest import Largest


def textbook(
    q: Tensor, k: Tensor, v: Tensor, cuts: tuple[int, ...], *, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """Return softmax(scale q kᵀ) v with a dense mask; [seq, heads, channels], each key head for several consecutive
    query heads."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    document = torch.repeat_interleave(torch.arange(len(cuts)), torch.tensor(cuts))
    allowed = (document[:, None] == document[None]) & torch.ones(len(q), len(q)).tril().bool()
    if window is not None:
        allowed &= torch.ones(len(q), len(q)).triu(1 - window).bool()
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~allowed, float("-inf")).softmax(-1), v)


def inputs(batch: int, seq: int, kv_heads: int, of_v: int = 8, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((4, 8), (kv_heads, 8), (kv_heads, of_v))
    return [torch.randn(batch, seq, *size, generator=generator, dtype=dtype).requires_grad_() for size in sizes]


def batch_of(rows: int, seq: int, segments: tuple[tuple[int, ...], ...] | None = None) -> Batch:
    return Batch(torch.zeros(rows, seq, dtype=torch.long), segments=segments)


CUTS = {
    "whole rows": None,
    "whole rows, said so": ((12,),) * 5,
    "rows cut alike": ((5, 7),) * 5,
    "rows cut in turn": ((5, 7), (12,), (1, 10, 1), (5, 7), (12,)),  # sorting these rows by cut is not its own inverse
    "single tokens": ((1,) * 12, (11, 1), (1, 11), (1,) * 12, (1, 11)),
}


@pytest.mark.parametrize("softcap", [None, 0.8])
@pytest.mark.parametrize("window", [None, 1, 3, 6, 7, 11, 12, 50])
@pytest.mark.parametrize("segments", CUTS.values(), ids=CUTS.keys())
def test_attention_is_the_textbooks_in_output_and_gradients(segments, window, softcap):
    tensors = inputs(5, 12, 2, of_v=6, dtype=torch.float64)
    found = CausalCore(scale=0.7, window=window, softcap=softcap)(*tensors, batch_of(5, 12, segments))
    rows = [
        textbook(
            *(x[i] for x in tensors), (12,) if segments is None else segments[i], scale=0.7, window=window, softcap=softcap
        )
        for i in range(5)
    ]  # fmt: skip
    torch.testing.assert_close(found, torch.stack(rows))
    grad = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=found.dtype)
    torch.testing.assert_close(torch.autograd.grad(found, tensors, grad), torch.autograd.grad(torch.stack(rows), tensors, grad))


@pytest.mark.parametrize("of_v", [3, 8, 11])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_key_heads_serve_runs_of_query_heads_and_values_have_channels_of_their_own(kv_heads, of_v):
    q, k, v = inputs(2, 12, kv_heads, of_v)
    found = CausalCore()(q, k, v, batch_of(2, 12))
    rows = [textbook(q[i], k[i], v[i], (12,), scale=8**-0.5, window=None, softcap=None) for i in range(2)]
    assert found.shape == (2, 12, 4, of_v)
    torch.testing.assert_close(found, torch.stack(rows), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("of_v", [8, 5])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("segments", [None, ((300, 212),), ((512,),)], ids=str)
def test_no_matrix_of_all_pairs_of_tokens_exists_in_forward_or_backward(segments, window, of_v):
    seq = 512
    q, k, v = inputs(1, seq, 2, of_v)
    with Largest() as largest:
        CausalCore(window=window)(q, k, v, batch_of(1, seq, segments)).sum().backward()
    assert largest.most <= 4 * seq * 8  # q itself
    assert q.grad is not None


@pytest.mark.slow
@pytest.mark.parametrize("softcap", [None, 1.0])
def test_a_window_costs_what_it_shows(softcap):
    def operations(seq: int) -> int:
        with FlopCounterMode(display=False) as counter:
            CausalCore(window=64, softcap=softcap)(*inputs(1, seq, 2), batch_of(1, seq)).sum().backward()
        return counter.get_total_flops()

    assert operations(2048) == pytest.approx(2 * operations(1024), rel=0.05)


def test_pieces_that_do_not_fill_their_rows_are_refused():
    q, k, v = inputs(1, 12, 2)
    with pytest.raises(AssertionError):
        CausalCore()(q, k, v, batch_of(1, 12, ((5, 6),)))
