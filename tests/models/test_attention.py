"""Attention as part of a model. test_core.py tests its core."""

import torch

from megalith.models.batch import Batch
from tests.kernels.largest import Largest
from tests.models.plain import llama, stage, tokens_of


def test_a_whole_training_step_holds_no_matrix_of_all_pairs_of_tokens():
    spec, seq = llama(layers=1, vocab=16, ffn=32, context=2048), 2048
    model, tokens = stage(spec), tokens_of(spec, batch=1, seq=seq)
    with Largest() as largest:
        model(tokens, Batch(tokens, targets=tokens)).objective.backward()
    assert largest.most <= 32 * seq  # the residual stream: dim x seq
    with Largest() as seen:
        torch.nn.functional.scaled_dot_product_attention(*(torch.randn(1, 1, 64, 8),) * 3, attn_mask=torch.zeros(64, 64))
    assert (1, 1, 64, 64) in seen.shapes or seen.most >= 64 * 64  # the measurement would find one
