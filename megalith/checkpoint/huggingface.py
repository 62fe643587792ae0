"""Import and export of model folders in the format of Hugging Face transformers: weights and configuration are converted to
Megalith's names and spec, and back. `foreign/` describes how each model family differs. Except in DeepSeek and Nemotron, both
formats pair rotary channel i with i + head_dim / 2, so weights need no permutation. Only safetensors files are read and written:
a pickled `.bin` could execute code.
"""

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megalith import disk
from megalith.checkpoint import folder as files
from megalith.checkpoint import tensors as safetensors
from megalith.checkpoint.checkpointer import Checkpointer, SaveFailure
from megalith.checkpoint.fold import folded
from megalith.checkpoint.foreign.family import Foreign, ForeignModelError, Json
from megalith.checkpoint.foreign.table import BY_FAMILY, BY_MODEL_TYPE
from megalith.checkpoint.foreign.weights import Piece, convert_to_ours, convert_to_theirs
from megalith.data import tokenizer as tokenizers
from megalith.data.tokenizer import TOKENIZER_CONFIG_FILE, Tokenizer
from megalith.models.stage import Stage
from megalith.spec.families import Model
from megalith.spec.parts import named_by

__all__ = [
    "ForeignModelError",
    "ImportResult",
    "configuration",
    "export",
    "import_",
    "read_config",
    "read_model",
    "read_weights",
    "shapes",
    "to_theirs",
]

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
BEGINS = ("<|begin_of_text|>", "<s>", "<bos>", "<|begin▁of▁sentence|>", "[BOS]")

AGAIN = "Copy or download this file again, or write its folder again with transformers' save_pretrained."
OUTPUT = "lm_head.weight"  # outside their prefix, and not a tensor of its own when the model is tied


def _foreign(spec: Model) -> Foreign:
    """Return the conversion of a spec's family. Raises ValueError if transformers lacks the family, or the model has a user's own
    parts."""
    if mine := named_by(spec):
        raise ValueError(f"cannot export: transformers has no class for a model with own parts ({', '.join(mine.values())})")
    if spec.family not in BY_FAMILY:
        known = ", ".join(BY_FAMILY)
        raise ValueError(
            f"cannot export: transformers has no class for the family {spec.family!r}; transformers has classes for {known}"
        )
    return BY_FAMILY[spec.family]


def shapes(spec: Model) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of `spec` by Megalith's name, from modules built on the meta device: all parameters, and
    the buffers that transformers stores too. Raises ValueError for a model with a user's own parts."""
    if named_by(spec):
        _foreign(spec)
    return {name: tuple(tensor.shape) for name, tensor in _meta(spec).items()}


def _meta(spec: Model) -> dict[str, Tensor]:
    stage = _stage(spec)
    foreign = BY_FAMILY.get(spec.family)
    shared = {name for piece in foreign.pieces(spec) for name in piece.ours} if foreign else set()
    buffers = {name: buffer for name, buffer in stage.named_buffers() if name in shared}
    return {name: parameter.detach() for name, parameter in stage.parameters_by_name().items()} | buffers


def _stage(spec: Model) -> Stage:
    with torch.device("meta"):
        return Stage(spec.build())


