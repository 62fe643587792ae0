"""A small model of every dense family, with everything that distinguishes the family."""

from megalith.spec.families import Model
from megalith.spec.families.bloom import Bloom
from megalith.spec.families.gemma2 import Gemma2
from megalith.spec.families.gpt import Gpt
from megalith.spec.families.llama import Llama
from megalith.spec.families.mistral import Mistral
from megalith.spec.families.nemotron import Nemotron
from megalith.spec.families.palm import Palm
from megalith.spec.families.qwen2 import Qwen2
from megalith.spec.families.qwen3 import Qwen3
from megalith.spec.model import LinearScaling, YarnScaling

SIZES = {"layers": 3, "dim": 32, "heads": 4, "vocab": 96, "context": 64}
# values that transformers writes explicitly are explicit here, so that an imported model is the same
EXPORTED: dict[str, Model] = {
    "llama": Llama(**SIZES, kv_heads=2, head_dim=8, ffn=48),
    "llama with biases": Llama(
        **SIZES, kv_heads=4, head_dim=8, ffn=48, attention_bias=True, mlp_bias=True, rope_scaling=LinearScaling(factor=4.0)
    ),
    "mistral": Mistral(**SIZES, kv_heads=2, head_dim=12, ffn=48, window=7),
    "mistral unbounded": Mistral(
        **SIZES, kv_heads=4, head_dim=8, ffn=48, rope_scaling=YarnScaling(factor=4.0, original_context=16)
    ),
    "qwen2": Qwen2(**SIZES, kv_heads=2, head_dim=8, ffn=48),
    "qwen2 tied": Qwen2(
        **SIZES,
        kv_heads=4,
        head_dim=8,
        ffn=48,
        tied=True,
        rope_scaling=YarnScaling(factor=2.0, original_context=32, beta_fast=16.0),
    ),
    "gpt": Gpt(**SIZES),
    "gpt untied, wide": Gpt(**SIZES, ffn=40, tied=False, norm_eps=1e-4),
    "gemma2": Gemma2(
        **SIZES, kv_heads=2, head_dim=12, ffn=48, query_scalar=10, window=7, attention_softcap=5.0, logit_softcap=3.0
    ),
    "gemma2 uncapped": Gemma2(
        **SIZES, kv_heads=4, head_dim=8, query_scalar=8, ffn=48, attention_softcap=None, logit_softcap=None, tied=False
    ),
    "qwen3": Qwen3(**SIZES, kv_heads=2, head_dim=12, ffn=48, rope_theta=5000.0),
    "qwen3 tied": Qwen3(**SIZES, kv_heads=4, head_dim=8, ffn=48, tied=True, norm_eps=1e-3),
    "nemotron": Nemotron(**SIZES, kv_heads=2, head_dim=8, ffn=48),
    "nemotron, three quarters rotated": Nemotron(
        **SIZES, kv_heads=4, head_dim=16, ffn=48, rotated=0.75, tied=True, norm_eps=1e-3
    ),
    "bloom": Bloom(**SIZES),
    "bloom untied, twelve heads": Bloom(layers=2, dim=48, heads=12, vocab=96, context=64, tied=False, norm_eps=1e-3),
}
DENSE: dict[str, Model] = EXPORTED | {
    "palm": Palm(**SIZES, head_dim=8),
    "palm grouped": Palm(**SIZES, head_dim=8, kv_heads=2, ffn=48, tied=False),
}
