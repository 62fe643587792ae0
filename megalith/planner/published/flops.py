"""The FLOPs a source counts for a step, so that its TFLOP/s can be turned back into seconds. Nothing is predicted from these.

Conventions differ in two ways: attention is counted in full or halved for the causal mask, and work done again in backward counts
("hardware") or does not ("model").
"""

from typing import Literal

from megalith.spec.model import AttentionSpec, BlockSpec, MlpSpec, ModelSpec


def step_flops(
    model: ModelSpec, *, tokens: int, seq_len: int, causal: Literal["full", "half"], recomputed: bool, head: bool = True
) -> float:
    """FLOPs of one step: 6 a weight of a matrix product and token, 12 a score and channel; 8 and 16 where blocks run again."""
    blocks = sum(
        2 * _weights(block, model.dim) + _state(block) + _scores(block) * seq_len * (0.5 if causal == "half" else 1.0)
        for block in model.blocks
    )
    output = 2 * model.dim * model.head.vocab if head else 0
    if model.head.ahead is not None:
        extra = model.head.ahead.block
        scores = _scores(extra) * seq_len * (0.5 if causal == "half" else 1.0)
        blocks += model.head.ahead.depth * (2 * (_weights(extra, model.dim) + 2 * model.dim**2) + scores + output)
    return tokens * ((4 if recomputed else 3) * blocks + 3 * output)


def _weights(block: BlockSpec, dim: int) -> int:
    """Weights of the matrix products one token goes through."""
    attention, mamba, mlp = block.attention, block.mamba, block.mlp
    found = 0
    if mamba is not None:
        inner = mamba.heads * mamba.head_dim
        found = dim * (3 * inner + 2 * mamba.groups * mamba.state + mamba.heads)
    elif isinstance(attention, AttentionSpec):
        found = dim * attention.head_dim * 2 * (attention.heads + attention.kv_heads)
    elif attention is not None:
        into = attention.nope_dim + attention.rope_dim
        queries = attention.heads * into
        found = dim * queries if attention.q_rank is None else attention.q_rank * (dim + queries)
        found += dim * (attention.kv_rank + attention.rope_dim)
        found += attention.kv_rank * attention.heads * (attention.nope_dim + attention.v_dim)
        found += attention.heads * attention.v_dim * dim
    if mlp is None:
        return found
    matrices = 3 if mlp.gated else 2
    if isinstance(mlp, MlpSpec):
        return found + matrices * dim * mlp.hidden
    return found + matrices * dim * (mlp.router.active * mlp.hidden + mlp.shared) + dim * mlp.experts


def _scores(block: BlockSpec) -> int:
    """Forward FLOPs of one query and one key, all heads: 2 a channel of the scores and 2 of the values."""
    attention = block.attention
    if attention is None:
        return 0
    if isinstance(attention, AttentionSpec):
        return 4 * attention.heads * attention.head_dim
    return 2 * attention.heads * (attention.nope_dim + attention.rope_dim + attention.v_dim)


def _state(block: BlockSpec) -> int:
    """Forward FLOPs of Mamba-2's state for one token, as Megatron-LM counts them (training/training.py, mamba_layer_flops)."""
    return 7 * block.mamba.heads * block.mamba.head_dim * block.mamba.state if block.mamba else 0
