"""Small DeepSeek models for tests, and transformers' V2 and V3 with the same weights."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.models.stage import Stage
from megalith.spec.families.deepseek import DeepSeek
from megalith.spec.model import YarnScaling

SIZES: dict[str, Any] = {
    "layers": 3,
    "dim": 32,
    "heads": 4,
    "kv_rank": 16,
    "nope_dim": 8,
    "rope_dim": 4,
    "v_dim": 6,
    "ffn": 48,
    "experts": 8,
    "expert_ffn": 24,
    "active": 3,
    "vocab": 96,
    "context": 64,
}
V2: dict[str, Any] = {"scores": "softmax", "normalise": False, "group_score": "max", "shared_experts": 2}
YARN = YarnScaling(factor=4.0, original_context=16, mscale=0.707, mscale_all_dim=1.0)


def deepseek(**sizes: Any) -> DeepSeek:
    """Return a tiny DeepSeek-V3 without latent queries, with other `sizes`."""
    return DeepSeek.model_validate(SIZES | sizes)


def config_of(spec: DeepSeek) -> Any:
    """Return transformers' configuration of the model. Skips the test if transformers is not installed."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (a dependency of the tests only)")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": spec.rope_theta}
    if (scaling := spec.rope_scaling) is not None:
        rope |= scaling.model_dump(exclude={"kind", "original_context"})
        rope |= {"rope_type": "yarn", "original_max_position_embeddings": scaling.original_context}
    common: dict[str, Any] = {
        "vocab_size": spec.vocab,
        "hidden_size": spec.dim,
        "intermediate_size": spec.ffn,
        "moe_intermediate_size": spec.expert_ffn,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.heads,
        "n_shared_experts": spec.shared_experts,
        "n_routed_experts": spec.experts,
        "routed_scaling_factor": spec.routed_scale,
        "kv_lora_rank": spec.kv_rank,
        "q_lora_rank": spec.q_rank,
        "qk_rope_head_dim": spec.rope_dim,
        "v_head_dim": spec.v_dim,
        "qk_nope_head_dim": spec.nope_dim,
        "n_group": spec.groups,
        "topk_group": spec.active_groups,
        "num_experts_per_tok": spec.active,
        "first_k_dense_replace": spec.dense_layers,
        "norm_topk_prob": spec.normalise,
        "max_position_embeddings": spec.context,
        "rms_norm_eps": spec.norm_eps,
        "tie_word_embeddings": spec.tied,
        "rope_parameters": rope,
        "num_nextn_predict_layers": spec.ahead,
    }
    if spec.scores == "softmax":
        greedy = "greedy" if spec.groups == 1 else "group_limited_greedy"
        del common["num_nextn_predict_layers"]
        return transformers.DeepseekV2Config(**common, topk_method=greedy)
    return transformers.DeepseekV3Config(**common)


def paired(rows: Tensor, channels: int) -> Tensor:
    """Reorder rows whose last `channels` are rotated in halves (i with i + channels / 2), so that neighbours are rotated
    together."""
    kept, turned = rows[: len(rows) - channels], rows[len(rows) - channels :]
    return torch.cat((kept, turned.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)))


NAMES = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.q_down": "self_attn.q_a_proj",
    "attention.q_norm": "self_attn.q_a_layernorm",
    "attention.q_up": "self_attn.q_b_proj",
    "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.kv_up": "self_attn.kv_b_proj",
    "attention.out": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "mlp.router": "mlp.gate",
    "mlp.shared.gate": "mlp.shared_experts.gate_proj",
    "mlp.shared.up": "mlp.shared_experts.up_proj",
    "mlp.shared.down": "mlp.shared_experts.down_proj",
}


def in_pairs(name: str, weight: Tensor, spec: DeepSeek) -> Tensor:
    """Return one of our weights with transformers' order of rotary channels."""
    if name.endswith(("attention.q.weight", "attention.q_up.weight")):
        heads = weight.unflatten(0, (spec.heads, -1))
        return torch.cat([paired(head, spec.rope_dim) for head in heads])
    return paired(weight, spec.rope_dim) if name.endswith("attention.kv_down.weight") else weight


def block_weights(prefix: str, weights: dict[str, Tensor], spec: DeepSeek) -> dict[str, Tensor]:
    """Return a block's weights under transformers' names, with experts stacked as in transformers."""
    found: dict[str, Tensor] = {}
    inside = {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}
    for name, weight in inside.items():
        path, _, child = name.rpartition(".")
        if path in NAMES and child == "weight":
            found[f"{NAMES[path]}.weight"] = in_pairs(name, weight, spec)
    if "mlp.router.weight" in inside:
        found["mlp.experts.gate_up_proj"] = torch.cat((inside["mlp.experts.gate"], inside["mlp.experts.up"]), dim=1)
        found["mlp.experts.down_proj"] = inside["mlp.experts.down"]
        if spec.scores == "sigmoid":
            found["mlp.gate.e_score_correction_bias"] = inside.get("mlp.router.bias", torch.zeros(spec.experts))
    return found


def weights_of(model: Stage) -> dict[str, Tensor]:
    """Return all weights and buffers by our names."""
    return {name: tensor.detach() for name, tensor in (model.parameters_by_name() | dict(model.named_buffers())).items()}


def twin(spec: DeepSeek, ours: Stage) -> Any:
    """Return transformers' model with our weights. It has no multi-token prediction."""
    import transformers  # slow to import, and only these tests need it

    kind = transformers.DeepseekV2ForCausalLM if spec.scores == "softmax" else transformers.DeepseekV3ForCausalLM
    theirs = kind(config_of(spec)).eval()
    weights = weights_of(ours)
    given = {"model.embed_tokens.weight": weights["embedding.weight"], "model.norm.weight": weights["head.norm.weight"]}
    given["lm_head.weight"] = weights.get("head.output.weight", weights["embedding.weight"])
    for number in range(spec.layers):
        block = block_weights(f"blocks.{number}.", weights, spec)
        given |= {f"model.layers.{number}.{name}": weight for name, weight in block.items()}
    left = theirs.load_state_dict(given, strict=False)
    assert not left.unexpected_keys and not left.missing_keys, left
    return theirs


def drafting(spec: DeepSeek, ours: Stage, theirs: Any) -> Any:
    """Return transformers' module for multi-token prediction, with our weights. Skips the test if transformers is not
    installed."""
    layers = pytest.importorskip("transformers.modeling_layers", reason="transformers is not installed")
    made, weights = layers.MtpModel(theirs, spec.ahead).eval(), weights_of(ours)
    for number, layer in enumerate(made.layers):
        prefix = f"head.ahead.{number}."
        own = {"enorm": "norm_embedding", "hnorm": "norm_hidden", "eh_proj": "project", "post_norm": "norm"}
        given = {f"{name}.weight": weights[f"{prefix}{known}.weight"] for name, known in own.items()}
        given |= {f"mtp_block.{name}": weight for name, weight in block_weights(f"{prefix}block.", weights, spec).items()}
        layer.load_state_dict(given)
    return made
