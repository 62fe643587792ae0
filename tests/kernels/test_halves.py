"""Master weights in two halves are exact with 16 bits, and have 24 bits with 8; the bf16 half is rounded with ties away from zero."""

import torch
from torch import Tensor

from megalith.kernels.halves import join, split


def _words(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(-(2**31), 2**31, (count,), generator=generator).to(torch.int32)


def test_sixteen_bits_keep_every_number_exactly() -> None:
    """Return numbers of every class, including subnormal numbers, infinities and NaN."""
    numbers = torch.cat([_words(1 << 18).view(torch.float32), torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 3.4e38, 1e-45])])
    upper, lower = split(numbers, 16)
    assert (upper.dtype, lower.dtype) == (torch.bfloat16, torch.int16)
    assert torch.equal(join(upper, lower).view(torch.int32), numbers.view(torch.int32))


def test_the_upper_half_is_the_nearest_and_of_two_the_larger() -> None:
    words = _words(1 << 18)
    words[:1000] = words[:1000] & -0x10000 | 0x8000  # ties
    numbers = words.view(torch.float32)
    numbers = numbers[numbers.abs() < 1e38]
    upper, even = split(numbers, 16)[0], numbers.bfloat16()
    differ = upper != even
    away, near = upper[differ].double(), even[differ].double()
    assert torch.equal((away - numbers[differ]).abs(), (near - numbers[differ]).abs()), "they differ in ties alone"
    assert bool((away.abs() > near.abs()).all()) and 400 < int(differ.sum()) < 600
    ties = torch.tensor([1 + 2**-8, -1 - 2**-8, 1 + 3 * 2**-8])
    assert split(ties, 16)[0].tolist() == [1 + 2**-7, -1 - 2**-7, 1 + 2**-6]


def test_eight_bits_keep_24_of_a_number() -> None:
    numbers = torch.randn(1 << 16, generator=torch.Generator().manual_seed(4))
    kept = join(*split(numbers, 8))
    assert float(((kept - numbers) / numbers).abs().max()) <= 2**-16
    assert torch.equal(join(*split(kept, 8, _words(1 << 16))), kept), "a number of 24 bits stays, whatever is drawn"


def test_drawn_rounding_is_right_on_average() -> None:
    number = 1 + 2**-15 * 0.3
    found = join(*split(torch.full((1 << 16,), number), 8, _words(1 << 16)))
    assert set(found.tolist()) == {1.0, 1 + 2**-15}
    assert abs(float(found.double().mean()) - number) < 2**-15 * 0.01
