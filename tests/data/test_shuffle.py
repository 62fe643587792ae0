from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalith.data.shuffle import Permutation


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 1500), seed=st.integers(0, 2**64))
def test_every_position_is_reached_exactly_once(size, seed):
    permutation = Permutation.of(size, seed, "domain", 0)
    assert sorted(map(permutation, range(size))) == list(range(size))


@settings(max_examples=60, deadline=None)
@given(size=st.integers(2**33, 2**60), seed=st.integers(0, 2**31), position=st.integers(0, 2**33 - 1))
def test_sizes_no_memory_could_hold_stay_in_range_and_distinguish_neighbours(size, seed, position):
    permutation = Permutation.of(size, seed)
    first, second = permutation(position), permutation(position + 1 if position + 1 < size else 0)
    assert 0 <= first < size
    assert 0 <= second < size
    assert first != second


def test_each_part_of_the_key_changes_the_order():
    orders = {tuple(map(Permutation.of(100, *key), range(100))) for key in [(0, "a", 0), (1, "a", 0), (0, "b", 0), (0, "a", 1)]}
    assert len(orders) == 4


def test_orders_of_a_small_size_are_equally_frequent():
    orders = Counter(tuple(map(Permutation.of(4, seed), range(4))) for seed in range(4800))
    assert len(orders) == 24
    assert max(abs(count - 200) for count in orders.values()) < 80  # more than five standard deviations


def test_the_order_is_the_same_on_every_machine():
    """This order is frozen, because another order would silently change the samples of a resumed run."""
    assert list(map(Permutation.of(10, 1, "a", 0), range(10))) == [9, 8, 4, 2, 6, 0, 7, 5, 1, 3]
