"""Number formats and precisions."""

import pytest
from pydantic import TypeAdapter, ValidationError

from megalith.spec.cluster import catalogue
from megalith.spec.numbers import FAST, NUMBERS, PRECISIONS, TRAINED, PrecisionSpec, Rate, Trained, settled
from megalith.spec.state import MASTER


@pytest.mark.parametrize(
    ("name", "width", "stored"),
    [
        ("fp32", 4, 4),
        ("bf16", 2, 2),
        ("fp16", 2, 2),
        ("fp8", 1, 1),
        ("mxfp8", 1, 8.25 / 8),
        ("nvfp4", 0.5, 4.5 / 8),
        ("mxfp4", 0.5, 4.25 / 8),
    ],
)
def test_a_number_takes_its_bits_and_its_share_of_a_scale(name: str, width: float, stored: float) -> None:
    assert NUMBERS[name].width == width
    assert NUMBERS[name].bytes == stored


def test_a_block_has_a_size_and_its_scale_bits() -> None:
    for number in NUMBERS.values():
        assert (number.scale == "block") == (number.block > 0) == (number.scale_bits > 0), number


def test_the_catalogue_gives_rates_of_known_formats() -> None:
    rates = {number.rate for number in NUMBERS.values()}
    assert {rate for device in catalogue().values() for rate in device.peak} <= rates
    assert TypeAdapter(Rate).validate_python("tf32") == "tf32"
    with pytest.raises(ValidationError):
        TypeAdapter(Rate).validate_python("mxfp8")  # this format computes at the rate of fp8


def test_the_trainer_computes_in_what_parity_has_limits_for() -> None:
    assert TRAINED == ("fp32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4", "mxfp4")
    with pytest.raises(ValidationError, match="'mxfp8', 'nvfp4' or 'mxfp4'"):
        TypeAdapter(Trained).validate_python("fp4")


def test_a_run_that_leaves_rounding_open_gets_its_precisions_own() -> None:
    for precision, rounding, hadamard in (
        ("fp8", "nearest", False),
        ("nvfp4", "stochastic", True),
        ("mxfp4", "stochastic", True),
    ):
        own = settled(PrecisionSpec(), precision)
        assert (own.rounding, own.hadamard) == (rounding, hadamard)
        chosen = PrecisionSpec(rounding="nearest", hadamard=False)
        assert settled(chosen, precision) == chosen


def test_narrow_formats_multiply_and_weights_stay_wide() -> None:
    for precision in PRECISIONS.values():
        assert precision.factors.width <= precision.compute.width <= NUMBERS[MASTER.number].width
        assert precision.compute.scale == "none", "activations are sent and added without scales"


def test_what_is_emulated_counts_as_what_it_computes_in() -> None:
    assert FAST == ("fp32", "bf16", "fp16")
    for precision in PRECISIONS.values():
        assert precision.rate == (precision.compute if precision.emulated else precision.factors).rate
        assert precision.emulated == (precision.tile > 0), "no kernel multiplies tiles in few bits"
