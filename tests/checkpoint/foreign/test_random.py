"""Random configurations, as transformers writes them, give the same logits and greedy text; an export has the same bits in
every tensor."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.checkpoint.huggingface import export, read_model, read_weights
from megalith.models.generate import generate
from megalith.models.stage import Stage
from tests.full import FULL
from tests.models.plain import logits

COUNT = 500 if FULL else 50
SEQ = 40
PROMPT, WRITTEN = 20, 6
KINDS = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "mixtral",
    "qwen3_moe",
    "gemma2",
    "gpt2",
    "deepseek_v3",
    "deepseek_v2",
    "bloom",
    "nemotron",
)


def _rope(draw: random.Random, *kinds: str) -> dict[str, Any]:
    """Draw rotary settings of one of these kinds."""
    kind, factor = draw.choice(kinds), draw.choice((1.5, 2.0, 4.0, 8.0))
    own: dict[str, dict[str, Any]] = {
        "default": {},
        "linear": {"factor": factor},
        "llama3": {
            "factor": factor,
            "low_freq_factor": draw.choice((1.0, 1.5)),
            "high_freq_factor": draw.choice((3.0, 4.0)),
            "original_max_position_embeddings": draw.choice((8, 16, 32)),
        },
        "yarn": {"factor": factor, "original_max_position_embeddings": draw.choice((8, 16, 32))},
    }
    if kind == "yarn" and draw.random() < 0.5:
        own["yarn"] |= {"beta_fast": draw.choice((8.0, 16.0)), "beta_slow": draw.choice((1.0, 2.0))}
    return {"rope_parameters": {"rope_type": kind, "rope_theta": draw.choice((100.0, 1e4, 5e5))} | own[kind]}


def _sizes(draw: random.Random) -> dict[str, Any]:
    """Draw the settings that families since Llama share."""
    kv_heads = draw.choice((1, 2, 3))
    heads = kv_heads * draw.choice((1, 2))
    return {
        "vocab_size": draw.choice((61, 96)),
        "hidden_size": heads * draw.choice((8, 12)),
        "num_hidden_layers": draw.choice((1, 2, 3)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": draw.choice((4, 8, 10)),
        "intermediate_size": draw.choice((24, 33)),
        "max_position_embeddings": draw.choice((64, 256)),
        "rms_norm_eps": draw.choice((1e-6, 1e-3)),
        "tie_word_embeddings": draw.random() < 0.5,
    }


def _experts(draw: random.Random) -> dict[str, Any]:
    experts = draw.choice((3, 4, 6))
    return {"num_experts_per_tok": draw.randint(1, experts), "experts": experts, "router_aux_loss_coef": draw.choice((0.0, 0.01))}


def _deepseek(draw: random.Random, kind: str) -> dict[str, Any]:
    groups = draw.choice((1, 2))
    found = _sizes(draw) | _rope(draw, "default")
    del found["head_dim"]
    found |= {
        "num_key_value_heads": found["num_attention_heads"],
        "moe_intermediate_size": draw.choice((8, 12)),
        "n_routed_experts": 4 * groups,
        "num_experts_per_tok": draw.choice((1, 3)),
        "n_shared_experts": draw.choice((1, 2)),
        "first_k_dense_replace": draw.randint(0, found["num_hidden_layers"]),
        "q_lora_rank": draw.choice((None, 12)),
        "kv_lora_rank": draw.choice((8, 16)),
        "qk_nope_head_dim": draw.choice((4, 8)),
        "qk_rope_head_dim": draw.choice((4, 8)),
        "v_head_dim": draw.choice((4, 8)),
        "routed_scaling_factor": draw.choice((1.0, 2.5)),
        "n_group": groups,
        "topk_group": 1,
        "norm_topk_prob": draw.random() < 0.5,
    }
    if kind == "deepseek_v2":
        found |= {"norm_topk_prob": False, "topk_method": "greedy" if groups == 1 else "group_limited_greedy"}
    return found


def drawn(kind: str, draw: random.Random) -> dict[str, Any]:
    """Draw the settings of a configuration of one of transformers' kinds."""
    if kind == "gpt2":
        heads, layers = draw.choice((1, 2, 4)), draw.choice((1, 2))
        sizes = {"vocab_size": 96, "n_embd": heads * 8, "n_head": heads, "n_layer": layers, "n_positions": 64}
        return sizes | {"n_inner": draw.choice((None, 24)), "layer_norm_epsilon": draw.choice((1e-5, 1e-3))}
    if kind == "bloom":
        heads = draw.choice((1, 3, 4, 6))
        sizes = {"vocab_size": 96, "hidden_size": heads * 8, "n_head": heads, "n_layer": draw.choice((1, 2)), "seq_length": 64}
        return sizes | {"tie_word_embeddings": draw.random() < 0.5, "layer_norm_epsilon": draw.choice((1e-5, 1e-3))}
    if kind.startswith("deepseek"):
        return _deepseek(draw, kind)
    found = _sizes(draw) | _rope(
        draw, *(("default", "linear", "yarn", "llama3") if kind in ("llama", "mistral", "qwen2") else ("default",))
    )
    window = draw.choice((None, 3, 17))
    match kind:
        case "llama":
            found |= {"attention_bias": draw.random() < 0.5, "mlp_bias": draw.random() < 0.5}
            found["hidden_size"] = found["num_attention_heads"] * 8  # transformers requires that heads divide this
        case "mistral":
            found |= {"sliding_window": window}
        case "mixtral":
            experts = _experts(draw)
            found |= {"sliding_window": window, "num_local_experts": experts.pop("experts")} | experts
        case "qwen3_moe":
            experts = _experts(draw)
            found |= {
                "moe_intermediate_size": 12,
                "norm_topk_prob": draw.random() < 0.5,
                "num_experts": experts.pop("experts"),
                "decoder_sparse_step": draw.choice((1, 2)),
                "mlp_only_layers": draw.choice(([], [0])),
            } | experts
        case "nemotron":
            rope = {"rope_theta": draw.choice((100.0, 1e4)), "partial_rotary_factor": draw.choice((0.25, 0.5, 1.0))}
            found |= {"norm_eps": found.pop("rms_norm_eps"), "rope_parameters": {"rope_type": "default"} | rope, "head_dim": 8}
        case "gemma2":
            found |= {"sliding_window": draw.choice((3, 17)), "query_pre_attn_scalar": draw.choice((4, 9))}
        case _:
            pass
    return found


