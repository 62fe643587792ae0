"""Moves master weights to the host's memory or to a file while a model is built, so that the device holds those of only one part at a
time."""

import errno
import os
import tempfile
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megalith.parallel.source import Put
from megalith.spec.plan import StateSpec
from megalith.train.offload.home import folder_of
from megalith.train.offload.slot_file import FREE, StateFileError, move_all

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def aside_of(state: StateSpec, folder: Path | None) -> Put | None:
    """Return the function that moves master weights off the device while the model is built; None: they stay on the device. `folder`: see
    `folder_of`."""
    if state.weights == "device":
        return None
    put: Put = _in_memory if state.weights == "host" else Aside(folder_of(state, folder))
    return lambda tensor: _unreal(tensor) if isinstance(tensor, FakeTensor) else put(tensor)


def _in_memory(tensor: Tensor) -> Callable[[], Tensor]:
    copy = tensor.to("cpu", copy=True)
    return lambda: copy


def _unreal(tensor: Tensor) -> Callable[[], Tensor]:
    shape, dtype = tensor.shape, tensor.dtype
    return lambda: torch.empty(shape, dtype=dtype)


class Aside:
    """A `Put` that moves all tensors of a rank to one unnamed file. The file disappears when no tensor needs it any more. Raises
    StateFileError."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file: IO[bytes] | None = None
        self._end = 0

    def __call__(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Append a tensor to the file, and return a function that reads it into the host's memory."""
        like = torch.empty_like(tensor, device="meta")
        octets = tensor.to("cpu", copy=True).contiguous()  # memory that numpy has seen cannot be freed by resizing
        start, self._end = self._end, self._end + tensor.nbytes
        try:
            if move_all(os.pwritev, self._opened(), octets.view(-1).view(torch.uint8).numpy(), start) < tensor.nbytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            full = error.errno in FULL
            failed = f"{tensor.nbytes:,} bytes of weights {'have no room' if full else 'cannot be written'} in {self.folder}"
            way_out = FREE if full else "Set plan.state.folder to another folder"
            words = f"plan.state: {failed} while the model is built ({error.strerror}). {way_out}"
            raise StateFileError(error.errno, words) from error
        return partial(self._read, start, like)

    def _read(self, start: int, like: Tensor) -> Tensor:
        octets = torch.empty(like.nbytes, dtype=torch.uint8)
        failed = f"plan.state: {like.nbytes:,} bytes of weights in {self.folder} cannot be read back while the model is built"
        way_out = "Start the run again. If this error recurs, set plan.state.folder to a folder on another disk"
        try:
            moved = move_all(os.preadv, self._opened(), octets.numpy(), start)
        except OSError as error:
            raise StateFileError(error.errno, f"{failed} ({error.strerror}). {way_out}") from error
        if moved < like.nbytes:
            raise StateFileError(errno.EIO, f"{failed} (the file ends after {moved:,} bytes of these weights). {way_out}")
        return octets.view(like.dtype).view(like.shape)

    def _opened(self) -> int:
        if self._file is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=self.folder, buffering=0)  # one for all: a process may often open 1,024
            weakref.finalize(self, self._file.close)
        return self._file.fileno()
