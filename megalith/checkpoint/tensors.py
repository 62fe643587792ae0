"""Tensors as safetensors files: written as a stream, with their digest, and never a pickle."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megalith.checkpoint.folder import Chunk, FileDigest

if TYPE_CHECKING:
    from megalith.checkpoint.shares import StreamedShare

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}

PIECE = 4 << 20  # bytes hashed and written at a time: the second reads what the first left in the processor's cache


def write(path: Path, tensors: "Mapping[str, Tensor | StreamedShare]") -> FileDigest:
    """Write tensors (any device, any strides, or read in pieces) as one safetensors file, sync it to disk, and return its size and
    sha256.

    The digest is sha256 because processors have instructions for it (1.7 GB/s per core, twice blake2b), it is computed while the bytes
    are written, and `sha256sum` can check it. The tensors are not copied as a whole in memory.
    """
    # the widest elements first keep every tensor aligned to its element size, without the holes the format forbids
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        tensor = tensors[name]
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": tuple(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest, total = hashlib.sha256(), 0
    with path.open("wb", buffering=0) as file:
        # one at a time: a tensor on an accelerator, or one that is not contiguous, is copied here
        for content in chain(
            [memoryview(len(text).to_bytes(8, "little") + text)], (part for name in names for part in _bytes(tensors[name]))
        ):
            for start in range(0, len(content), PIECE):
                piece = content[start : start + PIECE]
                digest.update(piece)
                while piece:  # an unbuffered write may take less than it is given
                    written = file.write(piece)
                    total, piece = total + written, piece[written:]
        os.fsync(file.fileno())
    return FileDigest(total, digest.hexdigest())


def read(content: Any, name: str, chunk: Chunk, dtype: str, *, into: Tensor, offset: Sequence[int] | None = None) -> None:
    """Copy a box of one chunk of the tensor `name` from its open file (`safetensors.safe_open`). The box begins at `offset` in
    the chunk. If the chunk is stored in pieces and the box consists of whole slices of the first dim, memory for only one piece
    is needed besides `into`."""
    start = (0,) * into.dim() if offset is None else tuple(offset)
    if not chunk.pieces:
        into.copy_(box(content.get_tensor(name), start, into.shape))
    elif into.is_contiguous() and tuple(into.shape[1:]) == chunk.sizes[1:]:
        _join(content, chunk, dtype, into.view(-1), first=prod((*start[:1], *chunk.sizes[1:])) if start else 0)
    else:
        whole = torch.empty(chunk.sizes, dtype=TORCH_DTYPES[dtype])
        _join(content, chunk, dtype, whole.view(-1), first=0)
        into.copy_(box(whole, start, into.shape))


def _join(content: Any, chunk: Chunk, dtype: str, into: Tensor, *, first: int) -> None:
    end = 0
    for piece in chunk.pieces:
        begin, end = end, end + piece.bytes // TORCH_DTYPES[dtype].itemsize
        low, high = max(begin, first), min(end, first + len(into))
        if low < high:
            numbers = content.get_tensor(piece.name)[: piece.bytes].view(TORCH_DTYPES[dtype])
            into[low - first : high - first].copy_(numbers[low - begin : high - begin])


def box(tensor: Tensor, offset: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Return the view of `tensor` that begins at `offset` and has the shape `sizes`."""
    for dim, (start, length) in enumerate(zip(offset, sizes, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    return tensor


def _bytes(tensor: "Tensor | StreamedShare") -> Iterator[memoryview]:
    if isinstance(tensor, Tensor):
        yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    else:
        yield from (piece.view(torch.uint8).numpy().data for _, piece in tensor.pieces())
