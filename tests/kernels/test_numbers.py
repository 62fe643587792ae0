"""Torch's dtypes match the table of formats."""

import pytest
import torch

from megalith.kernels.numbers import DTYPE, Dtypes
from megalith.spec.numbers import NUMBERS, TRAINED


@pytest.mark.parametrize("name", DTYPE)
def test_a_dtype_has_the_bits_of_its_row(name: str) -> None:
    number, dtype = NUMBERS[name], DTYPE[name]
    assert 8 * dtype.itemsize == number.bits
    if dtype.is_floating_point:  # other dtypes hold codes
        assert torch.finfo(dtype).eps / 2 == number.roundoff


def test_every_precision_that_is_trained_has_dtypes() -> None:
    compute = {name: Dtypes.of(name).compute for name in TRAINED}
    assert (compute.pop("fp32"), compute.pop("fp16")) == (torch.float32, torch.float16)
    assert set(compute) >= {"bf16", "fp8"} and set(compute.values()) == {torch.bfloat16}
    assert {dtype for name in TRAINED for dtype in Dtypes.of(name)[1:]} == {torch.float32}
