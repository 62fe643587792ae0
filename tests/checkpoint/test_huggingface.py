"""Weights and configurations are unchanged by an export to transformers and an import from there."""

import json
import os
import re
import shlex
from pathlib import Path

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megalith.checkpoint.huggingface import (
    ForeignModelError,
    configuration,
    export,
    import_,
    read_config,
    read_weights,
    shapes,
    to_theirs,
)
from megalith.checkpoint.read import read_full
from megalith.data.tokenizer import Tokenizer, load
from megalith.models.batch import Batch
from megalith.models.stage import Stage
from megalith.spec.families.llama import Llama
from megalith.spec.model import RopeScaling
from megalith.spec.presets import presets
from tests.commands.calling import call

STRETCH = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=32)
SMALL = Llama(layers=2, dim=32, heads=4, kv_heads=2, ffn=48, vocab=96, context=64)
SPECS = {
    "plain": SMALL,
    "multi-head": SMALL.model_copy(update={"kv_heads": None}),
    "tied": SMALL.model_copy(update={"tied": True, "norm_eps": 1e-6}),
    "stretched": SMALL.model_copy(update={"rope_theta": 500_000.0, "rope_scaling": STRETCH, "context": 256}),
    "wide heads": SMALL.model_copy(update={"head_dim": 16}),
}
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())


def weights_of(spec: Llama) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes(spec).items()}


def stage_of(spec: Llama, weights: dict[str, Tensor]) -> Stage:
    stage = Stage(spec.build())
    with torch.no_grad():
        for name, parameter in stage.parameters_by_name().items():
            parameter.copy_(weights[name])
    return stage


