"""Qwen3's mixtures of experts, both ways."""

from megalith.checkpoint.foreign.family import SIZES, Foreign, Json, Read, habits, plain_rope, write_rope
from megalith.checkpoint.foreign.mixtral import BALANCE, read_balance, write_balance
from megalith.checkpoint.foreign.qwen3 import HEAD_NORMS
from megalith.checkpoint.foreign.weights import ATTENTION, NORMS, Piece, ends, layers, same, stacked
from megalith.spec.families.qwen3_moe import Qwen3Moe


def _pieces(spec: Qwen3Moe) -> list[Piece]:
    experts = [
        stacked(f"mlp.experts.{part}", f"mlp.experts.{{e}}.{part}_proj.weight", spec.experts) for part in ("gate", "up", "down")
    ]
    router = same("mlp.router.weight", "mlp.gate.weight")
    return ends(spec.tied) + layers([*NORMS, *ATTENTION, *HEAD_NORMS, router, *experts], range(spec.layers))


def _write(spec: Qwen3Moe) -> Json:
    unused = {"intermediate_size": spec.expert_ffn * spec.active}  # of dense layers, which there are none of
    return {"num_experts": spec.experts} | unused | write_balance(spec.balance_weight, spec.active) | write_rope(spec.rope_theta)


def _read(config: Json) -> Read:
    rope = plain_rope(config)
    experts = config.get("num_experts", config.get("num_local_experts"))  # transformers 5 writes the latter
    problems = [] if experts else ["num_experts is not given"]
    return Read({"experts": experts} | rope.fields | read_balance(config, 0.001), rope.problems + problems)


QWEN3_MOE = Foreign(
    spec=Qwen3Moe,
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    pieces=_pieces,
    needed=SIZES | {"expert_ffn": "moe_intermediate_size", "kv_heads": "num_key_value_heads", "active": "num_experts_per_tok"},
    optional={"head_dim": ("head_dim", 128), "normalise": ("norm_topk_prob", False)}
    | habits(context=32768, norm_eps=1e-6, tied=False),
    fixed={
        "hidden_act": ("silu", "swish", None),
        "attention_bias": (False, None),
        "use_sliding_window": (False, None),
        "decoder_sparse_step": (1, None),
        "mlp_only_layers": ([], None),
    },
    write=_write,
    read=_read,
    further=BALANCE | {"experts": "num_experts"},
)
