"""Import and export of DeepSeek-V2 and V3, and of Kimi K2, which has the format of V3. DeepSeek's rotary positions pair
neighbouring channels, whereas Megalith's pair channel i with i + rope_dim / 2, so the weights' rows for these channels are
reordered. DeepSeek stores modules for multi-token prediction as additional layers after the model's own, each with a copy of the
embedding and the output.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megalith.checkpoint.foreign.family import SIZES, Foreign, Json, Read, habits, rope_settings, uneven_rotation, write_rope
from megalith.checkpoint.foreign.weights import EMBEDDING, FINAL_NORM, GATED_MLP, NORMS, OUTPUT, Piece, layers, same, stacked
from megalith.spec.families.deepseek import DeepSeek

BIAS_RATE = 0.001  # DeepSeek-V3's; their files do not say it, and without a rate there would be no bias

STRETCH = {  # our field -> their setting
    "factor": "factor",
    "original_context": "original_max_position_embeddings",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
}


# --- weights ---


def _turned(ours: str, theirs: str, heads: int, channels: int) -> Piece:

    def ordered(found: Sequence[Tensor], *, pairs: bool) -> list[Tensor]:
        rows = found[0].unflatten(0, (heads, -1))
        kept, turned = rows[:, : rows.shape[1] - channels], rows[:, rows.shape[1] - channels :]
        turned = turned.unflatten(1, (2, -1) if pairs else (-1, 2)).transpose(1, 2).flatten(1, 2)
        return [torch.cat((kept, turned), dim=1).flatten(0, 1)]

    return Piece((ours,), (theirs,), lambda found: ordered(found, pairs=True), lambda found: ordered(found, pairs=False))


def _attention(spec: DeepSeek) -> list[Piece]:
    queries = (
        [_turned("attention.q.weight", "self_attn.q_proj.weight", spec.heads, spec.rope_dim)]
        if spec.q_rank is None
        else [
            same("attention.q_down.weight", "self_attn.q_a_proj.weight"),
            same("attention.q_norm.weight", "self_attn.q_a_layernorm.weight"),
            _turned("attention.q_up.weight", "self_attn.q_b_proj.weight", spec.heads, spec.rope_dim),
        ]
    )
    return [
        *queries,
        _turned("attention.kv_down.weight", "self_attn.kv_a_proj_with_mqa.weight", 1, spec.rope_dim),
        same("attention.kv_norm.weight", "self_attn.kv_a_layernorm.weight"),
        same("attention.kv_up.weight", "self_attn.kv_b_proj.weight"),
        same("attention.out.weight", "self_attn.o_proj.weight"),
    ]


def _experts(spec: DeepSeek) -> list[Piece]:
    parts = ("gate", "up", "down")
    routed = [stacked(f"mlp.experts.{part}", f"mlp.experts.{{e}}.{part}_proj.weight", spec.experts) for part in parts]
    shared = [same(f"mlp.shared.{part}.weight", f"mlp.shared_experts.{part}_proj.weight") for part in parts]
    router = [same("mlp.router.weight", "mlp.gate.weight")]
    if spec.scores == "sigmoid":
        bias = "mlp.gate.e_score_correction_bias"
        without = Piece((), (bias,), lambda found: [torch.zeros(spec.experts)], lambda found: [])
        router.append(same("mlp.router.bias", bias) if spec.bias_rate else without)
    return [*router, *routed, *shared]


def _copied(piece: Piece, copies: Sequence[str]) -> Piece:
    """Return `piece` for a tensor that DeepSeek's files also hold under the names `copies`."""
    if not copies:
        return piece
    names = piece.theirs + tuple(copies)
    return Piece(piece.ours, names, lambda found: list(found) * len(names), lambda found: [found[0]], copied=True)


def _ahead(block: Sequence[Piece], depth: int, layer: int) -> list[Piece]:
    own = [
        same("norm_embedding.weight", "enorm.weight"),
        same("norm_hidden.weight", "hnorm.weight"),
        same("project.weight", "eh_proj.weight"),
        same("norm.weight", "shared_head.norm.weight"),
    ]
    inside = [piece.under("block.", "") for piece in block]
    return [piece.under(f"head.ahead.{depth}.", f"model.layers.{layer}.") for piece in [*own, *inside]]


