"""Master weights in files while a model is built, so that a rank never holds more of them than one part's."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megalith.parallel.source import Put
from megalith.train.offload.slot_file import FREE, StateFileError


class Aside:
    """One tensor in a file without a name, until it is taken back. Raises StateFileError."""

    def __init__(self, tensor: Tensor, folder: Path) -> None:
        self.like = torch.empty_like(tensor, device="meta")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder)  # it lives until it is taken back
            octets = tensor.to("cpu", copy=True).contiguous()  # memory that numpy has seen cannot be freed by resizing
            self._file.write(octets.view(-1).view(torch.uint8).numpy().data)
            self._file.flush()
        except OSError as error:
            needs = f"plan.state: {tensor.nbytes:,} bytes of weights have no room in {folder} while the model is built"
            raise StateFileError(error.errno, f"{needs} ({error.strerror}). {FREE}") from error

    def take_back(self) -> Tensor:
        """Return the tensor, in the host's memory. The file is gone."""
        self._file.seek(0)
        octets = np.fromfile(self._file, dtype=np.uint8)
        self._file.close()
        return torch.from_numpy(octets).view(self.like.dtype).view(self.like.shape)


def aside(folder: Path) -> Put:
    """Return a function that puts a tensor aside, and returns the function that takes it back."""

    def put(tensor: Tensor) -> Callable[[], Tensor]:
        if isinstance(tensor, FakeTensor):  # a dry run has no files
            like = torch.empty_like(tensor, device="meta")
            return lambda: torch.empty(like.shape, dtype=like.dtype)
        return Aside(tensor, folder).take_back

    return put
