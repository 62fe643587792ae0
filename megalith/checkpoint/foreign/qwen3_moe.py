"""Conversion of Qwen3's mixtures of experts from and to transformers' format."""

from megalith.checkpoint.foreign.family import SIZES, Foreign, Json, Read, habits, plain_rope, write_rope
from megalith.checkpoint.foreign.mixtral import BALANCE, read_balance, write_balance
from megalith.checkpoint.foreign.qwen3 import HEAD_NORMS
from megalith.checkpoint.foreign.weights import ATTENTION, GATED_MLP, NORMS, Piece, ends, layers, same, stacked
from megalith.spec.families.qwen3_moe import Qwen3Moe


def _pieces(spec: Qwen3Moe) -> list[Piece]:
    experts = [
        stacked(f"mlp.experts.{part}", f"mlp.experts.{{e}}.{part}_proj.weight", spec.experts) for part in ("gate", "up", "down")
    ]
    router = same("mlp.router.weight", "mlp.gate.weight")
    common = [*NORMS, *ATTENTION, *HEAD_NORMS]
    routed = [number for number in range(spec.layers) if number not in spec.dense_layers]
    return ends(spec.tied) + layers([*common, *GATED_MLP], spec.dense_layers) + layers([*common, router, *experts], routed)


def _write(spec: Qwen3Moe) -> Json:
    dense = {"intermediate_size": spec.ffn or spec.expert_ffn * spec.active, "mlp_only_layers": list(spec.dense_layers)}
    return {"num_experts": spec.experts} | dense | write_balance(spec.balance_weight, spec.active) | write_rope(spec.rope_theta)


def _read(config: Json) -> Read:
    rope = plain_rope(config)
    experts = config.get("num_experts", config.get("num_local_experts"))  # transformers 5 writes the latter
    problems = [] if experts else ["num_experts is not given"]
    dense, unusable = _dense_layers(config)
    fields = {"experts": experts, "dense_layers": dense} | ({"ffn": config.get("intermediate_size", 6144)} if dense else {})
    return Read(fields | rope.fields | read_balance(config, 0.001), rope.problems + problems + unusable)


def _dense_layers(config: Json) -> tuple[list[int], list[str]]:
    """Return the layers without experts, as transformers chooses them: the layers in `mlp_only_layers`, and all whose number
    (from 1) is not a multiple of `decoder_sparse_step`. Also return the problems of `mlp_only_layers` and `decoder_sparse_step`.
    """
    every, listed, layers = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers"), config.get("num_hidden_layers")
    problems = []
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        problems.append(f"decoder_sparse_step = {every!r}: it must be a whole number of at least 1")
    if listed is not None and not (isinstance(listed, list) and all(isinstance(one, int) for one in listed)):
        problems.append(f"mlp_only_layers = {listed!r}: it must be a list of whole numbers")
    if problems or not isinstance(layers, int):
        return [], problems
    return [number for number in range(layers) if number in (listed or ()) or (number + 1) % every], []


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
    },
    write=_write,
    read=_read,
    further=BALANCE | {"experts": "num_experts", "dense_layers": "mlp_only_layers", "ffn": "intermediate_size"},
)
