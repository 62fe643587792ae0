"""Rotary settings in any form of config.json have the same meaning as in transformers, or are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.checkpoint.huggingface import ForeignModelError, export, read_config, read_weights, shapes
from megalith.models.stage import Stage
from megalith.spec.families import Model
from megalith.spec.families.llama import Llama
from megalith.spec.families.mixtral import Mixtral
from tests.models.deepseek import deepseek
from tests.models.plain import logits

LLAMA = Llama(layers=2, dim=32, heads=4, kv_heads=2, ffn=48, vocab=96, context=64)
MIXTRAL = Mixtral(layers=2, dim=32, heads=4, kv_heads=2, ffn=48, vocab=96, context=64, experts=4, active=2, rope_theta=500.0)
DEEPSEEK = deepseek(q_rank=12, bias_rate=0.001)

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}
ABSENT = "not given"

READ: dict[str, tuple[Model, dict[str, Any]]] = {
    "scaling beside parameters": (LLAMA, {"rope_scaling": LLAMA3, "rope_parameters": PLAIN}),
    "parameters alone": (LLAMA, {"rope_scaling": None, "rope_parameters": LLAMA3 | {"rope_theta": 500.0}}),
    "scaling without a base": (
        LLAMA,
        {"rope_scaling": LLAMA3, "rope_theta": ABSENT, "rope_parameters": PLAIN | {"rope_theta": 500.0}},
    ),
    "the base beside": (LLAMA, {"rope_scaling": LLAMA3, "rope_theta": 500.0, "rope_parameters": ABSENT}),
    "the base within": (LLAMA, {"rope_scaling": LLAMA3 | {"rope_theta": 500.0}, "rope_theta": 700.0}),
    "an older word": (LLAMA, {"rope_scaling": LLAMA3 | {"rope_type": ABSENT, "type": "llama3"}}),
    "the first context beside": (LLAMA, {"rope_scaling": LLAMA3, "original_max_position_embeddings": 32}),
    "mixtral's default base": (MIXTRAL, {"rope_scaling": ABSENT, "rope_parameters": ABSENT, "rope_theta": ABSENT}),
    "linear": (LLAMA, {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "yarn": (LLAMA, {"rope_scaling": YARN}),
    "yarn of other turns": (LLAMA, {"rope_parameters": YARN | {"beta_fast": 8.0, "beta_slow": 2.0}, "rope_scaling": None}),
    "yarn beside parameters": (DEEPSEEK, {"rope_scaling": YARN, "rope_parameters": PLAIN}),
    "yarn with both scales": (DEEPSEEK, {"rope_scaling": YARN | {"mscale": 0.5, "mscale_all_dim": 2.0}}),
    "yarn with the usual scale": (DEEPSEEK, {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.0}}),
}
REFUSED: dict[str, tuple[Model, dict[str, Any], str]] = {
    "scaling that parameters do not have": (
        LLAMA,
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "rope_parameters": PLAIN},
        "rope_type = 'dynamic'",
    ),
    "another temperature": (LLAMA, {"rope_scaling": YARN | {"attention_factor": 1.5}}, "rope attention_factor = 1.5"),
    "yarn without its context": (
        LLAMA,
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
        "without original_max_position_emb",
    ),
    "in part": (MIXTRAL, {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    "by kind of layer": (
        LLAMA,
        {"rope_parameters": {"full_attention": PLAIN, "sliding_attention": PLAIN}},
        "full_attention and sliding_attention",
    ),
    "one scale": (
        DEEPSEEK,
        {"rope_scaling": YARN | {"mscale_all_dim": 2.0}},
        r"mscale = \(not given\) with mscale_all_dim = 2.0",
    ),
    "the other": (DEEPSEEK, {"rope_scaling": YARN | {"mscale": 0.5}}, r"mscale = 0.5 with mscale_all_dim = \(not given\)"),
    "no table": (LLAMA, {"rope_scaling": "llama3"}, 'rope_scaling = "llama3": an object or null is needed'),
    "an odd value": (LLAMA, {"rope_scaling": LLAMA3 | {"factor": "8"}}, 'config.json .*\n  factor = "8": a number is needed'),
    "an odd base": (LLAMA, {"rope_parameters": PLAIN | {"rope_theta": 0}}, "rope_theta = 0: it must be more than 0"),
}


def weights_of(spec: Model) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes(spec).items()}


def written(spec: Model, folder: Path, changes: dict[str, Any]) -> Path:
    """An export with some settings changed afterwards."""
    export(spec, weights_of(spec), folder, dtype=torch.float32)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(_given(config)))
    return folder


def _given(value: Any) -> Any:
    return {key: _given(inside) for key, inside in value.items() if inside != ABSENT} if isinstance(value, dict) else value


def rope_of(spec: Model) -> tuple[Any, Any]:
    return getattr(spec, "rope_theta", None), getattr(spec, "rope_scaling", None)


@pytest.mark.parametrize(("spec", "changes"), READ.values(), ids=READ)
def test_rotary_settings_are_read_as_transformers_reads_them(spec: Model, changes: dict[str, Any], tmp_path: Path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (a dependency of the tests only)")
    folder = written(spec, tmp_path / "out", changes)
    read, weights = read_config(folder), read_weights(folder)
    stage = Stage(read.build())
    with torch.no_grad():
        for name, tensor in (dict(stage.named_buffers()) | stage.parameters_by_name()).items():
            if name in weights:
                tensor.copy_(weights[name])
        tokens = torch.randint(spec.vocab, (2, 48), generator=torch.Generator().manual_seed(1))
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
        expected = theirs(tokens).logits
        torch.testing.assert_close(logits(stage.eval(), tokens), expected, atol=1e-4, rtol=1e-4)
    assert rope_of(read) != rope_of(spec), "the change shows nothing"


@pytest.mark.parametrize(("spec", "changes", "reason"), REFUSED.values(), ids=REFUSED)
def test_rotary_settings_that_mean_something_else_are_refused(spec: Model, changes: dict[str, Any], reason: str, tmp_path: Path):
    with pytest.raises(ForeignModelError, match=reason):
        read_config(written(spec, tmp_path / "out", changes))
