"""Fixtures that several findings share."""

from pathlib import Path

import pytest

from tests.findings.product import write_run


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny run and its data, for the tests of one file."""
    folder = tmp_path_factory.mktemp("findings")
    write_run(folder)
    return folder
