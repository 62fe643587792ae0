"""Attention is the textbook's, without its matrix."""

import pytest
import torch
from torch import Tensor

from megalith.models.attention import CausalCore
from megalith.models.batch import Batch
from tests.kernels.largest import Largest
from tests.models.plain import llama, stage, tokens_of


def textbook(q: Tensor, k: Tensor, v: Tensor, cuts: tuple[int, ...]) -> Tensor:
    """softmax(q kᵀ / sqrt(head_dim)) v with a dense mask; [seq, heads, head_dim], each key head serving a run of q's."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    document = torch.repeat_interleave(torch.arange(len(cuts)), torch.tensor(cuts))
    allowed = (document[:, None] == document[None]) & torch.ones(len(q), len(q)).tril().bool()
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~allowed, float("-inf")).softmax(-1), v)


def inputs(batch: int, seq: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(batch, seq, heads, 8, generator=generator) for heads in (4, kv_heads, kv_heads))
    return q, k, v


CUTS = {
    "whole rows": None,
    "whole rows, said so": ((12,),) * 5,
    "rows cut alike": ((5, 7),) * 5,
    "rows cut in turn": ((5, 7), (12,), (1, 10, 1), (5, 7), (12,)),  # sorting these rows by cut is not its own inverse
    "single tokens": ((1,) * 12, (11, 1), (1, 11), (1,) * 12, (1, 11)),
}


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("pieces", CUTS.values(), ids=CUTS.keys())
def test_attention_is_the_textbooks(pieces, kv_heads):
    q, k, v = inputs(5, 12, kv_heads)
    found = CausalCore()(q, k, v, Batch(torch.zeros(5, 12, dtype=torch.long), pieces=pieces))
    rows = [textbook(q[i], k[i], v[i], (12,) if pieces is None else pieces[i]) for i in range(5)]
    torch.testing.assert_close(found, torch.stack(rows), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("pieces", [None, ((300, 212),), ((512,),)], ids=str)
def test_no_matrix_of_all_pairs_of_tokens_exists_in_forward_or_backward(pieces):
    seq = 512
    q, k, v = (x.requires_grad_() for x in inputs(1, seq, 2))
    with Largest() as largest:
        CausalCore()(q, k, v, Batch(torch.zeros(1, seq, dtype=torch.long), pieces=pieces)).sum().backward()
    assert largest.most <= 4 * seq * 8  # q itself
    assert q.grad is not None


def test_a_whole_training_step_holds_no_matrix_of_all_pairs_of_tokens():
    spec, seq = llama(layers=1, vocab=16, ffn=32, context=2048), 2048
    model, tokens = stage(spec), tokens_of(spec, batch=1, seq=seq)
    with Largest() as largest:
        model(tokens, Batch(tokens, targets=tokens)).objective.backward()
    assert largest.most <= 32 * seq  # the residual stream: dim x seq
    with Largest() as seen:
        torch.nn.functional.scaled_dot_product_attention(*(torch.randn(1, 1, 64, 8),) * 3, attn_mask=torch.zeros(64, 64))
    assert (1, 1, 64, 64) in seen.shapes or seen.most >= 64 * 64  # the measurement would see one


def test_pieces_that_do_not_fill_their_rows_are_refused():
    q, k, v = inputs(1, 12, 2)
    with pytest.raises(AssertionError):
        CausalCore()(q, k, v, Batch(torch.zeros(1, 12, dtype=torch.long), pieces=((5, 6),)))
