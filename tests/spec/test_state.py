"""The arithmetic of bytes for each parameter."""

import pytest

from megalith.spec.optimizers import OPTIMIZERS
from megalith.spec.run import OptimizerSpec
from megalith.spec.state import GRADIENT, MASTER, Slot, bytes_each, bytes_of, kept, lasting
from megalith.spec.treatment import kept_of

ADAMW = OPTIMIZERS["adamw"].slots


def test_adamw_keeps_what_the_field_says() -> None:
    """16 bytes a parameter in fp32, 18 with a bf16 copy for computing and gradients in fp32; 12 of these are kept between steps
    (Rajbhandari et al. 2019)."""
    assert bytes_each([MASTER, GRADIENT, *ADAMW]) == 16
    assert bytes_each(kept("bf16", ADAMW)) == 18
    assert bytes_each(lasting([MASTER, GRADIENT, *ADAMW])) == 12


@pytest.mark.parametrize(("zero", "each"), [(0, 18), (1, 2 + 4 + 12 / 8), (2, 2 + 4 / 8 + 12 / 8), (3, 18 / 8)])
def test_each_zero_stage_shares_out_one_more(zero: int, each: float) -> None:
    found = bytes_of(kept("bf16", ADAMW), 1000, zero=zero, shards=8)
    assert sum(found.values()) == pytest.approx(1000 * each)


def test_an_update_moves_what_it_reads_and_writes() -> None:
    """AdamW reads a gradient, and reads and writes a weight and two moments, of 4 bytes each."""
    assert OPTIMIZERS["adamw"].moved == 4 + 2 * (4 + 8)


@pytest.mark.parametrize(
    ("shape", "parameter", "own"),
    [
        ("like", (3, 4), (3, 4)), ("row", (3, 4), (3,)), ("column", (3, 4), (4,)),
        ("row", (5, 3, 4), (5, 3)), ("column", (5, 3, 4), (5, 4)), ("row", (7,), (7,)), ("column", (), ()),
    ],
)  # fmt: skip
def test_a_slot_may_leave_a_dimension_out(shape, parameter: tuple[int, ...], own: tuple[int, ...]) -> None:
    assert Slot("moments.x", shape=shape).shape_of(parameter) == own


@pytest.mark.parametrize(
    ("optimizer", "gradients", "released", "bytes_"),
    [
        ({}, "fp32", False, 18),
        ({}, "bf16", False, 16),
        ({"master": "split16", "moments": "fp8"}, "bf16", False, 8 + 2 / 128),
        ({"master": "split8", "moments": "fp8"}, "bf16", False, 7 + 2 / 128),
        ({"master": "split8", "moments": "fp8"}, "bf16", True, 5 + 2 / 128),
    ],
)
def test_bytes_of_a_number_of_a_large_matrix(optimizer: dict[str, str], gradients: str, released: bool, bytes_: float) -> None:
    """In bf16 with AdamW, as `check` prints them."""
    text = kept_of(OptimizerSpec.model_validate(optimizer), "bf16", gradients=gradients, released=released)
    assert text.startswith(f"{bytes_:.4g} bytes (compute 2 + ") and ("gradient" in text) != released
