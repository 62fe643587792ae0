"""Conversion of Qwen3's dense models from and to transformers' format."""

from megalith.checkpoint.foreign.family import SIZES, Foreign, Json, Read, habits, plain_rope, write_rope
from megalith.checkpoint.foreign.weights import ATTENTION, GATED_MLP, NORMS, Piece, ends, layers, same
from megalith.spec.families.qwen3 import Qwen3

HEAD_NORMS = [same(f"attention.{part}_norm.weight", f"self_attn.{part}_norm.weight") for part in "qk"]


def _pieces(spec: Qwen3) -> list[Piece]:
    return ends(spec.tied) + layers([*NORMS, *ATTENTION, *HEAD_NORMS, *GATED_MLP], range(spec.layers))


def _write(spec: Qwen3) -> Json:
    return write_rope(spec.rope_theta)


def windowed(config: Json) -> list[str]:
    """Return the problem of a configuration with sliding windows in some layers."""
    some = any(kind != "full_attention" for kind in config.get("layer_types") or ())
    return ["layer_types has layers without full attention, but only full attention can be represented"] if some else []


def _read(config: Json) -> Read:
    rope = plain_rope(config)
    return Read(rope.fields, rope.problems + windowed(config))


QWEN3 = Foreign(
    spec=Qwen3,
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    pieces=_pieces,
    needed=SIZES | {"ffn": "intermediate_size", "kv_heads": "num_key_value_heads"},
    optional={"head_dim": ("head_dim", 128)} | habits(context=32768, norm_eps=1e-6, tied=False),
    fixed={
        "hidden_act": ("silu", "swish", None),
        "attention_bias": (False, None),
        "use_sliding_window": (False, None),
    },
    write=_write,
    read=_read,
)
