"""Hugging Face transformers' folders: our weights under their names, their configuration as our spec, both ways.

Rotary positions pair channel i with i + head_dim / 2 in both, so weights map one to one, without a permutation. Only safetensors
files are read and written: a pickled `.bin` could execute code.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import safe_open
from torch import Tensor

from megalith.checkpoint import folder as files
from megalith.checkpoint import tensors as safetensors
from megalith.checkpoint.checkpointer import Checkpointer, Failed
from megalith.models.stage import Stage
from megalith.spec.llama import Llama
from megalith.spec.model import RopeScaling

RENAMES = {
    "llama": {
        "embedding.weight": "model.embed_tokens.weight",
        "blocks.{i}.attention_norm.weight": "model.layers.{i}.input_layernorm.weight",
        "blocks.{i}.attention.q.weight": "model.layers.{i}.self_attn.q_proj.weight",
        "blocks.{i}.attention.k.weight": "model.layers.{i}.self_attn.k_proj.weight",
        "blocks.{i}.attention.v.weight": "model.layers.{i}.self_attn.v_proj.weight",
        "blocks.{i}.attention.out.weight": "model.layers.{i}.self_attn.o_proj.weight",
        "blocks.{i}.mlp_norm.weight": "model.layers.{i}.post_attention_layernorm.weight",
        "blocks.{i}.mlp.gate.weight": "model.layers.{i}.mlp.gate_proj.weight",
        "blocks.{i}.mlp.up.weight": "model.layers.{i}.mlp.up_proj.weight",
        "blocks.{i}.mlp.down.weight": "model.layers.{i}.mlp.down_proj.weight",
        "head.norm.weight": "model.norm.weight",
        "head.output.weight": "lm_head.weight",
    }
}
TIED = "head.output.weight"  # not a tensor of its own when the model is tied
COMPUTED = "rotary_emb.inv_freq"  # old files store the rotary frequencies, which follow from the configuration

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
TOKENIZER = "tokenizer.json"
BEGINS = ("<|begin_of_text|>", "<s>", "<bos>", "[BOS]")
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]")

Json = dict[str, Any]


class ForeignModelError(ValueError):
    """A folder holds a model that cannot be represented here, or not whole; the text lists every reason."""


def renames(spec: Llama) -> dict[str, str]:
    """Our name of every parameter of `spec` -> its name in Hugging Face's files."""
    table = RENAMES[spec.family]
    names: dict[str, str] = {}
    for ours, theirs in table.items():
        if spec.tied and ours == TIED:
            continue
        for i in range(spec.layers) if "{i}" in ours else [0]:
            names[ours.replace("{i}", str(i))] = theirs.replace("{i}", str(i))
    return names


def shapes(spec: Llama) -> dict[str, tuple[int, ...]]:
    """Our name of every parameter of `spec` -> its shape, from the modules themselves (built without memory)."""
    with torch.device("meta"):
        stage = Stage(spec.build())
    return {name: tuple(parameter.shape) for name, parameter in stage.parameters_by_name().items()}


# --- export ------------------------------------------------------------------------------------------------------------------


def export(
    spec: Llama,
    weights: Mapping[str, Tensor],
    out: Path,
    *,
    tokenizer: Path | None = None,
    dtype: torch.dtype = torch.bfloat16,
    file_bytes: int = 5_000_000_000,
) -> list[Path]:
    """Write a folder that transformers (4.46 and later) loads; the files written.

    `weights` maps our parameter names to whole tensors; `tokenizer` is a tokenizer.json. Weights beyond `file_bytes` go to
    several files. Raises ValueError naming all weights that are missing, left over or of another shape, FileExistsError if
    `out` has files.
    """
    problems = _compare(shapes(spec), {name: tuple(tensor.shape) for name, tensor in weights.items()})
    if spec.dim % spec.heads:
        problems.append(f"transformers wants heads to divide dim, and {spec.heads} does not divide {spec.dim}")
    if problems:
        raise ValueError("cannot export:\n  " + "\n  ".join(problems))
    if out.exists() and any(out.iterdir()):
        raise FileExistsError(f"{out} already holds files. Give a new folder, or remove it first.")
    out.mkdir(parents=True, exist_ok=True)
    written = _write_weights({theirs: weights[ours] for ours, theirs in renames(spec).items()}, out, dtype, file_bytes)
    special = _special_tokens(tokenizer)
    ids = {f"{end}_token_id": number for end, (_, number) in special.items()}
    documents = {CONFIG: _config(spec, ids, dtype), "generation_config.json": {"_from_model_config": True} | ids}
    if tokenizer:
        documents["tokenizer_config.json"] = _tokenizer_config(spec, special)
        written.append(Path(shutil.copyfile(tokenizer, out / TOKENIZER)))
    for file, content in documents.items():
        (out / file).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        written.append(out / file)
    return written


