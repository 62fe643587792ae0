"""The long tests: `make test-full` runs all of them, and `make test` leaves them out or takes a sample of their cases."""

import os

import pytest

FULL = os.environ.get("MEGALITH_FULL") == "1"
"""True under `make test-full`."""

only_full = pytest.mark.skipif(not FULL, reason="`make test-full`")


def sampled(cases: int, *, together: bool = False) -> pytest.MarkDecorator:
    """Mark a test of which `make test` runs so many cases, others each time. The head of its output has the seed (`--seed`).

    `together`: so many cases of all tests of the file that are marked so, whose largest number counts. A case that is named on
    the command line always runs."""
    return pytest.mark.sampled(cases, together)
