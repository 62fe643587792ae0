"""Conversion of Qwen2's and Qwen2.5's dense models from and to transformers' format."""

from megalith.checkpoint.foreign.family import (
    LLAMA3,
    SIZES,
    Foreign,
    Json,
    Read,
    habits,
    no_further_yarn,
    scaled_rope,
    write_scaled_rope,
)
from megalith.checkpoint.foreign.llama import BIASES
from megalith.checkpoint.foreign.qwen3 import windowed
from megalith.checkpoint.foreign.weights import ATTENTION, GATED_MLP, NORMS, Piece, ends, layers
from megalith.spec.families.qwen2 import Qwen2


def _pieces(spec: Qwen2) -> list[Piece]:
    return ends(spec.tied) + layers([*NORMS, *ATTENTION, *BIASES[:3], *GATED_MLP], range(spec.layers))


def _write(spec: Qwen2) -> Json:
    return {"head_dim": spec.head_dim or spec.dim // spec.heads} | write_scaled_rope(spec)


def _read(config: Json) -> Read:
    rope = scaled_rope(config)
    return Read(rope.fields, rope.problems + windowed(config))


QWEN2 = Foreign(
    spec=Qwen2,
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    pieces=_pieces,
    needed=SIZES | {"ffn": "intermediate_size"},
    optional={"kv_heads": ("num_key_value_heads", 32), "head_dim": ("head_dim", None)}
    | habits(context=32768, norm_eps=1e-6, tied=False),
    fixed={"hidden_act": ("silu", "swish", None), "use_sliding_window": (False, None)},
    write=_write,
    read=_read,
    further=LLAMA3,
    refuse=no_further_yarn,
)