def same(spec: Llama) -> Llama:
    """Return the spec with the values that transformers always writes."""
    return spec.model_copy(update={"kv_heads": spec.kv_heads or spec.heads, "head_dim": spec.head_dim or spec.dim // spec.heads})


@pytest.fixture
def transformers():
    return pytest.importorskip("transformers", reason="transformers is not installed (it is a dependency of the tests only)")


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=90,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=list("abcdefghijklmnopqrstuvwxyz Ġ"),
        show_progress=False,
    )
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.train_from_iterator(["the quick brown fox jumps over the lazy dog"] * 4, trainer)
    made.save(str(tmp_path / "made.json"))
    return load(tmp_path / "made.json")


@every_spec
def test_transformers_has_the_same_names_and_shapes(spec, transformers):
    config = transformers.LlamaConfig(
        vocab_size=spec.vocab,
        hidden_size=spec.dim,
        intermediate_size=spec.ffn,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads or spec.heads,
        head_dim=spec.head_dim or spec.dim // spec.heads,
        tie_word_embeddings=spec.tied,
    )
    with torch.device("meta"):
        theirs = {name: tuple(p.shape) for name, p in transformers.LlamaForCausalLM(config).named_parameters()}
    assert theirs == {name: tuple(tensor.shape) for name, tensor in to_theirs(spec, weights_of(spec)).items()}


@every_spec
def test_a_model_exported_and_read_back_is_the_same_bit_for_bit(spec, tmp_path):
    weights = weights_of(spec)
    export(spec, weights, tmp_path / "out", dtype=torch.float32)
    assert read_config(tmp_path / "out") == same(spec).model_copy(update={"name": "out"})
    back = read_weights(tmp_path / "out")
    assert set(back) == set(weights)
    assert all(torch.equal(back[name], weights[name]) for name in weights)


@every_spec
def test_transformers_computes_the_same_logits_and_the_same_greedy_text(spec, tmp_path, transformers):
    weights = weights_of(spec)
    export(spec, weights, tmp_path / "out", dtype=torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ours = stage_of(spec, weights).eval()
    tokens = torch.randint(spec.vocab, (2, 48), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(tokens).logits
        torch.testing.assert_close(ours(tokens, Batch(tokens)), expected, atol=1e-4, rtol=1e-4)
        written = theirs.generate(tokens[:1, :4], max_new_tokens=8, do_sample=False, pad_token_id=0)
        line = tokens[:1, :4]
        for _ in range(8):
            line = torch.cat([line, ours(line, Batch(line))[:, -1].argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(line, written)


@every_spec
def test_a_model_that_transformers_wrote_is_read_unchanged(spec, tmp_path, transformers):
    weights = weights_of(spec)
    export(spec, weights, tmp_path / "ours", dtype=torch.float32)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    assert read_config(tmp_path / "theirs") == same(spec).model_copy(update={"name": "theirs"})
    back = read_weights(tmp_path / "theirs")
    assert all(torch.equal(back[name], weights[name]) for name in weights)


def test_the_tokenizer_goes_along_with_its_special_tokens(tmp_path, tokenizer, transformers):
    written = export(SMALL, weights_of(SMALL), tmp_path / "out", tokenizer=tokenizer)
    assert set(written) == set((tmp_path / "out").iterdir())
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "the quick brown fox"
    assert theirs.decode(theirs(text)["input_ids"]) == text
    assert theirs.eos_token == "<|endoftext|>"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == theirs.eos_token_id == 0
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == 0


def test_large_models_are_split_into_files_that_transformers_and_we_read(tmp_path, transformers):
    weights = weights_of(SMALL)
    export(SMALL, weights, tmp_path / "out", dtype=torch.float32, file_bytes=20_000)
    files = sorted((tmp_path / "out").glob("model-*.safetensors"))
    assert len(files) > 2
    assert max(file.stat().st_size for file in files) < 20_000 + 2_000  # and a header
    assert all(torch.equal(tensor, weights[name]) for name, tensor in read_weights(tmp_path / "out").items())
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(model.lm_head.weight, weights["head.output.weight"])


def test_export_is_in_the_dtype_asked_for(tmp_path):
    weights = weights_of(SMALL)
    export(SMALL, weights, tmp_path / "out")
    assert all(torch.equal(tensor, weights[name].bfloat16()) for name, tensor in read_weights(tmp_path / "out").items())


def test_all_weights_that_do_not_fit_are_named_at_once(tmp_path):
    weights = weights_of(SMALL)
    del weights["head.norm.weight"]
    weights["blocks.9.mlp.up.weight"] = torch.zeros(3)
    weights["embedding.weight"] = torch.zeros(5, 32)
    with pytest.raises(ValueError, match="cannot export") as error:
        export(SMALL, weights, tmp_path / "out")
    assert "head.norm.weight is missing" in str(error.value)
    assert "blocks.9.mlp.up.weight is not a weight of this model" in str(error.value)
    assert "embedding.weight has shape (5, 32) instead of (96, 32)" in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_folder_with_files_is_not_written_over(tmp_path):
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="already holds files"):
        export(SMALL, weights_of(SMALL), tmp_path)


def test_every_setting_we_cannot_represent_is_named_at_once(tmp_path):
    export(SMALL, weights_of(SMALL), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    wrong = {"hidden_act": "gelu", "rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}
    (tmp_path / "out" / "config.json").write_text(json.dumps(config | wrong | {"architectures": ["MixtralForCausalLM"]}))
    with pytest.raises(ForeignModelError) as error:
        read_config(tmp_path / "out")
    for text in ("hidden_act = 'gelu'", "rope_type = 'dynamic'", "MixtralForCausalLM"):
        assert text in str(error.value)


def test_every_odd_value_is_told_by_the_key_and_the_file_it_stands_in(tmp_path):
    config = configuration(SMALL) | {"hidden_size": "32", "num_hidden_layers": -2, "tie_word_embeddings": None, "rms_norm_eps": 0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ForeignModelError) as error:
        read_config(tmp_path)
    told = str(error.value)
    assert str(tmp_path / "config.json") in told
    for text in (
        'hidden_size = "32": a whole number is needed',
        "num_hidden_layers = -2: it must be more than 0",
        "tie_word_embeddings = null: true or false is needed",
        "rms_norm_eps = 0: it must be more than 0",
    ):
        assert text in told
    assert "norm_eps = 0" not in told.replace("rms_norm_eps", "") and "dim = " not in told  # our own names


def test_sizes_that_contradict_each_other_are_told_by_their_keys(tmp_path):
    config = configuration(presets()["deepseek-v3"].build()) | {"n_group": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ForeignModelError, match=r"config\.json .*\n  n_group = 3 does not divide n_routed_experts = 256"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"[1, 2]", "holds a list where a JSON object is needed"),
        (b'{"model_type": "llama"', "cannot be read as JSON"),
        (b'{"name": "\xff"}', "cannot be read as JSON"),
        (b"[" * 100_000, "cannot be read as JSON"),
        (b'{"model_type": ["llama"]}', r"model_type = \['llama'\]"),
        (b'{"model_type": "mixtral", "num_experts_per_tok": "2"}', 'num_experts_per_tok = "2": a whole number is needed'),
    ],
    ids=["a list", "cut short", "not UTF-8", "deep", "a list of kinds", "an odd count"],
)
def test_a_config_that_cannot_be_read_is_named(content, told, tmp_path):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ForeignModelError, match=told) as error:
        read_config(tmp_path)
    assert str(tmp_path / "config.json") in str(error.value)


def test_sizes_that_make_no_model_are_told_with_their_file(tmp_path):
    export(SMALL, weights_of(SMALL), tmp_path / "out")
    config = configuration(SMALL) | {"num_attention_heads": 64, "head_dim": None}
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ForeignModelError, match=r"config\.json: .*head_dim = 0"):
        read_weights(tmp_path / "out")


def test_older_configurations_are_read_too(tmp_path):
    spec = SPECS["stretched"]
    export(spec, weights_of(spec), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    del config["rope_parameters"], config["head_dim"]
    config["rope_scaling"]["type"] = config["rope_scaling"].pop("rope_type")
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    assert read_config(tmp_path / "out") == spec.model_copy(update={"name": "out"})


def test_pickled_weights_are_refused_with_the_way_out(tmp_path):
    export(SMALL, weights_of(SMALL), tmp_path / "out")
    (tmp_path / "out" / "model.safetensors").unlink()
    torch.save({}, tmp_path / "out" / "pytorch_model.bin")
    with pytest.raises(ForeignModelError, match=r"pickled weights \(pytorch_model.bin\).*save_pretrained"):
        read_weights(tmp_path / "out")


def rewritten(folder: Path, **changes: Tensor) -> Path:
    """An export of the tied model with some tensors of its file changed afterwards."""
    spec = SPECS["tied"]
    export(spec, weights_of(spec), folder, dtype=torch.float32)
    file = folder / "model.safetensors"
    save_file(load_file(file) | changes, file, metadata={"format": "pt"})
    return folder


def test_a_tied_model_with_another_output_in_its_file_is_refused_and_untied_it_is_what_transformers_has(tmp_path, transformers):
    spec = SPECS["tied"]
    other = torch.randn(spec.vocab, spec.dim, generator=torch.Generator().manual_seed(5))
    folder = rewritten(tmp_path / "out", **{"lm_head.weight": other})
    with pytest.raises(ForeignModelError, match=r"lm_head.weight is not the same as model.embed_tokens.weight") as error:
        read_weights(folder)
    assert '"tie_word_embeddings": false' in str(error.value)
    tokens = torch.randint(spec.vocab, (2, 48), generator=torch.Generator().manual_seed(1))
    apart = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    untied = spec.model_copy(update={"tied": False})
    assert read_config(folder) == same(untied).model_copy(update={"name": "out"})
    ours = stage_of(untied, read_weights(folder)).eval()
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens, Batch(tokens)), apart(tokens).logits, atol=1e-4, rtol=1e-4)


def test_a_tied_model_may_have_its_one_matrix_twice_or_under_the_name_of_the_output(tmp_path):
    expected = weights_of(SPECS["tied"])
    folder = rewritten(tmp_path / "out", **{"lm_head.weight": expected["embedding.weight"].clone()})
    assert all(torch.equal(tensor, expected[name]) for name, tensor in read_weights(folder).items())
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.embed_tokens.weight"]
    save_file(tensors, folder / "model.safetensors")
    back = read_weights(folder)
    assert back.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in back.items())


