"""Conversion of Mistral's dense models from and to transformers' format."""

from megalith.checkpoint.foreign.family import (
    LLAMA3,
    SIZES,
    Foreign,
    Json,
    habits,
    no_further_yarn,
    scaled_rope,
    write_scaled_rope,
)
from megalith.checkpoint.foreign.weights import ATTENTION, GATED_MLP, NORMS, Piece, ends, layers
from megalith.spec.families.mistral import Mistral


def _pieces(spec: Mistral) -> list[Piece]:
    return ends(spec.tied) + layers([*NORMS, *ATTENTION, *GATED_MLP], range(spec.layers))


def _write(spec: Mistral) -> Json:
    return {"head_dim": spec.head_dim or spec.dim // spec.heads} | write_scaled_rope(spec)


MISTRAL = Foreign(
    spec=Mistral,
    architecture="MistralForCausalLM",
    model_type="mistral",
    pieces=_pieces,
    needed=SIZES | {"ffn": "intermediate_size"},
    optional={
        "kv_heads": ("num_key_value_heads", 8),
        "head_dim": ("head_dim", None),
        "window": ("sliding_window", 4096),
    }
    | habits(context=131072, norm_eps=1e-6, tied=False),
    fixed={"hidden_act": ("silu", "swish", None)},
    write=_write,
    read=scaled_rope,
    further=LLAMA3,
    refuse=no_further_yarn,
)
