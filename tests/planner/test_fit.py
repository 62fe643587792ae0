"""The bundled calibration is what the documented command finds."""

from importlib.resources import files

import pytest

from megalith.cost.calibrate import fit
from megalith.cost.constants import calibration, parse
from megalith.planner.published.fit import SWEEPS, observations
from megalith.planner.published.rows import checking_groups, read


@pytest.mark.slow  # every row of the fitted groups is traced, and predicted a few thousand times
def test_the_documented_fit_finds_the_bundled_figures_again(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGALITH_CACHE", str(tmp_path))
    rows = read()
    fitted = frozenset(row.group for row in rows if row.text("primary") == "1") - checking_groups(rows)
    start = parse(files("megalith.cost").joinpath("starts.toml").read_text(encoding="utf-8"))
    found = fit(observations(fitted), start, sweeps=SWEEPS)
    moved = {name for name, value in found.flat().items() if value != start.flat()[name]}
    assert len(moved) > 20
    assert found.flat() == pytest.approx(calibration().flat(), rel=1e-3), "run python -m megalith.planner.published.fit"
