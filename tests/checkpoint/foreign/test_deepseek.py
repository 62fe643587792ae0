"""DeepSeek models are unchanged by an export in transformers' format and an import of it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megalith.checkpoint.foreign.family import ForeignModelError
from megalith.checkpoint.huggingface import configuration, export, import_, read_config, read_weights, shapes, to_theirs
from megalith.checkpoint.read import read_full
from megalith.models.batch import Batch
from megalith.models.stage import Stage
from megalith.spec.families.deepseek import DeepSeek
from megalith.spec.model import YarnScaling
from megalith.spec.presets import presets
from tests.models.deepseek import V2, YARN, deepseek
from tests.models.plain import tokens_of

SPECS = {
    "v2": deepseek(**V2, q_rank=12, groups=4, active_groups=2, routed_scale=16.0, rope_scaling=YARN),
    "v2 lite": deepseek(**V2),
    "v3": deepseek(q_rank=12, groups=4, active_groups=2, bias_rate=0.001, ahead=1, routed_scale=2.5),
    "v3 further": deepseek(q_rank=12, bias_rate=0.001, ahead=2, tied=True),
    "kimi": deepseek(q_rank=12, bias_rate=0.001, rope_scaling=YARN, rope_theta=50_000.0),
}
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def weights_of(spec: DeepSeek) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator) * 0.15 + (len(shape) == 1) * (not name.endswith("router.bias"))
        for name, shape in shapes(spec).items()
    }


def stage_of(spec: DeepSeek, weights: dict[str, Tensor]) -> Stage:
    stage = Stage(spec.build())
    own = stage.parameters_by_name() | dict(stage.named_buffers())
    with torch.no_grad():
        for name, weight in weights.items():
            own[name].copy_(weight)
    return stage


def written(spec: DeepSeek, folder: Path, **changes: Any) -> Path:
    """An export with some settings changed afterwards."""
    export(spec, weights_of(spec), folder, dtype=torch.float32)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


@every_spec
def test_what_was_exported_is_imported_the_same(spec, tmp_path):
    folder = written(spec, tmp_path / spec.name)
    assert read_config(folder) == spec
    found, expected = read_weights(folder), weights_of(spec)
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


@every_spec
def test_transformers_computes_the_same_from_what_was_exported(spec, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (a dependency of the tests only)")
    folder, tokens = written(spec, tmp_path / "out"), tokens_of(spec, seq=48)
    theirs, loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not loaded["missing_keys"] and not loaded["mismatched_keys"]
    assert all(int(name.split(".")[2]) >= spec.layers for name in loaded["unexpected_keys"])  # of multi-token prediction alone
    ours = stage_of(spec, weights_of(spec))
    with torch.no_grad():
        expected, found = theirs.eval()(tokens).logits, ours(tokens, Batch(tokens))
    assert expected.std() > 0.1
    assert (found - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("name", ["v2", "v3"])
def test_what_transformers_saves_is_imported(name, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (a dependency of the tests only)")
    spec = SPECS[name].model_copy(update={"ahead": 0})  # transformers leaves those out
    theirs = transformers.AutoModelForCausalLM.from_pretrained(written(spec, tmp_path / "first"))
    theirs.save_pretrained(tmp_path / "second")
    folder = tmp_path / "second"
    assert read_config(folder).model_copy(update={"name": spec.name}) == spec
    expected = weights_of(spec)
    assert all(torch.equal(weight, expected[name]) for name, weight in read_weights(folder).items())


def test_modules_that_are_counted_and_have_no_weights_are_left_out_and_named(tmp_path):
    """transformers writes the number of multi-token prediction modules, but not their weights."""
    spec = SPECS["v3"]
    folder = written(spec, tmp_path / "out")
    file = folder / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if f".layers.{spec.layers}." not in name}, file)
    with pytest.raises(ForeignModelError, match=rf"model.layers.{spec.layers}.enorm.weight is missing"):
        read_weights(folder)
    made = import_(folder, tmp_path / "made")
    assert made.spec == read_config(folder).model_copy(update={"ahead": 0})
    assert "multi-token prediction" in made.left_out
    assert set(read_full(tmp_path / "made")) >= {f"weights.{name}" for name in weights_of(made.spec)}


@pytest.mark.parametrize(
    ("copy", "first"),
    [
        ("model.layers.3.embed_tokens.weight", "model.embed_tokens.weight"),
        ("model.layers.3.shared_head.head.weight", "lm_head.weight"),
    ],
)
def test_a_copy_that_is_none_is_not_dropped(copy, first, tmp_path):
    file = written(SPECS["v3"], tmp_path / "out") / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {copy: tensors[copy] + 1}, file)
    with pytest.raises(ForeignModelError, match=f"{copy} differs from {first}"):
        read_weights(tmp_path / "out")


def test_the_bias_of_the_choice_of_experts_keeps_its_fp32_where_all_else_is_bf16(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (a dependency of the tests only)")
    spec, name = SPECS["v3"], "mlp.gate.e_score_correction_bias"
    weights = weights_of(spec)
    export(spec, weights, tmp_path / "out", dtype=torch.bfloat16)
    bias = weights["blocks.1.mlp.router.bias"]
    assert not torch.equal(bias, bias.bfloat16().float()), "bf16 would do"
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert {key for key, tensor in written.items() if tensor.dtype != torch.bfloat16} == {
        key for key in written if key.endswith(name)
    }
    assert torch.equal(read_weights(tmp_path / "out")["blocks.1.mlp.router.bias"], bias)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()[f"model.layers.1.{name}"]
    assert theirs.dtype == torch.float32 and torch.equal(theirs, bias)


def test_mtp_modules_are_written_as_deepseek_released_them():
    spec = SPECS["v3"]
    weights = weights_of(spec)
    found = {name.removeprefix("model.layers.3."): w for name, w in to_theirs(spec, weights).items() if ".layers.3." in name}
    assert torch.equal(found["embed_tokens.weight"], weights["embedding.weight"])
    assert torch.equal(found["shared_head.head.weight"], weights["head.output.weight"])
    own = {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"}
    assert own | {"self_attn.q_b_proj.weight", "mlp.gate.e_score_correction_bias", "mlp.experts.7.down_proj.weight"} <= set(found)


@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v2-lite", "deepseek-v3", "kimi-k2"])
def test_released_models_have_configurations_that_read_back_the_same(name, tmp_path):
    spec = presets()[name].build()
    (tmp_path / "config.json").write_text(json.dumps(configuration(spec)))
    assert read_config(tmp_path).model_copy(update={"name": name, "ahead_weight": spec.ahead_weight}) == spec


def test_a_configuration_of_kimi_k2_s_own_name_is_read(tmp_path):
    folder = written(SPECS["kimi"], tmp_path / "deepseek", model_type="kimi_k2")
    assert read_config(folder) == SPECS["kimi"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rope_interleave": False}, "rope_interleave = False"),
        ({"topk_method": "greedy"}, "topk_method = 'greedy'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_type = 'linear'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "without original_max_position_embeddings"),
    ],
    ids=str,
)
def test_what_cannot_be_represented_is_named(changes, reason, tmp_path):
    with pytest.raises(ForeignModelError, match=reason):
        read_config(written(SPECS["v3"], tmp_path / "out", **changes))


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (SPECS["v2"].model_copy(update={"normalise": True}), "normalise = True with scores = 'softmax'"),
        (SPECS["v2"].model_copy(update={"ahead": 1}), "ahead = 1"),
        (SPECS["v3"].model_copy(update={"group_score": "max"}), "group_score = 'max' with scores = 'sigmoid'"),
        (
            SPECS["v3"].model_copy(update={"rope_scaling": YarnScaling(factor=4.0, original_context=16, mscale=0.5)}),
            "mscale = 0.5",
        ),
    ],
    ids=["normalised", "ahead", "groups", "mscale"],
)
def test_what_transformers_would_compute_otherwise_is_not_exported(spec, reason, tmp_path):
    with pytest.raises(ValueError, match=reason):
        export(spec, weights_of(spec), tmp_path / "out")


def test_a_model_without_a_bias_is_written_with_one_of_zeros():
    spec = deepseek()
    found = to_theirs(spec, weights_of(spec))
    assert not found["model.layers.1.mlp.gate.e_score_correction_bias"].any()
