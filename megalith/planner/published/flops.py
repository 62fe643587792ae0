"""FLOPs of a step in the convention of a source, which convert its TFLOP/s back into seconds. Predictions do not use the FLOPs of a
source's convention.

Conventions differ in two ways: attention is counted in full or halved for the causal mask, and recomputation is counted
("hardware") or not ("model").
"""

from typing import Literal

from megalith.spec.model import AttentionSpec, BlockSpec, ModelSpec
from megalith.spec.sizes import block_parameters, count_active


def step_flops(
    model: ModelSpec, *, tokens: int, seq_len: int, causal: Literal["full", "half"], recomputed: bool, head: bool = True
) -> float:
    """Return the FLOPs of one step. Each token takes 6 FLOPs for each weight of matrix products, and 12 for each channel of each
    attention score; with recomputed blocks, 8 and 16 FLOPs."""
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
    """Return the number of matrix weights that act on one token."""
    others = sum(each.numel for each in block_parameters(block, dim) if each.role not in ("matrix", "experts"))
    return count_active(block, dim) - others


def _scores(block: BlockSpec) -> int:
    """Forward FLOPs of one query and one key over all heads: 2 for each channel of the scores and 2 for each channel of the values."""
    attention = block.attention
    if attention is None:
        return 0
    if isinstance(attention, AttentionSpec):
        return 4 * attention.heads * attention.head_dim
    return 2 * attention.heads * (attention.nope_dim + attention.rope_dim + attention.v_dim)


def _state(block: BlockSpec) -> int:
    """Forward FLOPs of Mamba-2's state for one token, as Megatron-LM counts them (training/training.py, mamba_layer_flops)."""
    return 7 * block.mamba.heads * block.mamba.head_dim * block.mamba.state if block.mamba else 0