@pytest.mark.slow
@pytest.mark.parametrize("number", range(COUNT))
def test_a_drawn_configuration_computes_the_same_and_goes_back_unchanged(number: int, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (a dependency of the tests only)")
    draw, kind = random.Random(number), KINDS[number % len(KINDS)]
    config = transformers.CONFIG_MAPPING[kind](**drawn(kind, draw))
    torch.manual_seed(number)
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}  # grouped products reject rows of 33 fp32 numbers
    theirs = transformers.AutoModelForCausalLM.from_config(config, **eager).eval()
    with torch.no_grad():
        for tensor in theirs.parameters():
            tensor.normal_(0, 0.3)
    theirs.save_pretrained(tmp_path / "theirs")
    spec, _ = read_model(tmp_path / "theirs")
    weights = read_weights(tmp_path / "theirs", spec)
    stage = Stage(spec.build())
    tokens = torch.randint(spec.vocab, (2, SEQ), generator=torch.Generator().manual_seed(number))
    with torch.no_grad():
        for name, tensor in (dict(stage.named_buffers()) | stage.parameters_by_name()).items():
            if name in weights:
                tensor.copy_(weights[name])
        expected, found = theirs(tokens).logits, logits(stage.eval(), tokens)
    assert float(expected.std()) > 0.05, "too flat to show a difference"
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4, msg=lambda text: f"{config}\n{text}")
    text = tokens[:1, :PROMPT]
    with torch.no_grad():
        for _ in range(WRITTEN):
            text = torch.cat((text, theirs(text).logits[:, -1:].argmax(-1)), dim=1)
    assert [*generate(stage, text[0, :PROMPT].tolist(), tokens=WRITTEN, temperature=0.0)] == text[0, PROMPT:].tolist(), config
    export(spec, weights, tmp_path / "ours", dtype=torch.float32)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").state_dict()
    assert back.keys() == theirs.state_dict().keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in theirs.state_dict().items()), config
