"""Conversion of Mixtral from and to transformers' format."""

from megalith.checkpoint.foreign.family import SIZES, Foreign, Json, Read, habits, plain_rope, write_rope
from megalith.checkpoint.foreign.weights import ATTENTION, NORMS, Piece, ends, layers, same, stacked
from megalith.spec.families.mixtral import Mixtral

EXPERTS = {"gate": "w1", "up": "w3", "down": "w2"}  # ours -> theirs


def _pieces(spec: Mixtral) -> list[Piece]:
    experts = [
        stacked(f"mlp.experts.{ours}", f"block_sparse_moe.experts.{{e}}.{theirs}.weight", spec.experts)
        for ours, theirs in EXPERTS.items()
    ]
    router = same("mlp.router.weight", "block_sparse_moe.gate.weight")
    return ends(spec.tied) + layers([*NORMS, *ATTENTION, router, *experts], range(spec.layers))


BALANCE = {"balance_weight": "router_aux_loss_coef"}  # our field -> the setting it comes from


def write_balance(balance_weight: float, active: int) -> Json:
    """Return transformers' setting for the balance loss. transformers sums the loss over a token's `active` experts, whereas
    Megalith takes the mean, so Megalith's weight is divided by `active`."""
    return {"router_aux_loss_coef": balance_weight / active}


def read_balance(config: Json, default: float) -> Json:
    """Return the weight of Megalith's balance loss: transformers' weight times the number of active experts."""
    return {"balance_weight": config.get("router_aux_loss_coef", default) * config.get("num_experts_per_tok", 0)}


def _write(spec: Mixtral) -> Json:
    head_dim = spec.head_dim or spec.dim // spec.heads
    return {"head_dim": head_dim} | write_balance(spec.balance_weight, spec.active) | write_rope(spec.rope_theta)


def _read(config: Json) -> Read:
    rope = plain_rope({"rope_theta": 1e6} | config)
    return Read(rope.fields | read_balance(config, 0.001), rope.problems)


MIXTRAL = Foreign(
    spec=Mixtral,
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    pieces=_pieces,
    needed=SIZES
    | {
        "ffn": "intermediate_size",
        "kv_heads": "num_key_value_heads",
        "experts": "num_local_experts",
        "active": "num_experts_per_tok",
    },
    optional={"head_dim": ("head_dim", None), "window": ("sliding_window", None)}
    | habits(context=131072, norm_eps=1e-5, tied=False),
    fixed={
        "hidden_act": ("silu", "swish", None),
        "router_jitter_noise": (0.0, None),
    },
    write=_write,
    read=_read,
    further=BALANCE,
)
