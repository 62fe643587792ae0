"""A shuffle that needs no memory: the new place of a position is computed, not looked up.

The permutation is a Feistel network over the smallest power of two that holds the size, with cycle walking (Black & Rogaway 2002,
"Ciphers with arbitrary finite domains"): a result outside of the range is permuted again until it falls inside, on average less than
twice.
"""

import hashlib
from dataclasses import dataclass

_ROUNDS = 8
_WORD = (1 << 64) - 1


@dataclass(frozen=True)
class Permutation:
    """A permutation of range(size) that depends only on `size` and the key."""

    size: int
    keys: tuple[int, ...]

    @classmethod
    def of(cls, size: int, *key: object) -> "Permutation":
        """Return the permutation for `key`, whose values must have a stable repr (numbers, strings)."""
        digest = hashlib.blake2b(repr(key).encode(), digest_size=8 * _ROUNDS).digest()
        return cls(size, tuple(int.from_bytes(digest[8 * n : 8 * n + 8], "little") for n in range(_ROUNDS)))

    def __call__(self, position: int) -> int:
        """Return the new place of `position`."""
        assert 0 <= position < self.size, (position, self.size)
        bits = max(self.size - 1, 1).bit_length()
        low_bits = (bits + 1) // 2
        low_mask, high_mask = (1 << low_bits) - 1, (1 << (bits - low_bits)) - 1
        while True:
            low, high = position & low_mask, position >> low_bits
            for number, key in enumerate(self.keys):
                if number % 2:
                    high ^= _mix(low + key) & high_mask
                else:
                    low ^= _mix(high + key) & low_mask
            position = high << low_bits | low
            if position < self.size:
                return position


def _mix(value: int) -> int:
    """Mix 64 bits (the finaliser of splitmix64, Steele, Lea & Flood 2014)."""
    value &= _WORD
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _WORD
    return value ^ value >> 31
