"""Conversion of Nemotron-4 from and to transformers' format. transformers rotates the first channels of a head, Megalith the last
ones."""

from megalith.checkpoint.foreign.family import SIZES, Foreign, Json, Read, habits, plain_rope, rope_settings, write_rope
from megalith.checkpoint.foreign.weights import Piece, ends, layers, same, turned_last
from megalith.spec.families.nemotron import Nemotron

SHARE = "partial_rotary_factor"
LAYER = [
    *(same(f"attention_norm.{kind}", f"input_layernorm.{kind}") for kind in ("weight", "bias")),
    *(same(f"mlp_norm.{kind}", f"post_attention_layernorm.{kind}") for kind in ("weight", "bias")),
    same("attention.v.weight", "self_attn.v_proj.weight"),
    same("attention.out.weight", "self_attn.o_proj.weight"),
    same("mlp.up.weight", "mlp.up_proj.weight"),
    same("mlp.down.weight", "mlp.down_proj.weight"),
]


def _pieces(spec: Nemotron) -> list[Piece]:
    channels = int((spec.head_dim or spec.dim // spec.heads) * spec.rotated)
    turned = [
        turned_last(f"attention.{name}.weight", f"self_attn.{name}_proj.weight", heads=heads, channels=channels)
        for name, heads in (("q", spec.heads), ("k", spec.kv_heads))
    ]
    return [*ends(spec.tied), same("head.norm.bias", "model.norm.bias"), *layers([*LAYER, *turned], range(spec.layers))]


def _write(spec: Nemotron) -> Json:
    rope = write_rope(spec.rope_theta)
    rope["rope_parameters"] |= {SHARE: spec.rotated}
    return rope | {SHARE: spec.rotated, "head_dim": spec.head_dim or spec.dim // spec.heads}


def _read(config: Json) -> Read:
    settings = rope_settings(config)
    share = settings.pop(SHARE, 0.5)
    rope = plain_rope({"rope_parameters": settings})
    return Read(rope.fields | {"rotated": share}, rope.problems)


NEMOTRON = Foreign(
    spec=Nemotron,
    architecture="NemotronForCausalLM",
    model_type="nemotron",
    pieces=_pieces,
    needed=SIZES | {"ffn": "intermediate_size", "kv_heads": "num_key_value_heads"},
    optional={"head_dim": ("head_dim", None)}
    | habits(context=4096, norm_eps=1e-5, tied=False)
    | {"norm_eps": ("norm_eps", 1e-5), "init_std": ("initializer_range", 0.0134)},
    fixed={"hidden_act": ("relu2", None), "attention_bias": (False, None), "mlp_bias": (False, None)},
    write=_write,
    read=_read,
    further={"rotated": SHARE},
)
