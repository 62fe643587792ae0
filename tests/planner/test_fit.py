"""The bundled calibration equals the result of the documented command."""

from importlib.resources import files

import pytest

from megalith.cost.calibrate import fit, measured
from megalith.cost.constants import calibration, parse
from megalith.planner.published.fit import SWEEPS, as_changes, left_out, observations
from megalith.planner.published.rows import read
from tests.full import only_full

ROWS = read()


@pytest.mark.slow  # every fitted row is traced, and predicted a few thousand times
@only_full
def test_the_documented_fit_finds_the_bundled_figures_again(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGALITH_CACHE", str(tmp_path))
    start = parse(files("megalith.cost").joinpath("starts.toml").read_text(encoding="utf-8"))
    rows = observations(ROWS)
    found = fit(rows, start, sweeps=SWEEPS)
    moved = {name for name, value in found.flat().items() if value != start.flat()[name]}
    assert len(moved) > 20
    assert found.flat() == pytest.approx(calibration().flat(), rel=1e-3), "run python -m megalith.planner.published.fit"
    seen = calibration().fitted
    assert measured(rows, start) == {"devices": seen["devices"], "generations": seen["generations"]}


def test_each_group_that_is_fitted_has_a_fit_without_it():
    scored = {row.group for row in ROWS if row.scored}
    assert set(left_out()) <= scored
    assert {"mosaic", "mbridge", "sc21", "megalith", "torchtitan"} <= set(left_out())


def test_what_differs_is_written_and_the_rest_is_the_whole_fit():
    whole = calibration()
    other = whole.changed({"hopper.wide": 0.5})
    assert as_changes(whole, {"some": other}).splitlines()[2:] == ["[some]", '"hopper.wide" = 0.5']
