"""Conversion of BLOOM from and to transformers' format."""

from megalith.checkpoint.foreign.family import Foreign, Json
from megalith.checkpoint.foreign.weights import Piece, interleaved, layers, same
from megalith.spec.families.bloom import Bloom

KINDS = ("weight", "bias")
ENDS = [
    same("embedding.weight", "transformer.word_embeddings.weight"),
    *(same(f"embedding.norm.{kind}", f"transformer.word_embeddings_layernorm.{kind}") for kind in KINDS),
    *(same(f"head.norm.{kind}", f"transformer.ln_f.{kind}") for kind in KINDS),
]
LAYER = {
    "attention_norm": "input_layernorm",
    "attention.out": "self_attention.dense",
    "mlp_norm": "post_attention_layernorm",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}


def _pieces(spec: Bloom) -> list[Piece]:
    output = [] if spec.tied else [same("head.output.weight", "lm_head.weight")]
    layer = [same(f"{ours}.{kind}", f"{theirs}.{kind}") for ours, theirs in LAYER.items() for kind in KINDS]
    for kind in KINDS:
        ours = [f"attention.{part}.{kind}" for part in "qkv"]
        layer.append(interleaved(ours, f"self_attention.query_key_value.{kind}", heads=spec.heads))
    return ENDS + output + layers(layer, range(spec.layers), "transformer.h.")


def _write(spec: Bloom) -> Json:
    return {"seq_length": spec.context}  # as in the released configurations; transformers does not read it


def _refuse(spec: Bloom) -> list[str]:
    width, hidden = spec.heads * (spec.head_dim or spec.dim // spec.heads), spec.ffn or 4 * spec.dim
    problems = (
        [] if width == spec.dim else [f"transformers needs heads x head_dim to equal dim, but they are {width} and {spec.dim}"]
    )
    return problems if hidden == 4 * spec.dim else [*problems, f"transformers needs ffn = 4 dim, but ffn is {hidden}"]


BLOOM = Foreign(
    spec=Bloom,
    architecture="BloomForCausalLM",
    model_type="bloom",
    pieces=_pieces,
    needed={"vocab": "vocab_size", "dim": "hidden_size", "layers": "n_layer", "heads": "n_head"},
    optional={
        "context": ("seq_length", 2048),
        "norm_eps": ("layer_norm_epsilon", 1e-5),
        "tied": ("tie_word_embeddings", True),
        "init_std": ("initializer_range", 0.02),
    },
    fixed={"apply_residual_connection_post_layernorm": (False, None)},
    write=_write,
    refuse=_refuse,
    prefix="transformer.",
)