def _pieces(spec: DeepSeek) -> list[Piece]:
    dense, routed = ([*NORMS, *_attention(spec), *mlp] for mlp in (GATED_MLP, _experts(spec)))
    further = range(spec.layers, spec.layers + spec.ahead)
    tables = [f"model.layers.{layer}.embed_tokens.weight" for layer in further]
    outputs = [f"model.layers.{layer}.shared_head.head.weight" for layer in further]
    ends = [_copied(EMBEDDING, tables + outputs), FINAL_NORM]
    if not spec.tied:
        ends = [_copied(EMBEDDING, tables), FINAL_NORM, _copied(OUTPUT, outputs)]
    blocks = layers(dense, range(spec.dense_layers)) + layers(routed, range(spec.dense_layers, spec.layers))
    return ends + blocks + [piece for depth, layer in enumerate(further) for piece in _ahead(routed, depth, layer)]


# --- configuration ---


def _write(spec: DeepSeek) -> Json:
    scaling = spec.rope_scaling
    stretch: Json | None = None
    if scaling is not None:
        stretch = {"rope_type": "yarn", "type": "yarn"} | {theirs: getattr(scaling, ours) for ours, theirs in STRETCH.items()}
    chosen = "noaux_tc" if spec.scores == "sigmoid" else "greedy" if spec.groups == 1 else "group_limited_greedy"
    routing = {"topk_method": chosen, "scoring_func": spec.scores, "num_key_value_heads": spec.heads, "moe_layer_freq": 1}
    kind = V2 if spec.scores == "softmax" else V3
    return routing | write_rope(spec.rope_theta, stretch) | {"architectures": [kind.architecture], "model_type": kind.model_type}


def _read_yarn(config: Json) -> Read:
    rope = rope_settings(config)
    problems = uneven_rotation(rope)
    if rope["rope_type"] not in ("default", "yarn"):
        problems.append(f"rope_type = {rope['rope_type']!r}; only 'default' and 'yarn' can be represented")
    if rope["rope_type"] != "yarn":
        return Read({"rope_theta": rope["rope_theta"], "rope_scaling": None}, problems)
    given = {ours: rope[theirs] for ours, theirs in STRETCH.items() if rope.get(theirs) is not None}
    problems += [f"rope_type yarn without {STRETCH[ours]}" for ours in ("factor", "original_context") if ours not in given]
    problems += [f"rope {key} = {rope[key]!r}; Megalith supports only the default" for key in _unusual(rope)]
    problems += _two_readings(given.get("mscale"), given.get("mscale_all_dim"))
    return Read({"rope_theta": rope["rope_theta"], "rope_scaling": given}, problems)


def _unusual(rope: Json) -> list[str]:
    usual: Json = {"attention_factor": (None,), "truncate": (None, True)}
    return [key for key, values in usual.items() if rope.get(key) not in values]


def _two_readings(mscale: Any, all_dim: Any) -> list[str]:
    """Return the problem if transformers and DeepSeek's code read YaRN's `mscale` and `mscale_all_dim` differently. If one of them is
    missing or 0, transformers ignores both, whereas DeepSeek's code uses 1.0 for a missing `mscale` and 0.0 for a missing
    `mscale_all_dim`."""
    if (mscale and all_dim) or (mscale in (None, 1.0) and not all_dim):
        return []
    found = f"mscale = {_given(mscale)} with mscale_all_dim = {_given(all_dim)}"
    way_out = "Set both to other values than 0, or mscale = 1.0 and mscale_all_dim = 0.0"
    return [f"{found}: transformers and DeepSeek read this differently. {way_out}"]


def _given(value: Any) -> str:
    return "(not given)" if value is None else str(value)


def _read_v2(config: Json) -> Read:
    yarn, method = _read_yarn(config), config.get("topk_method", "greedy")
    problems = (
        []
        if method in ("greedy", "group_limited_greedy")
        else [f"topk_method = {method!r}; only greedy and group_limited_greedy can be represented"]
    )
    grouped = method == "group_limited_greedy"
    groups = {field: config.get(theirs) or 1 if grouped else 1 for field, theirs in GROUPS.items()}
    fields = {"scores": "softmax", "normalise": False, "group_score": "max", "bias_rate": 0.0, "ahead": 0}
    return Read(yarn.fields | groups | fields, yarn.problems + problems)


