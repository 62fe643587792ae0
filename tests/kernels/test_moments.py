"""Moments in few bits have exact codes, unbiased rounding, and draws that do not depend on sharding."""

import pytest
import torch
from torch import Tensor

from megalith.kernels import moments
from megalith.spec.state import Slot

SEED = moments.seed_of_draws("blocks.0.mlp.up.weight", "moments.first", 7)


def packed(numbers: Tensor, block: int, *, root: bool = False, seed: int = SEED) -> Tensor:
    rows, columns = numbers.shape
    into = torch.zeros(Slot("m", number="fp8", block=block).shape_of((rows, columns)), dtype=torch.uint8)
    moments.pack(numbers, into, block, moments.words(seed, torch.arange(rows), 0, columns), root=root)
    return into


def test_words_are_those_of_their_definition() -> None:
    rows = torch.tensor([0, 5, 2**31, 2**40 + 3])
    found = moments.words(SEED, rows, 100, 3)
    golden = 0x9E3779B9
    for row, words in zip(rows.tolist(), found.tolist(), strict=True):
        mixed = moments.mixed(((row ^ row >> 32) * golden & 0xFFFFFFFF) ^ SEED)
        assert [word & 0xFFFFFFFF for word in words] == [
            moments.mixed((mixed + column * golden) & 0xFFFFFFFF) for column in range(100, 103)
        ]


@pytest.mark.parametrize("root", [False, True])
@pytest.mark.parametrize(("columns", "block"), [(256, 128), (300, 128), (100, 128), (12, 4), (5, 4)])
def test_what_was_kept_is_kept_exactly_again(columns: int, block: int, root: bool) -> None:
    numbers = torch.randn(9, columns) * torch.logspace(-12, 3, 9)[:, None]
    numbers = numbers.square() if root else numbers
    once = moments.unpack(packed(numbers, block, root=root), block, columns, root=root)
    again = moments.unpack(packed(once, block, root=root, seed=SEED + 1), block, columns, root=root)
    assert torch.equal(again, once)
    most = numbers.abs().amax(-1, keepdim=True)
    assert bool(((once - numbers).abs() <= (0.3 if root else 0.13) * numbers.abs() + most * (1e-9 if root else 2**-17)).all())


def test_what_is_cut_between_blocks_has_the_same_bytes() -> None:
    numbers = torch.randn(6, 512)
    whole, into = packed(numbers, 128), torch.zeros(3, 258, dtype=torch.uint8)
    drawn = moments.words(SEED, moments.rows_of((6, 512), (2, 256), (3, 256), numbers.device), 256, 256)
    moments.pack(numbers[2:5, 256:], into, 128, drawn, root=False)
    assert torch.equal(into, whole[2:5, 258:])


def test_a_root_is_never_rounded_to_nothing() -> None:
    """An update divides by this number."""
    numbers = torch.full((1, 128), 1e-30)
    numbers[0, 0], numbers[0, 1] = 1.0, 0.0
    found = moments.unpack(packed(numbers, 128, root=True), 128, 128, root=True)
    assert found[0, 1] == 0 and bool((found[0, 2:] > 0).all())


def test_zeros_are_zeros_and_an_infinity_is_seen() -> None:
    assert not moments.unpack(torch.zeros(2, 129, dtype=torch.uint8), 128, 128, root=True).any()
    numbers = torch.ones(1, 256)
    numbers[0, 3] = torch.inf
    found = moments.unpack(packed(numbers, 128), 128, 256, root=False)
    assert bool(found[0, :128].isnan().all()) and torch.equal(found[0, 128:], torch.ones(128))


@pytest.mark.slow
@pytest.mark.parametrize("number", ["fp8", "bf16"])
def test_rounding_is_unbiased(number: str) -> None:
    """A moment that changes by a thousandth in each of many updates reaches its value. Rounded to nearest, it would never
    change."""
    decay, updates = 0.999, 1500
    kept = torch.ones(64, 128)
    for update in range(updates):
        seed = moments.seed_of_draws("m", "moments.first", update)
        drawn = moments.words(seed, torch.arange(64), 0, 128)
        if number == "fp8":
            kept = moments.unpack(packed(kept * decay, 128, seed=seed), 128, 128, root=False)
        else:
            into = torch.empty(64, 128, dtype=torch.bfloat16)
            moments.narrow(kept * decay, into, drawn)
            kept = into.float()
    sure = 4 * float(kept.std()) / kept.numel() ** 0.5
    assert abs(float(kept.mean()) - decay**updates) < max(sure, 1e-3)
