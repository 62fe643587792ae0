"""Conversion of GPT-2 and GPT-3 from and to transformers' format, in which GPT-3 is a GPT-2 model."""

from megalith.checkpoint.foreign.family import Foreign, Json
from megalith.checkpoint.foreign.weights import Piece, joined, layers, same, transposed
from megalith.spec.families.gpt import Gpt

ENDS = [
    same("embedding.weight", "transformer.wte.weight"),
    same("embedding.positions", "transformer.wpe.weight"),
    same("head.norm.weight", "transformer.ln_f.weight"),
    same("head.norm.bias", "transformer.ln_f.bias"),
]
LAYER = [  # its linear layers are convolutions of width 1, whose weights are [in, out]
    same("attention_norm.weight", "ln_1.weight"),
    same("attention_norm.bias", "ln_1.bias"),
    joined([f"attention.{part}.weight" for part in "qkv"], "attn.c_attn.weight", transpose=True),
    joined([f"attention.{part}.bias" for part in "qkv"], "attn.c_attn.bias"),
    transposed("attention.out.weight", "attn.c_proj.weight"),
    same("attention.out.bias", "attn.c_proj.bias"),
    same("mlp_norm.weight", "ln_2.weight"),
    same("mlp_norm.bias", "ln_2.bias"),
    transposed("mlp.up.weight", "mlp.c_fc.weight"),
    same("mlp.up.bias", "mlp.c_fc.bias"),
    transposed("mlp.down.weight", "mlp.c_proj.weight"),
    same("mlp.down.bias", "mlp.c_proj.bias"),
]


def _pieces(spec: Gpt) -> list[Piece]:
    output = [] if spec.tied else [same("head.output.weight", "lm_head.weight")]
    return ENDS + output + layers(LAYER, range(spec.layers), "transformer.h.")


def _write(spec: Gpt) -> Json:
    return {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # nothing here was trained with dropout


def _refuse(spec: Gpt) -> list[str]:
    width = spec.heads * (spec.head_dim or spec.dim // spec.heads)
    return [] if width == spec.dim else [f"transformers needs heads x head_dim to equal dim, but they are {width} and {spec.dim}"]


GPT = Foreign(
    spec=Gpt,
    architecture="GPT2LMHeadModel",
    model_type="gpt2",
    pieces=_pieces,
    needed={"vocab": "vocab_size", "dim": "n_embd", "layers": "n_layer", "heads": "n_head"},
    optional={
        "ffn": ("n_inner", None),
        "context": ("n_positions", 1024),
        "norm_eps": ("layer_norm_epsilon", 1e-5),
        "tied": ("tie_word_embeddings", True),
        "init_std": ("initializer_range", 0.02),
    },
    fixed={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh", None),
        "scale_attn_weights": (True, None),
        "scale_attn_by_inverse_layer_idx": (False, None),
        "add_cross_attention": (False, None),
    },
    write=_write,
    refuse=_refuse,
    prefix="transformer.",
    computed=(".attn.bias", ".attn.masked_bias"),
)
