"""Bit-exact number formats of at most 8 bits: their codes, the value of each code, and rounding.

E4M3 and E5M2: Micikevicius et al. 2022, arXiv:2209.05433. E2M1 and E8M0: OCP Microscaling Formats 1.0, section 5.3. This module does not
use torch's casts for values above a format's largest number, because they differ between releases: 2.15 turns an infinity into 448.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

MANTISSA = 23  # bits of an fp32 number's fraction
EXPONENTS = 0x7F800000  # the bits of its exponent
NAN = 0x7FC00000  # the bits of an fp32 NaN


@dataclass(frozen=True)
class Element:
    """A format of few bits: a sign, an exponent, a mantissa."""

    name: str
    exponent: int
    mantissa: int
    largest: float
    """The largest finite number."""
    dtype: torch.dtype | None = None
    """Torch's dtype for this format; None if torch cannot compute with it."""

    @property
    def lowest(self) -> int:
        """Exponent of the smallest normal number. Subnormal numbers have the spacing of this exponent."""
        return 2 - 2 ** (self.exponent - 1)

    @property
    def top(self) -> int:
        """Exponent of the format's largest number."""
        return math.frexp(self.largest)[1] - 1

    @property
    def fraction(self) -> int:
        """The fraction bits of the format's largest number, in fp32."""
        return int((self.largest / 2**self.top - 1) * 2**MANTISSA)


E4M3 = Element("e4m3", 4, 3, 448.0, torch.float8_e4m3fn)
E5M2 = Element("e5m2", 5, 2, 57344.0, torch.float8_e5m2)
E2M1 = Element("e2m1", 2, 1, 6.0)
ELEMENTS: Mapping[str, Element] = {element.name: element for element in (E4M3, E5M2, E2M1)}


def spacing(values: Tensor, element: Element) -> Tensor:
    """Return the distance between neighbouring numbers of the format around each of `values` (fp32, finite), as if the format had
    no largest number."""
    bits = values.view(torch.int32).bitwise_and(EXPONENTS)
    return bits.clamp_(min=(127 + element.lowest) << MANTISSA).sub_(element.mantissa << MANTISSA).view(torch.float32)


def rounded(values: Tensor, element: Element, draws: Tensor | None = None) -> Tensor:
    """Round `values` (fp32) to numbers of the format: to nearest, ties to even, and at most to the largest number. NaN stays NaN; an
    infinity becomes the largest number, so callers must check for infinities first.

    With `draws`, uniform in [0, 1), rounding is stochastic: to one of the two neighbours, with probabilities that make the mean
    exact.
    """
    held = values.clamp(-element.largest, element.largest)  # keeps NaN
    step = spacing(held, element)
    if draws is None:
        return held.div_(step).round_().mul_(step)
    return stochastic(held.div_(step), draws).mul_(step)


def stochastic(steps: Tensor, draws: Tensor) -> Tensor:
    """Round each of `steps` (fp32) to one of its two neighbouring integers, drawn so that the mean is the step (stochastic rounding).
    `draws`: uniform in [0, 1)."""
    size = steps.abs()
    below = size.floor()
    below += draws < size.sub_(below)  # never of a whole number: then nothing is left
    return below.copysign_(steps)


def encode(values: Tensor, element: Element, draws: Tensor | None = None) -> Tensor:
    """Return the codes (uint8) of `rounded` values. In a format without NaN, a NaN gets the code 0, because its block's scale is
    NaN."""
    held = rounded(values, element, draws)
    if element.dtype is not None:
        return held.to(element.dtype).view(torch.uint8)
    steps = held.abs().nan_to_num_(0.0).mul_(2).to(torch.uint8)  # 0, 1, 2, 3, 4, 6, 8 or 12 halves
    code = steps - (steps > 4) * (steps - 4).div(2, rounding_mode="floor") - (steps > 8).to(torch.uint8)
    return code + held.signbit().to(torch.uint8) * 8


def decode(codes: Tensor, element: Element, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the exact numbers that codes (uint8) represent, in a wide dtype."""
    table = torch.tensor(_numbers(element), dtype=dtype, device=codes.device)
    return table.index_select(0, codes.flatten().int()).view(codes.shape)


@cache
def _numbers(element: Element) -> tuple[float, ...]:
    numbers = []
    for code in range(1 << (1 + element.exponent + element.mantissa)):
        sign = -1.0 if code >> (element.exponent + element.mantissa) else 1.0
        exponent = code >> element.mantissa & ((1 << element.exponent) - 1)
        fraction = (code & ((1 << element.mantissa) - 1)) / (1 << element.mantissa)
        size = 2.0**element.lowest * fraction if exponent == 0 else 2.0 ** (exponent - 1 + element.lowest) * (1 + fraction)
        numbers.append(sign * (size if size <= element.largest else _beyond(element, fraction)))
    return tuple(numbers)


def _beyond(element: Element, fraction: float) -> float:
    """Return the value of a code above that of the largest number: infinity or NaN in E5M2, NaN in E4M3."""
    return float("inf") if element is E5M2 and fraction == 0 else float("nan")


# --- scales ---


def exponent_up(amax: Tensor, element: Element) -> Tensor:
    """Return the smallest k (int32) from -127 to 127 with amax (fp32) <= largest * 2^k: with a scale of 2^k no number saturates.

    For amax = 0, k is 0. For a NaN or an infinity, k is 128, which stands for the scale NaN.
    """
    bits = amax.view(torch.int32)
    fraction = bits & (1 << MANTISSA) - 1
    return _special((bits >> MANTISSA) - 127 - element.top + (fraction > element.fraction), amax)


def exponent_down(amax: Tensor, element: Element) -> Tensor:
    """Return k: floor(log2(amax)) less the exponent of the format's largest number, from -127 to 127 (OCP Microscaling Formats 1.0,
    section 6.3). Values above the format's largest number times 2^k saturate. NaN, infinities and 0 are treated as in `exponent_up`."""
    return _special((amax.view(torch.int32) >> MANTISSA) - 127 - element.top, amax)


def _special(k: Tensor, amax: Tensor) -> Tensor:
    k = k.clamp_(-127, 127).masked_fill_(amax == 0, 0)
    return k.masked_fill_(~amax.isfinite(), 128)


def power(k: Tensor) -> Tensor:
    """2^k in fp32, for k (int32) from -127 to 127; NaN for 128."""
    normal = (k.clamp(min=-126) + 127 << MANTISSA).view(torch.float32)
    return torch.where(k > 127, torch.nan, torch.where(k < -126, 2.0**-127, normal))


def encode_exponent(k: Tensor) -> Tensor:
    """E8M0 codes (uint8) of the scales 2^k."""
    return (k + 127).to(torch.uint8)


def decode_exponent(codes: Tensor) -> Tensor:
    """The scales (fp32) that E8M0 codes represent: 2^(code - 127), and NaN for 255."""
    return power(codes.int() - 127)
