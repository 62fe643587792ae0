"""Narrow number formats against an enumeration of their definitions in exact arithmetic.

The oracle is written from the papers' tables: bits, bias, special codes. Every number of these formats, every midpoint of two and every
fp32 number is exact in float64, so comparisons there are exact.
"""

import math
from bisect import bisect_left
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from megalith.kernels.elements import (
    E2M1,
    E4M3,
    ELEMENTS,
    Element,
    decode,
    decode_exponent,
    encode,
    encode_exponent,
    exponent_down,
    exponent_up,
    power,
    rounded,
)

# --- the oracle ---

BITS = {"e4m3": (4, 3, 7), "e5m2": (5, 2, 15), "e2m1": (2, 1, 1)}
"""Bits of the exponent, bits of the mantissa, bias."""


def special(name: str, code: int) -> float | None:
    """The meaning of codes that are not finite numbers: arXiv:2209.05433, table 1; E2M1 has none."""
    magnitude = code & 0x7F
    if name == "e4m3" and magnitude == 0x7F:
        return math.nan
    if name == "e5m2" and magnitude >= 0x7C:
        return math.copysign(math.inf, -1 if code & 0x80 else 1) if magnitude == 0x7C else math.nan
    return None


def value(name: str, code: int) -> Fraction:
    """Return the finite number of a code."""
    exponents, fractions, bias = BITS[name]
    exponent, fraction = code >> fractions & (2**exponents - 1), Fraction(code & (2**fractions - 1), 2**fractions)
    size = fraction * Fraction(2) ** (1 - bias) if exponent == 0 else (1 + fraction) * Fraction(2) ** (exponent - bias)
    return -size if code >> (exponents + fractions) else size


def finite(name: str) -> list[Fraction]:
    """Return the format's nonnegative numbers in order, so that a number's index is its code."""
    codes = 2 ** (sum(BITS[name][:2]))
    return [value(name, code) for code in range(codes) if special(name, code) is None]


def nearest(name: str, x: Fraction) -> Fraction:
    """Round with exact rationals: to the nearest number, in a tie to the even code, and above the largest number to the
    largest."""
    numbers = finite(name)
    size = min(abs(x), numbers[-1])
    above = bisect_left(numbers, size)
    if numbers[above] == size:
        found = numbers[above]
    else:
        low, high = numbers[above - 1], numbers[above]
        even = low if (above - 1) % 2 == 0 else high
        found = even if size - low == high - size else low if size - low < high - size else high
    return -found if x < 0 else found


def nearest_many(name: str, x: np.ndarray) -> np.ndarray:
    """`nearest` for many numbers, in float64, where nothing is rounded."""
    numbers = np.array([float(number) for number in finite(name)])
    middles = (numbers[:-1] + numbers[1:]) / 2
    size = np.minimum(np.abs(x.astype(np.float64)), numbers[-1])
    below, to_even = np.searchsorted(middles, size, "left"), np.searchsorted(middles, size, "right")
    tied = below != to_even
    return np.copysign(numbers[np.where(tied & (below % 2 == 1), to_even, below)], x)


def edges(element: Element) -> Tensor:
    """Return every finite number, every midpoint of two, the fp32 neighbours of each, and numbers beyond both ends, with both
    signs."""
    numbers = torch.tensor([float(number) for number in finite(element.name)])
    points = torch.cat((numbers, (numbers[:-1] + numbers[1:]) / 2, torch.tensor([1.1, 2.0, 1e10]) * element.largest))
    points = torch.cat((points, torch.tensor([1e-45, 2.0**-126, 1e-38, 2.0**127])))
    up, down = torch.full_like(points, math.inf), torch.full_like(points, -math.inf)
    points = torch.cat((points, points.nextafter(up), points.nextafter(down).clamp(min=0)))
    return torch.cat((points, -points))


def random_bits(count: int, seed: int) -> Tensor:
    """Return finite fp32 numbers of every exponent."""
    bits = torch.randint(-(2**31), 2**31, (count,), generator=torch.Generator().manual_seed(seed), dtype=torch.int64)
    numbers = bits.to(torch.int32).view(torch.float32)
    return numbers[numbers.isfinite()]


