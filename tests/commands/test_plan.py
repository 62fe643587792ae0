"""Numbers among the options of `megalith plan`."""

import pytest
import typer

from megalith.commands.plan import whole


@pytest.mark.parametrize(("text", "number"), [("8k", 8192), ("1M", 2**20), ("8192", 8192)])
def test_lengths_and_batches_count_in_powers_of_two(text: str, number: int):
    assert whole(text) == number


@pytest.mark.parametrize("text", ["8x", "0", "0.3", "-8k"])
def test_what_is_no_length_says_what_is(text: str):
    with pytest.raises(typer.BadParameter, match="Write 8192, or 8k"):
        whole(text)