@pytest.mark.parametrize("kept", [0, 7, 300, -1])
def test_a_file_that_was_cut_short_is_named(kept, tmp_path):
    export(SMALL, weights_of(SMALL), tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ForeignModelError, match=r"model\.safetensors \([\d,]+ bytes\) cannot be read .* again") as error:
        read_weights(tmp_path / "out")
    assert str(file) in str(error.value)


def test_a_folder_whose_name_is_not_utf_8_is_named(tmp_path):
    folder = tmp_path / os.fsdecode(b"out\xff")
    export(SMALL, weights_of(SMALL), folder)
    assert read_config(folder).name == "out\ufffd"
    with pytest.raises(ForeignModelError, match=r"model\.safetensors .* not valid UTF-8") as error:
        read_weights(folder)
    assert str(folder) in str(error.value)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("[]", "holds a list where a JSON object is needed"),
        ("{}", "has no weight_map"),
        ('{"weight_map": {"a": 1}}', "has no weight_map"),
        ('{"weight_map": {"a": "b.safetensors"}}', "names files that its folder lacks: b.safetensors"),
    ],
)
def test_an_index_that_cannot_be_used_is_named(content, told, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(configuration(SMALL)))
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ForeignModelError, match=told) as error:
        read_weights(tmp_path)
    assert "model.safetensors.index.json" in str(error.value)