def near(element: Element, count: int, seed: int) -> Tensor:
    """Return numbers in the range of the format, as dense among its smallest numbers as among its largest."""
    random = torch.Generator().manual_seed(seed)
    exponents = torch.randint(element.lowest - element.mantissa - 3, element.top + 2, (count,), generator=random)
    return torch.randn(count, generator=random) * torch.exp2(exponents.float())


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


# --- codes and numbers ---

EVERY = pytest.mark.parametrize("element", ELEMENTS.values(), ids=ELEMENTS)


@EVERY
def test_every_code_stands_for_the_number_of_its_bits(element: Element) -> None:
    codes = torch.arange(1 << (1 + element.exponent + element.mantissa), dtype=torch.uint8)
    for code, found in zip(codes.tolist(), decode(codes, element).tolist(), strict=True):
        expected = special(element.name, code)
        if expected is None:
            assert Fraction(found) == value(element.name, code), code
            assert math.copysign(1, found) == (-1 if code >> (element.exponent + element.mantissa) else 1)
        else:
            assert math.isnan(found) if math.isnan(expected) else found == expected, code
    in_half = decode(codes, element, torch.bfloat16).float()
    assert torch.equal(in_half.nan_to_num(), decode(codes, element).nan_to_num()), "bf16 has all of them"
    assert (element.largest, 2.0**element.lowest) == (
        float(finite(element.name)[-1]),
        float(finite(element.name)[2**element.mantissa]),
    )


@EVERY
def test_every_number_keeps_its_code(element: Element) -> None:
    codes = torch.arange(1 << (1 + element.exponent + element.mantissa), dtype=torch.uint8)
    codes = codes[decode(codes, element).isfinite()]
    assert torch.equal(encode(decode(codes, element), element), codes)


@EVERY
def test_rounding_is_to_the_nearest_number_and_of_ties_to_the_even_code(element: Element) -> None:
    for x in (edges(element), near(element, 100_000, 1), random_bits(100_000, 2)):
        expected = torch.from_numpy(nearest_many(element.name, x.numpy())).float()
        assert torch.equal(bits(rounded(x, element)), bits(expected))
        assert torch.equal(bits(decode(encode(x, element), element)), bits(expected))


@pytest.mark.slow
@EVERY
def test_the_oracle_of_many_is_that_of_one(element: Element) -> None:
    points = torch.cat((edges(element), near(element, 500, 3)))
    expected = [float(nearest(element.name, Fraction(x))) for x in points.tolist()]
    assert nearest_many(element.name, points.numpy()).tolist() == expected


@pytest.mark.parametrize("element", [element for element in ELEMENTS.values() if element.dtype], ids=lambda e: e.name)
def test_torchs_cast_agrees_below_the_largest_number(element: Element) -> None:
    x = torch.cat((edges(element), near(element, 100_000, 4)))
    x = x[x.abs() <= element.largest]
    assert element.dtype is not None
    assert torch.equal(encode(x, element), x.to(element.dtype).view(torch.uint8))


@EVERY
def test_nan_stays_nan_and_beyond_the_largest_is_the_largest(element: Element) -> None:
    assert rounded(torch.tensor(math.nan), element).isnan()
    if element is not E2M1:
        assert decode(encode(torch.tensor([math.nan]), element), element).isnan().all()
    both = torch.tensor([math.inf, -math.inf, 3.4e38])
    assert rounded(both, element).tolist() == [element.largest, -element.largest, element.largest]


# --- stochastic rounding ---


@EVERY
def test_stochastic_rounding_gives_a_neighbour_and_keeps_what_is_a_number(element: Element) -> None:
    numbers = decode(encode(edges(element), element), element)
    for draw in (0.0, 0.5, 1 - 2.0**-24):
        assert torch.equal(bits(rounded(numbers, element, torch.full_like(numbers, draw))), bits(numbers))
    known = torch.tensor([float(number) for number in finite(element.name)])
    x = near(element, 10_000, 5).clamp(-element.largest, element.largest)
    found = rounded(x, element, torch.rand(x.shape, generator=torch.Generator().manual_seed(6)))
    place = torch.searchsorted(known, x.abs(), right=True) - 1
    low, high = known[place], known[(place + 1).clamp(max=len(known) - 1)]
    assert ((found.abs() == low) | (found.abs() == high)).all() and torch.equal(found.signbit(), x.signbit())
    assert (found.abs() == low).any() and (found.abs() == high).any()