def _write_weights(weights: Mapping[str, Tensor], out: Path, dtype: torch.dtype, file_bytes: int) -> list[Path]:
    """The weights in files of at most `file_bytes` (a larger tensor has one of its own), each converted when its turn comes."""
    groups: list[list[str]] = [[]]
    room = file_bytes
    for name, tensor in weights.items():
        size = tensor.numel() * dtype.itemsize
        if groups[-1] and size > room:
            groups.append([])
            room = file_bytes
        groups[-1].append(name)
        room -= size
    names = (
        [f"model-{n:05d}-of-{len(groups):05d}.safetensors" for n in range(1, len(groups) + 1)] if len(groups) > 1 else [WEIGHTS]
    )
    for file, group in zip(names, groups, strict=True):
        safetensors.write(out / file, {name: weights[name].detach().to(dtype) for name in group})
    written = [out / file for file in names]
    if len(groups) > 1:
        total = sum(tensor.numel() for tensor in weights.values()) * dtype.itemsize
        where = {name: file for file, group in zip(names, groups, strict=True) for name in group}
        (out / WEIGHTS_INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2) + "\n")
        written.append(out / WEIGHTS_INDEX)
    return written


def _config(spec: Llama, ids: Mapping[str, int], dtype: torch.dtype) -> Json:
    """config.json, with the rotary settings both as transformers 4 reads them and as transformers 5 does."""
    scaling = spec.rope_scaling
    stretched: Json | None = scaling and {
        "rope_type": scaling.kind,
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_context,
    }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": spec.vocab,
        "hidden_size": spec.dim,
        "intermediate_size": spec.ffn,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads or spec.heads,
        "head_dim": spec.head_dim or spec.dim // spec.heads,
        "hidden_act": "silu",
        "max_position_embeddings": spec.context,
        "initializer_range": spec.init_std,
        "rms_norm_eps": spec.norm_eps,
        "tie_word_embeddings": spec.tied,
        "rope_theta": spec.rope_theta,
        "rope_scaling": stretched,
        "rope_parameters": {"rope_theta": spec.rope_theta} | (stretched or {"rope_type": "default"}),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "use_cache": True,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": ids.get("bos_token_id"),
        "eos_token_id": ids.get("eos_token_id"),
    }


def _special_tokens(tokenizer: Path | None) -> dict[str, tuple[str, int]]:
    """The tokens that begin and end a text, and their ids, as far as the tokenizer has them."""
    if tokenizer is None:
        return {}
    added = json.loads(tokenizer.read_text(encoding="utf-8")).get("added_tokens", [])
    ids = {token["content"]: token["id"] for token in added}
    usual = {"bos": BEGINS, "eos": ENDS}
    return {end: (token, ids[token]) for end, names in usual.items() for token in names[::-1] if token in ids}


def _tokenizer_config(spec: Llama, special: Mapping[str, tuple[str, int]]) -> Json:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": spec.context,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    } | {f"{end}_token": token for end, (token, _) in special.items()}


# --- import ------------------------------------------------------------------------------------------------------------------


def read_config(folder: Path) -> Llama:
    """The spec of the model in `folder`. Raises ForeignModelError with every setting that cannot be represented here."""
    try:
        config: Json = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ForeignModelError(f"{folder} has no {CONFIG}: give a folder written by transformers' save_pretrained") from error
    except ValueError as error:
        raise ForeignModelError(f"{folder / CONFIG} cannot be read: {error}") from error
    scaling, problems = _rope_scaling(config)
    problems = _unrepresentable(config) + problems
    sizes = {
        "layers": "num_hidden_layers",
        "dim": "hidden_size",
        "heads": "num_attention_heads",
        "ffn": "intermediate_size",
        "vocab": "vocab_size",
    }
    problems += [f"{theirs} is not given" for theirs in sizes.values() if theirs not in config]
    if problems:
        raise ForeignModelError(f"{folder / CONFIG} is a model that cannot be represented here:\n  " + "\n  ".join(problems))
    rope = config.get("rope_parameters") or {}
    try:
        return Llama(
            name=folder.name or "llama",
            **{ours: config[theirs] for ours, theirs in sizes.items()},
            kv_heads=config.get("num_key_value_heads"),
            head_dim=config.get("head_dim"),
            context=config.get("max_position_embeddings", 2048),  # transformers' own defaults
            rope_theta=rope.get("rope_theta", config.get("rope_theta", 10_000.0)),
            rope_scaling=scaling,
            norm_eps=config.get("rms_norm_eps", 1e-6),
            tied=config.get("tie_word_embeddings", False),
            init_std=config.get("initializer_range", 0.02),
        )
    except ValidationError as error:
        raise ForeignModelError(f"{folder / CONFIG}: {error}") from error


