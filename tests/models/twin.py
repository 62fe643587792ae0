"""transformers' Llama for tests, by the names of either of its major versions."""

from typing import Any

import pytest

from megalith.checkpoint.huggingface import renames
from megalith.models.stage import Stage
from megalith.spec.llama import Llama


def config_of(spec: Llama) -> Any:
    """Its configuration; skips where transformers is not installed."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (a dependency of the tests only)")
    rope: dict[str, Any] = {"rope_type": "default"}
    if (scaling := spec.rope_scaling) is not None:
        rope = {"rope_type": "llama3", "factor": scaling.factor, "original_max_position_embeddings": scaling.original_context}
        rope |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    turning: dict[str, Any] = {"rope_parameters": rope | {"rope_theta": spec.rope_theta}}
    if int(transformers.__version__.split(".")[0]) < 5:
        turning = {"rope_theta": spec.rope_theta, "rope_scaling": rope}
    return transformers.LlamaConfig(
        vocab_size=spec.vocab,
        hidden_size=spec.dim,
        intermediate_size=spec.ffn,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.context,
        rms_norm_eps=spec.norm_eps,
        tie_word_embeddings=spec.tied,
        **turning,
    )


def twin(spec: Llama, ours: Stage) -> Any:
    """Its model with our weights."""
    import transformers  # slow to import, and only these tests need it

    theirs = transformers.LlamaForCausalLM(config_of(spec))
    names = renames(spec)
    weights = {names[name]: parameter.detach() for name, parameter in ours.parameters_by_name().items()}
    missing = theirs.load_state_dict(weights, strict=False).missing_keys
    assert missing == (["lm_head.weight"] if spec.tied else []), missing
    return theirs
