"""Every family computes the same in transformers and after an import from it."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megalith.checkpoint.foreign.table import BY_FAMILY, BY_MODEL_TYPE, FOREIGN
from megalith.checkpoint.huggingface import ForeignModelError, export, read_config, read_weights, shapes
from megalith.models.stage import Stage
from megalith.spec.families import Model
from megalith.spec.families.gpt import Gpt
from megalith.spec.families.palm import Palm
from tests.models.families import EXPORTED, SIZES
from tests.models.plain import logits
from tests.models.routed import ROUTED
from tests.models.twin import config_of

SPECS: dict[str, Model] = EXPORTED | ROUTED
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())


def weights_of(spec: Model) -> dict[str, Tensor]:
    """Weights without neutral values, so that errors in biases and norms are as visible as in matrices."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes(spec).items()}


def stage_of(spec: Model, weights: dict[str, Tensor]) -> Stage:
    stage = Stage(spec.build())
    with torch.no_grad():
        for name, tensor in (dict(stage.named_buffers()) | stage.parameters_by_name()).items():
            if name in weights:
                tensor.copy_(weights[name])
    return stage


def test_every_family_in_the_table_is_tested():
    elsewhere = {"deepseek"}  # test_deepseek.py
    assert {spec.family for spec in SPECS.values()} | elsewhere == set(BY_FAMILY)
    assert len(BY_MODEL_TYPE) == len(FOREIGN)  # one family may have several of transformers' types, never the reverse


@every_spec
def test_a_model_exported_and_read_back_is_the_same_bit_for_bit(spec: Model, tmp_path: Path):
    weights = weights_of(spec)
    export(spec, weights, tmp_path / "out", dtype=torch.float32)
    read = read_config(tmp_path / "out")
    assert read == spec.model_copy(update={"name": "out"})
    back = read_weights(tmp_path / "out")
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], weights[name]) for name in weights)


@every_spec
def test_transformers_computes_the_same_logits(spec: Model, tmp_path: Path):
    config_of(spec)  # skips where there is no such class
    import transformers  # slow to import

    weights = weights_of(spec)
    export(spec, weights, tmp_path / "out", dtype=torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    tokens = torch.randint(spec.vocab, (2, 48), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(tokens).logits
        found = logits(stage_of(spec, weights).eval(), tokens)
    assert float(expected.std()) > 0.1, "too flat to show a difference"
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@every_spec
def test_a_model_that_transformers_wrote_is_read_unchanged(spec: Model, tmp_path: Path):
    config_of(spec)  # skips where there is no such class
    import transformers  # slow to import

    weights = weights_of(spec)
    export(spec, weights, tmp_path / "ours", dtype=torch.float32)
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    assert read_config(tmp_path / "theirs") == spec.model_copy(update={"name": "theirs"})
    back = read_weights(tmp_path / "theirs")
    assert all(torch.equal(back[name], weights[name]) for name in weights)


def test_files_of_the_model_without_its_head_are_read_too(tmp_path: Path):
    """The released GPT-2 has no "transformer." in its tensor names, and stores causal masks as tensors."""
    from safetensors.torch import load_file, save_file

    spec, weights = SPECS["gpt"], weights_of(SPECS["gpt"])
    export(spec, weights, tmp_path / "out", dtype=torch.float32)
    file = tmp_path / "out" / "model.safetensors"
    bare = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    save_file(bare | {"h.0.attn.bias": torch.ones(1, 1, 64, 64).tril()}, file)
    back = read_weights(tmp_path / "out")
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], weights[name]) for name in weights)


@pytest.mark.parametrize(
    ("name", "setting", "value", "told"),
    [
        ("gpt", "activation_function", "relu", "activation_function = 'relu'"),
        ("gpt", "scale_attn_by_inverse_layer_idx", True, "scale_attn_by_inverse_layer_idx = True"),
        ("gemma2", "layer_types", ["full_attention"] * 3, "layer_types"),
        ("gemma2", "hidden_activation", "gelu", "hidden_activation = 'gelu'"),
        ("qwen3", "use_sliding_window", True, "use_sliding_window = True"),
        ("qwen3", "rope_parameters", {"rope_type": "yarn", "factor": 4.0}, "rope_type = 'yarn'"),
        ("qwen3", "model_type", "opt", "model_type = 'opt'"),
    ],
)
def test_what_a_family_cannot_represent_is_named(tmp_path: Path, name: str, setting: str, value: object, told: str):
    export(SPECS[name], weights_of(SPECS[name]), tmp_path / "out")
    file = tmp_path / "out" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {setting: value}))
    with pytest.raises(ForeignModelError) as error:
        read_config(tmp_path / "out")
    assert told in str(error.value)


def test_weights_that_are_not_there_are_named_as_the_files_name_them(tmp_path: Path):
    export(SPECS["gpt"], weights_of(SPECS["gpt"]), tmp_path / "out")
    (tmp_path / "more").mkdir()
    for file in (tmp_path / "out").iterdir():
        (tmp_path / "more" / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    (tmp_path / "more" / "config.json").write_text(json.dumps(config | {"n_layer": 4}))
    with pytest.raises(ForeignModelError, match=r"transformer\.h\.3\.attn\.c_attn\.weight is missing"):
        read_weights(tmp_path / "more")


def test_a_family_that_transformers_has_not_is_refused(tmp_path: Path):
    palm = Palm(**SIZES)
    with pytest.raises(ValueError, match=r"no class for the family 'palm'; transformers has classes for .*gpt"):
        export(palm, weights_of(palm), tmp_path / "out")


def test_heads_that_transformers_would_refuse_are_refused_here(tmp_path: Path):
    wide = Gpt(**SIZES, head_dim=16)
    with pytest.raises(ValueError, match="heads x head_dim to equal dim, but they are 64 and 32"):
        export(wide, weights_of(wide), tmp_path / "out")
