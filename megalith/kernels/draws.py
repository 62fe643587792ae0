"""Random numbers for stochastic rounding, as a pure function of an element's place in the whole tensor and of the sample's number.

Each draw is a hash of a counter (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), so there is no generator
with a state. A recomputed product therefore rounds to the same bits, and so does every share of a tensor, under any plan.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

SLAB = 1 << 16
"""The number of random numbers that are drawn at once, so small that the hash's 64-bit words stay in a processor's cache."""

# splitmix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators"), in two's complement
_STEP, _FIRST, _SECOND = (word - (1 << 64) for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


@dataclass(frozen=True)
class Tokens:
    """The tokens of the current computation: this rank's tokens of a microbatch."""

    samples: Tensor
    """int64 [batch]: number of each sample in the order of the data"""
    positions: Tensor
    """int64 [seq]: position of each token in its whole sequence"""
    wide: bool = False
    """True while every product is computed in high precision, whatever the recipe."""
    raised: frozenset[str] = frozenset()
    """Names of the model's parts (such as `blocks.3`) whose products are now computed in high precision."""

    @property
    def numbers(self) -> Tensor:
        """int64 [batch, seq]: a number for each token that no other token of a run has."""
        return (self.samples[:, None] << 32) + self.positions


_tokens: Tokens | None = None  # of the process, not of a thread: on CUDA, torch runs backward on a thread of its own


@contextmanager
def working_on(tokens: Tokens | None) -> Iterator[None]:
    """Inside this context, forwards and backwards process `tokens`."""
    global _tokens
    before, _tokens = _tokens, tokens
    try:
        yield
    finally:
        _tokens = before


def tokens_at_work() -> Tokens | None:
    """Return the tokens that this process is computing on; None if not set."""
    return _tokens


@cache
def key_of(name: str) -> int:
    """Return the 64-bit key of a tensor's name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little", signed=True)


def uniform(key: int | Tensor, rows: Tensor, columns: range) -> Tensor:
    """Draw fp32 [rows, columns], uniform in [0, 1) in steps of 2^-24, from a tensor's key (int64 [rows]: a key for each row) and the
    numbers (int64) of its rows and columns."""
    of_rows = _mixed(rows.flatten() ^ key)[:, None]
    steps = torch.arange(columns.start, columns.stop, device=rows.device).add_(1).mul_(_STEP)
    out = torch.empty(len(of_rows), len(columns), device=rows.device)
    height = max(1, SLAB // max(1, len(columns)))
    for first in range(0, len(of_rows), height):
        words = _mixed(of_rows[first : first + height] + steps)
        out[first : first + height] = _shifted(words, 40)
    return out.mul_(2.0**-24)


def signs(name: str, count: int) -> Tensor:
    """Draw random signs, fp32 [count] of 1 and -1, from a name."""
    return torch.where(uniform(key_of(name), torch.zeros(1, dtype=torch.int64), range(count))[0] < 0.5, 1.0, -1.0)


def _mixed(words: Tensor) -> Tensor:
    """Mix 64-bit words: splitmix64's finalizer."""
    words = (words ^ _shifted(words, 30)).mul_(_FIRST)
    words = words.bitwise_xor_(_shifted(words, 27)).mul_(_SECOND)
    return words.bitwise_xor_(_shifted(words, 31))


def _shifted(words: Tensor, by: int) -> Tensor:
    """Shift right and fill with zeros (torch would fill with the sign)."""
    return (words >> by).bitwise_and_((1 << (64 - by)) - 1)
