"""Conversion of Llama from and to the files of transformers."""

from megalith.checkpoint.foreign.family import (
    LLAMA3,
    SIZES,
    Foreign,
    Json,
    habits,
    heads_divide,
    no_further_yarn,
    scaled_rope,
    write_scaled_rope,
)
from megalith.checkpoint.foreign.weights import ATTENTION, GATED_MLP, NORMS, Piece, ends, layers, same
from megalith.spec.families.llama import Llama

BIASES = [same(f"attention.{ours}.bias", f"self_attn.{ours[0]}_proj.bias") for ours in ("q", "k", "v", "out")]
MLP_BIASES = [same(f"mlp.{part}.bias", f"mlp.{part}_proj.bias") for part in ("gate", "up", "down")]


def _pieces(spec: Llama) -> list[Piece]:
    biases = (BIASES if spec.attention_bias else []) + (MLP_BIASES if spec.mlp_bias else [])
    return ends(spec.tied) + layers([*NORMS, *ATTENTION, *GATED_MLP, *biases], range(spec.layers))


def _write(spec: Llama) -> Json:
    sizes = {"num_key_value_heads": spec.kv_heads or spec.heads, "head_dim": spec.head_dim or spec.dim // spec.heads}
    return sizes | {"pretraining_tp": 1} | write_scaled_rope(spec)


LLAMA = Foreign(
    spec=Llama,
    architecture="LlamaForCausalLM",
    model_type="llama",
    pieces=_pieces,
    needed=SIZES | {"ffn": "intermediate_size"},
    optional={
        "kv_heads": ("num_key_value_heads", None),
        "head_dim": ("head_dim", None),
        "attention_bias": ("attention_bias", False),
        "mlp_bias": ("mlp_bias", False),
    }
    | habits(context=2048, norm_eps=1e-6, tied=False),
    fixed={"hidden_act": ("silu", "swish", None)},
    write=_write,
    read=scaled_rope,
    further=LLAMA3,
    refuse=lambda spec: heads_divide(spec) + no_further_yarn(spec),
)
