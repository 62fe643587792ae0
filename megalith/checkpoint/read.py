"""Read whole tensors of a checkpoint in one process, without process groups, for text generation, export and inspection."""

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from megalith.checkpoint import folder as files
from megalith.checkpoint.tensors import TORCH_DTYPES, read


def read_full(path: Path, keys: Iterable[str] | None = None, *, check: bool = True) -> dict[str, Tensor]:
    """Return the tensors named by `keys` (None: all) of the newest intact checkpoint that `path` refers to (see `folder.locate`).
    `check=False` skips verification, for a checkpoint that `folder.find` has just verified. Raises KeyError with all missing
    keys, FileNotFoundError if there is no checkpoint, DamagedCheckpointError if none is intact.
    """
    path = files.find(path) if check else files.locate(path)[0]
    with files.reading(path):
        index = files.read_index(path, files.read_manifest(path))
        wanted = list(index) if keys is None else list(keys)
        if missing := [key for key in wanted if key not in index]:
            raise KeyError(f"not in checkpoint {path}: {', '.join(missing)}")
        whole = {key: torch.empty(index[key].shape, dtype=TORCH_DTYPES[index[key].dtype]) for key in wanted}
        parts: dict[str, list[tuple[str, files.Chunk]]] = {}
        for key in wanted:
            for chunk in index[key].chunks:
                parts.setdefault(chunk.file, []).append((key, chunk))
        for file, chunks in sorted(parts.items()):
            with safe_open(path / file, framework="pt") as content:
                for key, chunk in chunks:
                    slices = tuple(slice(start, start + size) for start, size in zip(chunk.offset, chunk.sizes, strict=True))
                    read(content, key, chunk, index[key].dtype, into=whole[key][slices])
    return whole
