"""Which blocks a plan recomputes."""

import pytest

from megalith.spec.plan import recomputed


@pytest.mark.parametrize(
    ("policy", "blocks", "expected"),
    [
        ("none", 6, []),
        ("selective", 6, []),
        ("full", 6, [0, 1, 2, 3, 4, 5]),
        ("every:1", 4, [0, 1, 2, 3]),
        ("every:2", 6, [0, 2, 4]),
        ("every:3", 7, [0, 3, 6]),
        ("every:9", 6, [0]),
        ("sqrt", 9, [1, 2, 4, 5, 7, 8]),
        ("sqrt", 16, [n for n in range(16) if n % 4]),
        ("sqrt", 2, [1]),
    ],
)
def test_a_policy_names_its_blocks(policy, blocks, expected):
    assert [number for number in range(blocks) if recomputed(number, blocks=blocks, policy=policy)] == expected


@pytest.mark.parametrize("blocks", [4, 9, 16, 25, 64, 126])
def test_sqrt_keeps_about_the_square_root_of_the_blocks(blocks):
    kept = sum(not recomputed(number, blocks=blocks, policy="sqrt") for number in range(blocks))
    assert abs(kept - blocks**0.5) <= 1
