"""Llama, both ways."""

from megalith.checkpoint.foreign.family import (
    SIZES,
    Foreign,
    Json,
    Read,
    habits,
    heads_divide,
    rope_settings,
    uneven_rotation,
    write_rope,
)
from megalith.checkpoint.foreign.weights import ATTENTION, GATED_MLP, NORMS, Piece, ends, layers
from megalith.spec.families.llama import Llama

STRETCH = {  # our field -> their setting
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_context": "original_max_position_embeddings",
}


def _pieces(spec: Llama) -> list[Piece]:
    return ends(spec.tied) + layers([*NORMS, *ATTENTION, *GATED_MLP], range(spec.layers))


def _write(spec: Llama) -> Json:
    scaling = spec.rope_scaling
    stretch = scaling and {"rope_type": scaling.kind} | {theirs: getattr(scaling, ours) for ours, theirs in STRETCH.items()}
    sizes = {"num_key_value_heads": spec.kv_heads or spec.heads, "head_dim": spec.head_dim or spec.dim // spec.heads}
    return sizes | {"pretraining_tp": 1} | write_rope(spec.rope_theta, stretch)


def _read(config: Json) -> Read:
    """Llama 3.1's stretch, if the model has it."""
    rope = rope_settings(config)
    problems = uneven_rotation(rope)
    if rope["rope_type"] not in ("default", "llama3"):
        problems.append(f"rope_type = {rope['rope_type']!r}; what can be represented is 'default' or 'llama3'")
    stretched = rope["rope_type"] == "llama3"
    if stretched:
        problems += [f"rope_type llama3 without {theirs}" for theirs in STRETCH.values() if theirs not in rope]
    scaling = {ours: rope.get(theirs) for ours, theirs in STRETCH.items()} if stretched else None
    return Read({"rope_theta": rope["rope_theta"], "rope_scaling": scaling}, problems)


LLAMA = Foreign(
    spec=Llama,
    architecture="LlamaForCausalLM",
    model_type="llama",
    pieces=_pieces,
    needed=SIZES | {"ffn": "intermediate_size"},
    optional={"kv_heads": ("num_key_value_heads", None), "head_dim": ("head_dim", None)}
    | habits(context=2048, norm_eps=1e-6, tied=False),
    fixed={
        "hidden_act": ("silu", "swish", None),
        "attention_bias": (False, None),
        "mlp_bias": (False, None),
    },
    write=_write,
    read=_read,
    further=STRETCH,
    refuse=heads_divide,
)