def test_a_tensor_that_two_files_hold_is_named_with_both(tmp_path):
    export(SMALL, weights_of(SMALL), tmp_path / "out", dtype=torch.float32, file_bytes=20_000)
    first, second = sorted((tmp_path / "out").glob("model-*.safetensors"))[:2]
    name, tensor = next(iter(load_file(first).items()))
    save_file(load_file(second) | {name: tensor + 1}, second)
    with pytest.raises(ForeignModelError, match=f"{second.name} holds tensors .* {name} is also in .*{first.name}"):
        read_weights(tmp_path / "out")


def test_one_file_counts_before_an_index_as_in_transformers(tmp_path, transformers):
    weights = weights_of(SMALL)
    export(SMALL, weights, tmp_path / "out", dtype=torch.float32, file_bytes=20_000)
    export(SMALL, {name: tensor + 1 for name, tensor in weights.items()}, tmp_path / "other", dtype=torch.float32)
    (tmp_path / "other" / "model.safetensors").rename(tmp_path / "out" / "model.safetensors")
    assert torch.equal(read_weights(tmp_path / "out")["embedding.weight"], weights["embedding.weight"] + 1)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(theirs.model.embed_tokens.weight, weights["embedding.weight"] + 1)


def test_an_import_is_a_checkpoint_of_step_0(tmp_path, tokenizer):
    weights = weights_of(SMALL)
    export(SMALL, weights, tmp_path / "theirs", tokenizer=tokenizer, dtype=torch.bfloat16)
    made = import_(tmp_path / "theirs", tmp_path / "run")
    path = made.path
    assert (made.spec, made.left_out) == (read_config(tmp_path / "theirs"), "")
    assert path == tmp_path / "run" / "checkpoints" / "step-00000000"
    whole = read_full(tmp_path / "run")
    assert set(whole) == {f"weights.{name}" for name in weights}
    assert all(torch.equal(whole[f"weights.{name}"], weights[name].bfloat16()) for name in weights)
    meta = json.loads((path / "manifest.json").read_text())["meta"]
    assert Llama.model_validate(meta["spec"]["model"]) == same(SMALL).model_copy(update={"name": "theirs"})
    assert load(tmp_path / "run").fingerprint == tokenizer.fingerprint
    with pytest.raises(FileExistsError, match="already has checkpoints"):
        import_(tmp_path / "theirs", tmp_path / "run")


@pytest.mark.parametrize("there", [True, False])
def test_an_import_names_the_next_command_with_a_tokenizer_that_exists(tmp_path, tokenizer, there):
    source, out = tmp_path / "theirs", tmp_path / "a model"
    export(SMALL, weights_of(SMALL), source, tokenizer=tokenizer if there else None)
    said = " ".join(call("import", str(source), "--out", str(out)).stdout.split())
    (line,) = re.findall(r"next: (megalith data prepare .*), then (megalith check .*start\.toml'?)", said)
    words, check = map(shlex.split, line)
    assert words[3:] == ["TEXT", "--tokenizer", str(out) if there else "TOKENIZER", "--out", "data/tokens"]
    assert check == ["megalith", "check", str(out / "start.toml")]
    assert (f"{source} has no tokenizer.json" in said) is not there


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    export(SMALL, weights_of(SMALL), tmp_path / "theirs")
    (tmp_path / "note.txt").write_text("mine")
    out = tmp_path / "note.txt" / "out"
    with pytest.raises(OSError, match="cannot be made") as exported:
        export(SMALL, weights_of(SMALL), out)
    with pytest.raises(OSError, match="cannot be made") as imported:
        import_(tmp_path / "theirs", out)
    assert str(out) in str(exported.value) and str(out) in str(imported.value)
