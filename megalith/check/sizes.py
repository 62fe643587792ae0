"""Parameters and saved activations of a block, by formulas: there is no torch here to count with."""

from megalith.spec.model import AttentionSpec, BlockSpec, LatentAttentionSpec, MambaSpec, MlpSpec, MoeSpec


def block_parameters(block: BlockSpec, dim: int) -> int:
    """Weights of one block. The trainer counts its own; here there is no torch to count with."""
    halves = bool(block.attention or block.mamba) + bool(block.mlp)
    norms = (1 if block.parallel else halves) + (2 if block.post_norms else 0)
    per_norm = dim * (2 if block.norm.kind == "layer" and block.norm.bias else 1)
    mixer = _attention_parameters(block.attention, dim) if block.attention else 0
    mixer += _mamba_parameters(block.mamba, dim) if block.mamba else 0
    return mixer + (_mlp_parameters(block.mlp, dim) if block.mlp else 0) + norms * per_norm


def _attention_parameters(attention: AttentionSpec | LatentAttentionSpec, dim: int) -> int:
    heads = attention.heads
    if isinstance(attention, AttentionSpec):
        channels = attention.head_dim
        biases = (heads + 2 * attention.kv_heads) * channels + dim if attention.bias else 0
        return 2 * dim * (heads + attention.kv_heads) * channels + biases + (2 * channels if attention.qk_norm else 0)
    queries, keys_and_values = heads * (attention.nope_dim + attention.rope_dim), heads * (attention.nope_dim + attention.v_dim)
    rank, kv_rank = attention.q_rank, attention.kv_rank
    of_queries = dim * queries if rank is None else rank * (dim + 1 + queries)
    return of_queries + dim * (kv_rank + attention.rope_dim) + kv_rank * (1 + keys_and_values) + dim * heads * attention.v_dim


def _mamba_parameters(mamba: MambaSpec, dim: int) -> int:
    inner, shared = mamba.heads * mamba.head_dim, 2 * mamba.groups * mamba.state
    return dim * (3 * inner + shared + mamba.heads) + (inner + shared) * (mamba.conv + 1) + 3 * mamba.heads + inner


def _mlp_parameters(mlp: MlpSpec | MoeSpec, dim: int) -> int:
    matrices = 3 if mlp.gated else 2
    if isinstance(mlp, MlpSpec):
        return matrices * dim * mlp.hidden + ((matrices - 1) * mlp.hidden + dim if mlp.bias else 0)
    shared = matrices * dim * mlp.shared + (dim if mlp.shared and mlp.shared_gate else 0)
    return mlp.experts * (matrices * dim * mlp.hidden + dim) + shared


def saved_numbers(block: BlockSpec, dim: int) -> int:
    """About how many numbers a token leaves in a block for backward, with fused kernels: inputs and outputs of norms; of attention
    queries, keys, values and output; of Mamba-2 what its projections give, the recurrence's output and its norm's; the MLP's gate and
    up, activation(gate) and their product, of each expert it meets."""
    halves = bool(block.attention or block.mamba) + bool(block.mlp)
    return 2 * dim * halves + _saved_by_mixer(block) + (_saved_by_mlp(block.mlp, dim) if block.mlp else 0)


def _saved_by_mixer(block: BlockSpec) -> int:
    attention, mamba = block.attention, block.mamba
    if mamba:
        return 4 * mamba.heads * mamba.head_dim + 2 * mamba.groups * mamba.state + mamba.heads
    if isinstance(attention, AttentionSpec):
        return 2 * (attention.heads + attention.kv_heads) * attention.head_dim
    if attention is None:
        return 0
    attended = attention.heads * 2 * (attention.nope_dim + attention.rope_dim + attention.v_dim)
    return attended + (attention.q_rank or 0) + attention.kv_rank


def _saved_by_mlp(mlp: MlpSpec | MoeSpec, dim: int) -> int:
    kept = 4 if mlp.gated else 2
    if isinstance(mlp, MlpSpec):
        return kept * mlp.hidden
    return mlp.router.active * (kept * mlp.hidden + 2 * dim) + kept * mlp.shared
