"""Torch's dtypes for the names of formats in `spec/numbers.py`."""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from megalith.spec.numbers import PRECISIONS
from megalith.spec.state import GRADIENT, MASTER

DTYPE: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int16": torch.int16,
    "int8": torch.int8,
    "fp8": torch.uint8,  # codes, and scales among them: `kernels.moments`
}


class Dtypes(NamedTuple):
    """The dtypes of a training: of compute weights and activations, of master weights, and of gradient sums."""

    compute: torch.dtype
    master: torch.dtype
    reduce: torch.dtype

    @classmethod
    def of(cls, precision: str, *, gradients: str = GRADIENT.number) -> "Dtypes":
        """Return the dtypes of a row of PRECISIONS, with gradient sums in the format `gradients`."""
        return cls(DTYPE[PRECISIONS[precision].compute.name], DTYPE[MASTER.number], DTYPE[gradients])
