"""Conversion of Gemma 2 from and to transformers' format."""

from megalith.checkpoint.foreign.family import SIZES, Foreign, Json, Read, habits, heads_divide, plain_rope, write_rope
from megalith.checkpoint.foreign.weights import ATTENTION, GATED_MLP, Piece, ends, layers, same
from megalith.spec.families.gemma2 import Gemma2

NORMS = [
    same("attention_norm.weight", "input_layernorm.weight"),
    same("attention_post_norm.weight", "post_attention_layernorm.weight"),
    same("mlp_norm.weight", "pre_feedforward_layernorm.weight"),
    same("mlp_post_norm.weight", "post_feedforward_layernorm.weight"),
]


def _pieces(spec: Gemma2) -> list[Piece]:
    return ends(spec.tied) + layers([*NORMS, *ATTENTION, *GATED_MLP], range(spec.layers))


def _alternating(count: int) -> list[str]:
    return [("sliding_attention", "full_attention")[layer % 2] for layer in range(count)]


def _write(spec: Gemma2) -> Json:
    settings: Json = {"query_pre_attn_scalar": spec.query_scalar or spec.head_dim, "layer_types": _alternating(spec.layers)}
    settings["pad_token_id"] = None  # left out it is 0, and transformers would never train that token's embedding
    return settings | write_rope(spec.rope_theta)


def _read(config: Json) -> Read:
    rope, kinds = plain_rope(config), config.get("layer_types")
    alternating = kinds is None or kinds == _alternating(len(kinds))
    problems = (
        []
        if alternating
        else ["layer_types does not alternate sliding and full attention, but only this pattern can be represented"]
    )
    return Read(rope.fields, rope.problems + problems)


GEMMA2 = Foreign(
    spec=Gemma2,
    architecture="Gemma2ForCausalLM",
    model_type="gemma2",
    pieces=_pieces,
    needed=SIZES | {"ffn": "intermediate_size", "kv_heads": "num_key_value_heads"},
    optional={
        "head_dim": ("head_dim", 256),
        "query_scalar": ("query_pre_attn_scalar", 256),
        "window": ("sliding_window", 4096),
        "attention_softcap": ("attn_logit_softcapping", 50.0),
        "logit_softcap": ("final_logit_softcapping", 30.0),
    }
    | habits(context=8192, norm_eps=1e-6, tied=True),
    fixed={
        "hidden_activation": ("gelu_pytorch_tanh", None),
        "attention_bias": (False, None),
        "use_bidirectional_attention": (None, False),
    },
    write=_write,
    read=_read,
    refuse=heads_divide,
)
