"""The current and peak memory of this process, according to the system."""

import pytest

from megalith.machine.resident import most_resident_bytes, resident_bytes
from tests.ranks import run_ranks


def _held(rank: int) -> list[int]:
    """Return current and peak memory before, with and after an allocation of 200 MB."""
    found = [resident_bytes(), most_resident_bytes()]
    block = b"1" * 200_000_000
    found += [resident_bytes(), most_resident_bytes()]
    del block
    return [*found, resident_bytes(), most_resident_bytes()]


@pytest.mark.slow
def test_what_was_given_back_counts_among_the_most_alone():
    before, _, with_it, most_with_it, after, most = run_ranks(_held, 1)[0]
    assert with_it - before > 190_000_000 < with_it - after
    assert most >= most_with_it > 0.95 * with_it  # the kernel adds up the page counts of its CPUs with a delay
