"""Comparison of narrow number formats with another implementation: ml_dtypes, used by JAX and TensorFlow. ml_dtypes turns
numbers above the largest one into NaN or an infinity, but a quantiser saturates. So values are clamped to the format's range
before the cast.
"""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from megalith.kernels.elements import ELEMENTS, Element, decode, decode_exponent, encode, encode_exponent, power, rounded
from megalith.kernels.quantise import Scaling, quantise

THEIRS = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "e2m1": ml_dtypes.float4_e2m1fn}
EVERY = pytest.mark.parametrize("element", ELEMENTS.values(), ids=ELEMENTS)


def codes_of(element: Element) -> Tensor:
    """Return every code of the format."""
    return torch.arange(1 << (1 + element.exponent + element.mantissa), dtype=torch.uint8)


def numbers_of(element: Element, codes: Tensor) -> Tensor:
    """Return the numbers (fp32) of codes according to ml_dtypes."""
    return torch.from_numpy(codes.numpy().view(THEIRS[element.name]).astype(np.float32))


def cast(element: Element, x: Tensor) -> Tensor:
    """Return the codes of x (fp32), clamped to the format's range, according to ml_dtypes."""
    inside = x.clamp(-element.largest, element.largest).numpy()
    return torch.from_numpy(inside.astype(THEIRS[element.name]).view(np.uint8))


def million(element: Element) -> Tensor:
    """Return a million fp32 numbers: half of them with random bits, half in the format's range, including its subnormal
    numbers."""
    random = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (500_000,), generator=random, dtype=torch.int64).to(torch.int32).view(torch.float32)
    exponents = torch.randint(element.lowest - element.mantissa - 3, element.top + 2, (500_000,), generator=random)
    inside = torch.randn(500_000, generator=random) * torch.exp2(exponents.float())
    return torch.cat((bits[~bits.isnan()], inside))


def edges(element: Element) -> Tensor:
    """Return every number, every midpoint of two neighbours (a tie), the fp32 neighbours of these, infinities and the
    largest finite numbers."""
    numbers = numbers_of(element, codes_of(element))
    numbers = numbers[numbers.isfinite()].sort().values
    points = torch.cat((numbers, (numbers[1:] + numbers[:-1]) / 2, torch.tensor([-0.0, 1e-45, -1e-45, 3e38, -3e38])))
    ends = torch.tensor([math.inf, -math.inf])
    return torch.cat((points, ends, *(points.nextafter(end) for end in ends)))


@EVERY
def test_every_code_stands_for_the_same_number(element: Element) -> None:
    codes = codes_of(element)
    ours, theirs = decode(codes, element), numbers_of(element, codes)
    assert torch.equal(ours.isnan(), theirs.isnan())
    known = ~ours.isnan()
    assert torch.equal(ours[known].view(torch.int32), theirs[known].view(torch.int32))


@EVERY
def test_every_number_is_rounded_to_the_same_code(element: Element) -> None:
    """The test uses a million random numbers, every edge case, and NaN, which E2M1 lacks."""
    x = torch.cat((million(element), edges(element)))
    assert torch.equal(encode(x, element), cast(element, x))
    assert torch.equal(rounded(x, element).view(torch.int32), numbers_of(element, cast(element, x)).view(torch.int32))
    if element.dtype is not None:
        assert numbers_of(element, encode(torch.tensor([math.nan]), element)).isnan().all()


@EVERY
def test_range_and_precision_are_the_same(element: Element) -> None:
    theirs = ml_dtypes.finfo(THEIRS[element.name])
    assert (element.exponent, element.mantissa) == (theirs.nexp, theirs.nmant)
    assert element.largest == float(theirs.max)
    assert 2.0**element.lowest == float(theirs.smallest_normal)
    assert 2.0 ** (element.lowest - element.mantissa) == float(theirs.smallest_subnormal)


def test_every_scale_of_e8m0_is_the_same() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    theirs = torch.from_numpy(codes.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32))
    ours = decode_exponent(codes)
    assert torch.equal(ours[:255], theirs[:255]) and ours[255].isnan() and theirs[255].isnan()
    k = torch.arange(-127, 128, dtype=torch.int32)
    assert torch.equal(encode_exponent(k), torch.from_numpy(power(k).numpy().astype(ml_dtypes.float8_e8m0fnu).view(np.uint8)))


@EVERY
@pytest.mark.parametrize("scale", ["up", "down", "fp32", "e4m3"])
def test_a_quantised_tensor_has_the_codes_of_its_scaled_numbers(element: Element, scale: str) -> None:
    """Blocks have very different magnitudes. A scale that is not a power of two is a quotient in fp32, as in `quantise`."""
    random = torch.Generator().manual_seed(1)
    x = torch.randn(64, 256, generator=random) * torch.exp2(
        torch.randint(-9, 10, (64, 16), generator=random).float()
    ).repeat_interleave(16, 1)
    found = quantise(x, Scaling(element, (1, 16), scale))  # pyright: ignore[reportArgumentType]
    scales, blocks = found.scales[..., None], x.view(64, 16, 16)
    amax = blocks.abs().amax(-1, keepdim=True)
    if scale == "fp32":
        blocks = blocks * (torch.full_like(amax, element.largest) / amax)
    elif scale == "e4m3":
        assert found.whole is not None
        assert torch.equal(scales, numbers_of(ELEMENTS["e4m3"], cast(ELEMENTS["e4m3"], scales)))
        of_all = torch.full((), element.largest * 448.0) / x.abs().max()
        blocks = blocks * torch.where(scales == 0, 0.0, of_all / scales)
    else:
        assert torch.equal(scales, torch.from_numpy(scales.numpy().astype(ml_dtypes.float8_e8m0fnu).astype(np.float32)))
        blocks = blocks / scales
    assert torch.equal(found.codes, cast(element, blocks.reshape(64, 256)))
