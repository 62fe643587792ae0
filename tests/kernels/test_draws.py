"""Draws are a function of the place: equal for every share, uniform, and independent of one another."""

import numpy as np
import torch
from torch import Tensor

from megalith.kernels.draws import Tokens, key_of, signs, tokens_at_work, uniform, working_on

ROWS = torch.arange(512) * 7 + (3 << 32)


def splitmix(word: int) -> int:
    """Apply the paper's finalizer to one word."""
    mask = (1 << 64) - 1
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & mask
    word = (word ^ word >> 27) * 0x94D049BB133111EB & mask
    return word ^ word >> 31


def test_each_number_is_splitmix64_of_its_place() -> None:
    key, mask = key_of("blocks.1.mlp.up, of inputs"), (1 << 64) - 1
    found = uniform(key, ROWS[:3], range(5, 9))
    for i, row in enumerate(ROWS[:3].tolist()):
        for j, column in enumerate(range(5, 9)):
            word = splitmix(splitmix((row ^ key) & mask) + (column + 1) * 0x9E3779B97F4A7C15 & mask)
            assert float(found[i, j]) == (word >> 40) / 2**24


def test_a_share_has_the_draws_of_the_whole() -> None:
    whole = uniform(1, ROWS, range(300))
    assert torch.equal(uniform(1, ROWS[100:250], range(40, 90)), whole[100:250, 40:90])
    order = torch.randperm(512)
    assert torch.equal(uniform(1, ROWS[order].view(2, 256), range(300)), whole[order])
    assert uniform(1, ROWS[:0], range(4)).shape == (0, 4)


def test_draws_are_uniform_and_independent_of_their_neighbours() -> None:
    x = uniform(key_of("a"), ROWS, range(512)).double()
    assert float(x.min()) >= 0 and float(x.max()) < 1
    counts = np.histogram(x.numpy(), bins=64, range=(0, 1))[0]
    expected = x.numel() / 64
    assert ((counts - expected) ** 2 / expected).sum() < 63 + 4 * (2 * 63) ** 0.5

    def correlation(one: Tensor, other: Tensor) -> float:
        return float(((one - 0.5) * (other - 0.5)).mean() * 12 * one.numel() ** 0.5)

    others = [(x[1:], x[:-1]), (x[:, 1:], x[:, :-1]), (x, x.T), (x, uniform(key_of("b"), ROWS, range(512)).double())]
    assert all(abs(correlation(*pair)) < 4 for pair in others)


def test_signs_are_those_of_their_name() -> None:
    assert set(signs("hadamard", 32).tolist()) == {1.0, -1.0}
    assert torch.equal(signs("hadamard", 32)[:16], signs("hadamard", 16))
    assert not torch.equal(signs("hadamard", 32), signs("other", 32))


def test_tokens_have_numbers_of_their_own() -> None:
    tokens = Tokens(torch.tensor([7, 8]), torch.tensor([0, 5]))
    assert tokens.numbers.tolist() == [[7 << 32, (7 << 32) + 5], [8 << 32, (8 << 32) + 5]]
    with working_on(tokens):
        with working_on(None):
            assert tokens_at_work() is None
        assert tokens_at_work() is tokens
    assert tokens_at_work() is None
