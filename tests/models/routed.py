"""Small mixtures of experts: a model of every family in transformers, and a single layer."""

import torch

from megalith.models.moe import Moe
from megalith.spec.families import Model
from megalith.spec.families.mixtral import Mixtral
from megalith.spec.families.qwen3_moe import Qwen3Moe
from megalith.spec.model import MoeSpec
from tests.models.families import SIZES

ROUTED: dict[str, Model] = {
    "mixtral": Mixtral(**SIZES, kv_heads=2, head_dim=8, ffn=24, experts=4, balance_weight=0.04),
    "mixtral of four": Mixtral(**SIZES, kv_heads=4, head_dim=12, ffn=24, experts=5, active=4, rope_theta=5000.0, window=7),
    "qwen3_moe": Qwen3Moe(**SIZES, kv_heads=2, head_dim=12, expert_ffn=16, experts=6, active=2, balance_weight=0.002),
    "qwen3_moe with dense layers": Qwen3Moe(
        **SIZES, kv_heads=2, head_dim=12, ffn=20, dense_layers=(1,), expert_ffn=16, experts=4, active=2
    ),
    "qwen3_moe not normalised": Qwen3Moe(
        **SIZES, kv_heads=4, head_dim=8, expert_ffn=16, experts=4, active=1, normalise=False, tied=True
    ),
}


def mixture(dim: int, spec: MoeSpec) -> Moe:
    """Return a layer whose weights, and bias if it has one, are far from 0."""
    torch.manual_seed(1)
    moe = Moe(dim, spec)
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.normal_(0, 0.5)
        if moe.router.bias is not None:
            moe.router.bias.normal_(0, 0.05)
    return moe
