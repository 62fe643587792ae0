"""Prepared data for runs whose checks read the disk."""

from pathlib import Path

import pytest

from tests.prepared import hollow_data


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of prepared data without any text."""
    monkeypatch.chdir(tmp_path)
    hollow_data(Path("data"), "austen", "code")
    return Path("data")
