"""Values written as TOML."""

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalith.spec.toml import dotted, key, literal

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
    max_leaves=8,
)


@pytest.mark.slow
@given(VALUES)
def test_a_literal_reads_back_as_the_value(value: object):
    assert tomllib.loads(f"x = {literal(value)}") == {"x": value}


@given(st.lists(TEXT, min_size=1, max_size=3))
def test_a_dotted_key_reads_back_as_its_path(path: list[str]):
    tree = tomllib.loads(f"{dotted(path)} = 1")
    for part in path:
        tree = tree[part]
    assert tree == 1


def test_plain_keys_are_not_quoted():
    assert key("rope_theta-2") == "rope_theta-2"


def test_none_is_written_as_text():
    assert literal(None) == '"none"'
