"""Blocks that a plan recomputes."""

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
        ("segments:2", 4, []),
        ("sqrt", 4, [0, 1, 2, 3]),
    ],
)
def test_a_policy_names_its_blocks(policy, blocks, expected):
    assert [number for number in range(blocks) if recomputed(number, blocks=blocks, policy=policy)] == expected
