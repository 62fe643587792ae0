"""A copy keeps the state's values when the state changes, and all saves use one block of memory."""

import torch

from megalith.checkpoint.shares import shares
from megalith.checkpoint.staging import Staging
from tests.checkpoint.states import differing, values


def test_a_copy_keeps_the_values_it_was_made_of():
    state = values() | {"empty": torch.zeros(0, 3), "transposed": torch.arange(6.0).reshape(2, 3).T}
    expected = {key: value.clone() for key, value in state.items()}
    copied = Staging().copy(shares(state))
    for value in state.values():
        value.zero_()
    assert differing({key: share.data for key, share in copied.items()}, expected) == []


def test_memory_is_used_again_and_grows_when_the_state_does():
    staging = Staging()
    staging.reserve(shares({"x": torch.arange(100)}))
    first = staging.copy(shares({"x": torch.arange(100)}))["x"].data.data_ptr()
    assert staging.copy(shares({"x": torch.ones(100)}))["x"].data.data_ptr() == first
    grown = staging.copy(shares({"x": torch.arange(3), "y": torch.arange(1000)}))
    assert grown["y"].data.tolist() == list(range(1000))


def test_nothing_to_copy_is_no_error():
    assert Staging().copy({}) == {}