def _read_v3(config: Json) -> Read:
    yarn = _read_yarn(config)
    return Read(yarn.fields | {"scores": "sigmoid", "group_score": "top2", "bias_rate": BIAS_RATE}, yarn.problems)


def _without_missing(spec: DeepSeek, names: Collection[str]) -> DeepSeek:
    """Return the spec without multi-token prediction if the weights of its modules are missing: transformers counts these modules
    in config.json but does not save them."""
    there = any(name.startswith(f"model.layers.{spec.layers}.") for name in names)
    return spec if there else spec.model_copy(update={"ahead": 0})


def _refuse(spec: DeepSeek) -> list[str]:
    wanted: dict[str, Any] = {"group_score": "top2"}
    if spec.scores == "softmax":
        wanted = {"group_score": "max", "normalise": False, "bias_rate": 0.0, "ahead": 0}
    if spec.groups == 1:
        del wanted["group_score"]
    problems = [
        f"{field} = {getattr(spec, field)!r} with scores = {spec.scores!r}: transformers' class for this model supports only {value!r}"
        for field, value in wanted.items()
        if getattr(spec, field) != value
    ]
    if spec.shared_experts == 0:
        problems.append("shared_experts = 0: transformers' classes need at least one")
    if spec.dim % spec.heads and spec.scores == "softmax":
        problems.append(f"transformers needs heads to divide dim, but {spec.heads} does not divide {spec.dim}")
    scaling = spec.rope_scaling
    return problems + (_two_readings(scaling.mscale, scaling.mscale_all_dim) if scaling else [])


GROUPS = {"groups": "n_group", "active_groups": "topk_group"}
FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish", None),
    "attention_bias": (False, None),
    "moe_layer_freq": (1, None),
}

V3 = Foreign(
    spec=DeepSeek,
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    pieces=_pieces,
    needed=SIZES
    | {
        "ffn": "intermediate_size",
        "expert_ffn": "moe_intermediate_size",
        "experts": "n_routed_experts",
        "active": "num_experts_per_tok",
    },
    optional={
        "q_rank": ("q_lora_rank", 1536),
        "kv_rank": ("kv_lora_rank", 512),
        "nope_dim": ("qk_nope_head_dim", 128),
        "rope_dim": ("qk_rope_head_dim", 64),
        "v_dim": ("v_head_dim", 128),
        "dense_layers": ("first_k_dense_replace", 3),
        "shared_experts": ("n_shared_experts", 1),
        "routed_scale": ("routed_scaling_factor", 2.5),
        "normalise": ("norm_topk_prob", True),
        "groups": ("n_group", 8),
        "active_groups": ("topk_group", 4),
        "balance_weight": ("aux_loss_alpha", 0.0),
        "ahead": ("num_nextn_predict_layers", 1),
    }
    | habits(context=4096, norm_eps=1e-6, tied=False),
    fixed=FIXED | {"scoring_func": ("sigmoid", None), "topk_method": ("noaux_tc", None), "rope_interleave": (True, None)},
    write=_write,
    read=_read_v3,
    further=STRETCH | GROUPS,
    refuse=_refuse,
    without_missing=_without_missing,
    exact=("e_score_correction_bias",),
)
V2 = replace(
    V3,
    architecture="DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    optional={ours: setting for ours, setting in V3.optional.items() if ours not in ("ahead", "normalise", *GROUPS)}
    | {
        "dense_layers": ("first_k_dense_replace", 0),
        "shared_experts": ("n_shared_experts", 2),
        "routed_scale": ("routed_scaling_factor", 1.0),
        "context": ("max_position_embeddings", 2048),
    },
    fixed=FIXED | {"scoring_func": ("softmax", None), "norm_topk_prob": (False, None), "mlp_bias": (False, None)},
    read=_read_v2,
)
KIMI_K2 = replace(V3, model_type="kimi_k2")
DEEPSEEK = (V2, KIMI_K2, V3)  # each reads its own; the last writes all, under the name of V2 or V3