def to_theirs(spec: Model, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert Megalith's weights to transformers' names and layout (as views where possible)."""
    return convert_to_theirs(_foreign(spec).pieces(spec), weights)


# --- export ------------------------------------------------------------------------------------------------------------------


def export(
    spec: Model,
    weights: Mapping[str, Tensor],
    out: Path,
    *,
    tokenizer: Tokenizer | None = None,
    dtype: torch.dtype = torch.bfloat16,
    file_bytes: int = 5_000_000_000,
) -> list[Path]:
    """Write a folder that transformers (4.46 and later) loads, and return the files written.

    `weights` maps Megalith's parameter names to whole tensors. Tensors are written as `dtype`, except for those that transformers
    keeps in fp32. `tokenizer` is written to the folder too, and defines the end-of-text token. Each weight file has at most
    `file_bytes`, or one larger tensor; the other weights go to further files. Raises ValueError for a family that transformers
    lacks, and for weights that are missing, unknown or of another shape (the message names them); FileExistsError if `out` has
    files; OSError, which names `out`, if that folder cannot be made.
    """
    spec, weights = folded(spec, weights)
    foreign = _foreign(spec)
    problems = _compare(shapes(spec), {name: tuple(tensor.shape) for name, tensor in weights.items()})
    problems += foreign.refuse(spec)
    if problems:
        raise ValueError("cannot export:\n  " + "\n  ".join(problems))
    if out.exists() and any(out.iterdir()):
        raise FileExistsError(f"{out} already holds files. Give a new folder, or remove this one first.")
    disk.make_folder(out)
    theirs = to_theirs(spec, weights)
    written = _write_weights(theirs, out, {name: foreign.written_as(name, dtype) for name in theirs}, file_bytes)
    special = _special_tokens(tokenizer) if tokenizer else {}
    ids = {f"{end}_token_id": number for end, (_, number) in special.items()}
    documents = {CONFIG: configuration(spec, ids=ids, dtype=dtype), "generation_config.json": {"_from_model_config": True} | ids}
    if tokenizer:
        told = {"model_max_length": spec.context, "model_input_names": ["input_ids", "attention_mask"]}
        begins = {"bos_token": special["bos"][0]} if "bos" in special else {}
        written += [tokenizer.save(out, told | begins), out / TOKENIZER_CONFIG_FILE]
    for file, content in documents.items():
        (out / file).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        written.append(out / file)
    return written


def _write_weights(weights: Mapping[str, Tensor], out: Path, dtypes: Mapping[str, torch.dtype], file_bytes: int) -> list[Path]:
    """Write the weights to files of at most `file_bytes` each (a larger tensor gets its own file), and return the paths. Tensors
    are converted to their dtypes one file at a time."""
    sizes = {name: tensor.numel() * dtypes[name].itemsize for name, tensor in weights.items()}
    groups: list[list[str]] = [[]]
    room = file_bytes
    for name, size in sizes.items():
        if groups[-1] and size > room:
            groups.append([])
            room = file_bytes
        groups[-1].append(name)
        room -= size
    names = (
        [f"model-{n:05d}-of-{len(groups):05d}.safetensors" for n in range(1, len(groups) + 1)] if len(groups) > 1 else [WEIGHTS]
    )
    for file, group in zip(names, groups, strict=True):
        safetensors.write(out / file, {name: weights[name].detach().to(dtypes[name]) for name in group})
    written = [out / file for file in names]
    if len(groups) > 1:
        where = {name: file for file, group in zip(names, groups, strict=True) for name in group}
        (out / WEIGHTS_INDEX).write_text(
            json.dumps({"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}, indent=2) + "\n"
        )
        written.append(out / WEIGHTS_INDEX)
    return written


def configuration(spec: Model, *, ids: Mapping[str, int] | None = None, dtype: torch.dtype = torch.float32) -> Json:
    """Return config.json. `ids`: the ids of the tokens that begin and end a text. Raises ValueError for a family that transformers does
    not have."""
    ids = ids or {}
    return _foreign(spec).configuration(spec) | {
        "attention_dropout": 0.0,
        "use_cache": True,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": ids.get("bos_token_id"),
        "eos_token_id": ids.get("eos_token_id"),
    }


def _special_tokens(tokenizer: Tokenizer) -> dict[str, tuple[str, int]]:
    begins = next(((token, number) for token in BEGINS if (number := tokenizer.id_of(token)) is not None), None)
    return ({"bos": begins} if begins else {}) | {"eos": (tokenizer.end_of_text_token, tokenizer.end_of_text)}


# --- import ------------------------------------------------------------------------------------------------------------------


def read_config(folder: Path) -> Model:
    """Read the spec of the model in `folder`. Raises ForeignModelError with every setting that Megalith cannot represent."""
    try:
        config = _json_object(folder / CONFIG)
    except FileNotFoundError as error:
        raise ForeignModelError(f"{folder} has no {CONFIG}: give a folder written by transformers' save_pretrained") from error
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in BY_MODEL_TYPE:
        known = " or ".join(map(repr, BY_MODEL_TYPE))
        raise ForeignModelError(f"{folder / CONFIG}: model_type = {kind!r}; only {known} can be represented here")
    try:
        return BY_MODEL_TYPE[kind].understood(config, name=os.fsencode(folder.name).decode(errors="replace"))
    except ForeignModelError as error:
        raise ForeignModelError(f"{folder / CONFIG} {error}") from error


def _json_object(path: Path) -> Json:
    """Read the JSON object in a file. Raises ForeignModelError if the file holds anything else, OSError if it cannot be opened."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ForeignModelError(f"{path} cannot be read as JSON: {error}. {AGAIN}") from error
    if not isinstance(found, dict):
        raise ForeignModelError(f"{path} holds a {type(found).__name__} where a JSON object is needed. {AGAIN}")
    return found


def read_weights(folder: Path, spec: Model | None = None) -> dict[str, Tensor]:
    """Return every weight of the model in `folder` under Megalith's names. Weights with the same layout in both formats are
    memory-mapped, so they are read only when used. `spec`: default is `read_config(folder)`. Raises ForeignModelError for pickled
    weights, and for weights that are missing, unknown or of another shape (the message names them).
    """
    spec = spec or read_config(folder)
    foreign = _foreign(spec)
    found = _stored(folder)
    if not any(name.startswith(foreign.prefix) for name in found):  # written by the model without its head
        found = {name if name == OUTPUT else foreign.prefix + name: tensor for name, tensor in found.items()}
    kept = {name: tensor for name, tensor in found.items() if not name.endswith(foreign.computed)}
    different = _different(foreign.pieces(spec), kept)
    if spec.tied and OUTPUT in kept:
        embedding = next(piece.theirs[0] for piece in foreign.pieces(spec) if "embedding.weight" in piece.ours)
        output = kept.pop(OUTPUT)
        if not _equal(kept.setdefault(embedding, output), output):
            different.append(
                f"{OUTPUT} is not the same as {embedding}, with tie_word_embeddings = true. transformers then has two tensors; to import "
                f'both, write "tie_word_embeddings": false in {CONFIG}'
            )
    try:
        wanted = {name: tuple(tensor.shape) for name, tensor in to_theirs(spec, _meta(spec)).items()}
    except ValidationError as error:
        wrong = "; ".join(
            ": ".join([*(f"{key} = {found['input']!r}" for key in found["loc"][-1:]), found["msg"]]) for found in error.errors()
        )
        raise ForeignModelError(f"{folder / CONFIG}: its sizes do not describe a valid model: {wrong}") from error
    problems = _compare(wanted, {name: tuple(tensor.shape) for name, tensor in kept.items()}) + different
    if problems:
        raise ForeignModelError(f"{folder} does not hold the weights that its {CONFIG} describes:\n  " + "\n  ".join(problems))
    return convert_to_ours(foreign.pieces(spec), kept)


def _stored(folder: Path) -> dict[str, Tensor]:
    """Return every tensor in the folder's files. Raises ForeignModelError for unreadable files, or if two files hold the same
    tensor; the message names the files."""
    found: dict[str, Tensor] = {}
    where: dict[str, Path] = {}
    for path in _weight_files(folder):
        try:
            with safe_open(path, framework="pt") as content:
                tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118  (not a mapping)
        except (SafetensorError, OSError) as error:
            size = f"{path.stat().st_size:,} bytes" if path.exists() else "not there"
            raise ForeignModelError(f"{path} ({size}) cannot be read as safetensors: {error}. {AGAIN}") from error
        twice = [f"{name} is also in {where[name]}" for name in tensors if name in where]
        if twice:
            raise ForeignModelError(f"{path} holds tensors that another file has: {'; '.join(twice)}. Keep one of each.")
        found |= tensors
        where |= dict.fromkeys(tensors, path)
    return found


def _different(pieces: Iterable[Piece], found: Mapping[str, Tensor]) -> list[str]:
    return [
        f"{copy} differs from {first}, but Megalith has one tensor for both"
        for first, *copies in (piece.theirs for piece in pieces if piece.copied)
        for copy in copies
        if first in found and copy in found and not _equal(found[first], found[copy])
    ]


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def _weight_files(folder: Path) -> list[Path]:
    """Return the single weight file if it exists, because transformers prefers it too; else the files that the index names."""
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    index = folder / WEIGHTS_INDEX
    if index.exists():
        named = _json_object(index).get("weight_map")
        if not isinstance(named, dict) or not all(isinstance(file, str) for file in named.values()):
            raise ForeignModelError(f"{index} has no weight_map from names of tensors to files. {AGAIN}")
        found = sorted(set(named.values()))
        wrong = [file for file in found if Path(file).name != file or not (folder / file).exists()]
        if wrong:
            raise ForeignModelError(f"{index} names files that its folder lacks: {', '.join(wrong)}. {AGAIN}")
        return [folder / file for file in found]
    pickled = sorted(path.name for path in folder.glob("*.bin"))
    if pickled:
        raise ForeignModelError(
            f"{folder} holds pickled weights ({', '.join(pickled)}), which can execute code when they are read. If you trust this "
            "folder, convert it with transformers: "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(another, safe_serialization=True)"
        )
    raise ForeignModelError(f"{folder} has neither {WEIGHTS} nor {WEIGHTS_INDEX}")


@dataclass(frozen=True)
class ImportResult:
    """A checkpoint made from another program's weights."""

    path: Path
    spec: Model
    left_out: str
    """The optional parts of the model that config.json counts but whose weights are not in the folder, as text; "" if there are
    none."""


def import_(folder: Path, out: Path) -> ImportResult:
    """Make a checkpoint of the model in `folder` at `out/checkpoints/step-00000000`: step 0, weights only, with the spec in its
    meta. The folder's tokenizer is copied too. All other training state, such as the experts' loads, is zero, as at a first step.
    Raises ForeignModelError, FileExistsError if `out` already has checkpoints, and OSError if the checkpoint cannot be written.
    """
    spec, left_out = read_model(folder)
    weights = read_weights(folder, spec)
    checkpoints = out / "checkpoints"
    if files.committed(checkpoints):
        raise FileExistsError(f"{checkpoints} already has checkpoints. Give a new folder.")
    disk.make_folder(checkpoints)
    meta = {"step": 0, "samples": 0, "spec": {"model": spec.model_dump(mode="json")}, "imported_from": folder.name}
    buffers = {name: torch.zeros(buffer.shape, dtype=buffer.dtype) for name, buffer in _stage(spec).lasting_buffers().items()}
    checkpointer = Checkpointer(checkpoints, keep=1)
    checkpointer.save(0, {f"weights.{name}": tensor for name, tensor in (buffers | weights).items()}, meta, asynchronous=False)
    (outcome,) = checkpointer.wait()
    if isinstance(outcome, SaveFailure):
        raise OSError(f"{checkpoints}: {outcome.error}")
    tokenizers.copy(folder, out)
    return ImportResult(outcome.path, spec, left_out)


def read_model(folder: Path) -> tuple[Model, str]:
    """Return the spec of the model whose weights are in `folder`, and as text the optional parts that config.json counts but
    `folder` lacks ("" if none)."""
    counted = read_config(folder)
    spec = _foreign(counted).without_missing(counted, _names(folder))
    fewer = spec != counted
    return (
        spec,
        "multi-token prediction: config.json counts its modules, but the folder does not have their weights" if fewer else "",
    )


def _names(folder: Path) -> set[str]:
    """Return the names of all tensors in the folder's files. An unreadable file contributes no names, because a later reader
    reports the file."""
    found: set[str] = set()
    for path in _weight_files(folder):
        with contextlib.suppress(SafetensorError, OSError), safe_open(path, framework="pt") as content:
            found |= set(content.keys())
    return found


def _compare(wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> list[str]:
    problems = [f"{name} is missing" for name in wanted if name not in found]
    problems += [f"{name} is not a weight of this model" for name in found if name not in wanted]
    problems += [
        f"{name} has shape {found[name]} instead of {shape}" for name, shape in wanted.items() if found.get(name, shape) != shape
    ]
    return problems