@EVERY
def test_stochastic_rounding_is_unbiased(element: Element) -> None:
    """The mean of 256 draws of a number is within 4 standard errors, for all numbers except as many as chance allows."""
    draws, random = 256, torch.Generator().manual_seed(7)
    x = near(element, 2_000, 8).clamp(-element.largest, element.largest)
    found = rounded(x.expand(draws, -1).contiguous(), element, torch.rand(draws, *x.shape, generator=random)).double()
    known = torch.tensor([float(number) for number in finite(element.name)], dtype=torch.float64)
    place = (torch.searchsorted(known, x.abs().double(), right=True) - 1).clamp(max=len(known) - 2)
    step = known[place + 1] - known[place]
    share = ((x.abs() - known[place]) / step).clamp(0, 1)
    error = step * (share * (1 - share) / draws).sqrt()
    apart = (found.mean(0) - x).abs()
    plain = share * (1 - share) * draws > 10  # for which the mean of this many draws is nearly normal
    assert plain.sum() > 1000 and (apart[plain] < 4 * error[plain]).float().mean() > 0.999
    total = (apart * 0 + found.mean(0) - x)[plain] / error[plain]
    assert abs(float(total.sum())) < 4 * math.sqrt(int(plain.sum())), "the errors of all numbers together"


# --- scales ---


def smallest_power(amax: float, largest: Fraction) -> int:
    """Return the smallest k with amax <= largest * 2^k, computed with exact rationals."""
    k = math.frexp(amax)[1] - 20
    while Fraction(amax) > largest * Fraction(2) ** k:
        k += 1
    return max(-127, k)


@EVERY
def test_scales_rounded_up_are_the_smallest_by_which_nothing_saturates(element: Element) -> None:
    numbers = torch.cat((edges(element), random_bits(2_000, 9), torch.tensor([3.4028234e38, 1e-45, 2.0**-126]))).abs()
    numbers = torch.cat((numbers, element.largest * torch.exp2(torch.arange(-100, 100.0)))).clamp(max=3.4028234e38)
    for x, k in zip(numbers.tolist(), exponent_up(numbers, element).tolist(), strict=True):
        assert k == (0 if x == 0 else smallest_power(x, Fraction(element.largest))), x


def test_scales_rounded_up_are_transformer_engines() -> None:
    """The reference is 448 / amax in fp32, with the mantissa's bits cleared. An infinity becomes the largest fp32 number
    first."""
    amax = torch.cat((edges(E4M3), random_bits(100_000, 10))).abs()
    amax = amax[amax > 0]
    scale = torch.full_like(amax, 448.0).div(amax).clamp(max=torch.finfo(torch.float32).max)
    cleared = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    assert torch.equal(power(-exponent_up(amax, E4M3)), cleared)


@EVERY
def test_scales_rounded_down_are_ocps(element: Element) -> None:
    amax = torch.cat((edges(element), random_bits(10_000, 11))).abs()
    amax = amax[amax >= 2.0**-126]
    expected = np.frexp(amax.double().numpy())[1] - 1 - math.floor(math.log2(element.largest))
    assert exponent_down(amax, element).tolist() == np.clip(expected, -127, 127).tolist()


@pytest.mark.parametrize("rule", [exponent_up, exponent_down])
def test_the_scale_of_nothing_is_1_and_of_what_is_not_finite_nan(rule: object) -> None:
    assert callable(rule)
    k = rule(torch.tensor([0.0, math.inf, math.nan]), E4M3)
    scales = power(k)
    assert scales[0] == 1 and scales[1:].isnan().all()
    assert encode_exponent(k).tolist() == [127, 255, 255]


def test_every_code_of_e8m0_is_a_power_of_two_and_the_last_is_nan() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    found = decode_exponent(codes)
    assert found[:255].double().tolist() == [2.0 ** (code - 127) for code in range(255)]
    assert found[255].isnan()
    assert torch.equal(encode_exponent(codes.int() - 127), codes)