REPRESENTABLE: dict[str, tuple[Any, ...]] = {  # setting -> its values that mean what our modules compute; None: not given
    "model_type": ("llama",),
    "architectures": (["LlamaForCausalLM"], None),
    "hidden_act": ("silu", "swish", None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "partial_rotary_factor": (1.0, None),
    "quantization_config": (None,),
}


def _unrepresentable(config: Json) -> list[str]:
    return [
        f"{setting} = {config.get(setting)!r}; only {' or '.join(map(repr, values))} can be represented"
        for setting, values in REPRESENTABLE.items()
        if config.get(setting) not in values
    ]


def _rope_scaling(config: Json) -> tuple[RopeScaling | None, list[str]]:
    """Llama 3.1's stretch if the model has it, from the settings of transformers 5 or 4; and what is unknown."""
    rope: Json = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return None, [f"partial_rotary_factor = {rope['partial_rotary_factor']}; only whole heads are rotated here"]
    if kind == "default":
        return None, []
    if kind != "llama3":
        return None, [f"rope_type = {kind!r}; what can be represented is 'default' or 'llama3'"]
    fields = {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_context": "original_max_position_embeddings",
    }
    missing = [f"rope_type llama3 without {theirs}" for theirs in fields.values() if theirs not in rope]
    if missing:
        return None, missing
    return RopeScaling(**{ours: rope[theirs] for ours, theirs in fields.items()}), []


def read_weights(folder: Path, spec: Llama | None = None) -> dict[str, Tensor]:
    """Every weight of the model in `folder` under our names; values are read from the disk when they are used (memory-mapped).

    `spec` is `read_config(folder)` if not given. Raises ForeignModelError for pickled weights, and naming all weights that are
    missing, unknown or of another shape.
    """
    spec = spec or read_config(folder)
    theirs: dict[str, Tensor] = {}
    for file in _weight_files(folder):
        with safe_open(folder / file, framework="pt") as content:
            theirs |= {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118  (not a mapping)
    back = {their_name: our_name for our_name, their_name in renames(spec).items()}
    ignored = {RENAMES[spec.family][TIED]} if spec.tied else set()
    kept = {back.get(name, name): tensor for name, tensor in theirs.items() if name not in ignored and COMPUTED not in name}
    problems = _compare(shapes(spec), {name: tuple(tensor.shape) for name, tensor in kept.items()})
    if problems:
        raise ForeignModelError(f"{folder} does not hold the weights its {CONFIG} speaks of:\n  " + "\n  ".join(problems))
    return kept


def _weight_files(folder: Path) -> list[str]:
    if (folder / WEIGHTS_INDEX).exists():
        found = sorted(set(json.loads((folder / WEIGHTS_INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
        wrong = [file for file in found if Path(file).name != file or not (folder / file).exists()]
        if wrong:
            raise ForeignModelError(f"{folder / WEIGHTS_INDEX} names files that are not there: {', '.join(wrong)}")
        return found
    if (folder / WEIGHTS).exists():
        return [WEIGHTS]
    pickled = sorted(path.name for path in folder.glob("*.bin"))
    if pickled:
        raise ForeignModelError(
            f"{folder} holds pickled weights ({', '.join(pickled)}), which can execute code when they are read. Where you trust "
            "them, convert them with transformers: "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(another, safe_serialization=True)"
        )
    raise ForeignModelError(f"{folder} has neither {WEIGHTS} nor {WEIGHTS_INDEX}")


def import_(folder: Path, out: Path) -> Path:
    """Make a checkpoint of the model in `folder`: step 0, weights only, its spec in the meta; where it is.

    It becomes `out/checkpoints/step-00000000`, and a tokenizer.json `out/tokenizer.json`. Raises ForeignModelError,
    FileExistsError if `out` has checkpoints already, OSError if it cannot be written.
    """
    spec = read_config(folder)
    weights = read_weights(folder, spec)
    checkpoints = out / "checkpoints"
    if files.committed(checkpoints):
        raise FileExistsError(f"{checkpoints} already has checkpoints. Give a new folder.")
    meta = {"step": 0, "samples": 0, "spec": {"model": spec.model_dump(mode="json")}, "imported_from": folder.name}
    checkpointer = Checkpointer(checkpoints, keep=1)
    checkpointer.save(0, {f"weights.{name}": tensor for name, tensor in weights.items()}, meta, asynchronous=False)
    (outcome,) = checkpointer.wait()
    if isinstance(outcome, Failed):
        raise OSError(f"{checkpoints}: {outcome.error}")
    if (folder / TOKENIZER).exists():
        shutil.copyfile(folder / TOKENIZER, out / TOKENIZER)
    return outcome.path


def _compare(wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Every weight that is missing, left over, or of another shape."""
    problems = [f"{name} is missing" for name in wanted if name not in found]
    problems += [f"{name} is not a weight of this model" for name in found if name not in wanted]
    problems += [
        f"{name} has shape {found[name]} instead of {shape}" for name, shape in wanted.items() if found.get(name, shape) != shape
    ]
    return problems
