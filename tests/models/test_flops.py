"""FLOPs counted from the modules equal the published formula."""

import pytest

from megalith.models.flops import flops_per_token
from megalith.spec.presets import presets
from tests.models.plain import llama, stage


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 8), (4, 2, 8), (4, 1, 16)])
@pytest.mark.parametrize("seq", [16, 64])
@pytest.mark.parametrize("tied", [False, True])
def test_a_token_costs_six_operations_a_weight_and_the_attention(layers, heads, kv_heads, head_dim, seq, tied):
    """6 N + 12 · layers · heads · head_dim · seq (Chowdhery et al. 2022, appendix B); N: weights in matrix products."""
    spec = llama(layers=layers, heads=heads, kv_heads=kv_heads, head_dim=head_dim, tied=tied)
    weights = {name: p for name, p in stage(spec.model_copy(update={"tied": False})).parameters_by_name().items() if p.dim() == 2}
    count = sum(p.numel() for name, p in weights.items() if name != "embedding.weight")  # an embedding look-up is no product
    assert flops_per_token(spec.build(), seq) == 6 * count + 12 * layers * heads * head_dim * seq


def test_blocks_of_different_sizes_are_each_counted():
    spec = llama(layers=2).build()
    wide = spec.blocks[0].model_copy(update={"mlp": spec.blocks[0].mlp.model_copy(update={"hidden": 96})})
    mixed = spec.model_copy(update={"blocks": (spec.blocks[0], wide)})
    assert flops_per_token(mixed, 16) - flops_per_token(spec, 16) == 6 * 3 * 32 * (96 - 48)


@pytest.mark.slow
def test_a_405b_model_is_counted_without_memory_and_at_once():
    spec = llama(layers=126, dim=16384, heads=128, kv_heads=8, head_dim=128, ffn=53248, vocab=128256, context=8192)
    assert flops_per_token(spec.build(), 8192) == pytest.approx(6 * 403.75e9 + 12 * 126 * 16384 * 8192, rel=1e-3)


def test_mamba_costs_its_weights_and_the_products_of_its_chunks():
    """Forward takes for each token 2 chunk·state a group for scores, and 2 chunk + 4 state a channel for their outputs and for writing
    and reading states."""
    spec = presets()["nemotron-h-tiny"].build().model_copy(update={"pattern": "M", "layers": 1})
    mamba = spec.build().blocks[0].mamba
    weights = {name: p for name, p in stage(spec).parameters_by_name().items() if p.dim() == 2 and "conv" not in name}
    count = sum(p.numel() for name, p in weights.items() if name != "embedding.weight")
    channels = mamba.heads * mamba.head_dim
    state = 2 * mamba.chunk * mamba.groups * mamba.state + channels * (2 * mamba.chunk + 4 * mamba.state)
    assert flops_per_token(spec.build(), 4 * mamba.chunk) == 6 * count + 3 * state
