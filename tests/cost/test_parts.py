"""Profiles of parts are traced once and kept: in memory, and in the folder that the environment names."""

from pathlib import Path

import pytest

from megalith.cost.parts import CACHE, parts
from megalith.spec.plan import Plan
from tests.cost.models import dense, workload


def test_what_was_traced_for_one_folder_is_kept_in_the_next_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a second process would trace again what this one knew already."""
    load, kept = workload(dense(), Plan()), []
    for name in ("one", "other"):
        monkeypatch.setenv(CACHE, str(tmp_path / name))
        parts(load)
        kept.append({path.name for path in (tmp_path / name).rglob("*.json")})
    assert kept[0] == kept[1] != set()
