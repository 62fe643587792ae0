"""Scaling laws fitted to loss curves recover the law that generated the curves, and predict a run's final loss."""

from pathlib import Path

import numpy as np
import pytest

from megalith import events
from megalith.watch import panels, scaling_law
from megalith.watch.scaling_law import LossCurve, fit
from megalith.watch.source import Source
from tests.report.run_folder import TOKENS, start, step

FLOOR, BY_SIZE, SIZE_POWER, BY_TOKENS, TOKENS_POWER = 1.8, 400.0, 0.34, 900.0, 0.37


def _true(parameters: float, tokens):
    return FLOOR + BY_SIZE / parameters**SIZE_POWER + BY_TOKENS / tokens**TOKENS_POWER


def _curve(parameters: float, most: float, *, noise: float = 0.0, seed: int = 0) -> LossCurve:
    tokens = np.geomspace(most / 10, most, scaling_law.BINS)
    loss = _true(parameters, tokens) * (1 + noise * np.random.default_rng(seed).standard_normal(scaling_law.BINS))
    return LossCurve(parameters, tokens, loss, np.full(scaling_law.BINS, 100.0))


def _run(folder: Path, parameters: int, *, steps: int, of: int, noise: float = 0.01, above: float = 0.0) -> Source:
    """Return a run of `of` steps, after `steps` of them, whose loss is the true law's times 1 + `above`."""
    random, log, begun = np.random.default_rng(parameters), events.EventLog(folder), start()
    object.__setattr__(begun, "parameters", parameters)
    begun.spec["train"]["steps"] = of
    log.write(begun)
    for number in range(1, steps + 1):
        loss = _true(parameters, number * TOKENS) * (1 + above + noise * random.standard_normal())
        log.write(step(number, loss=float(loss)))
    log.close()
    source = Source(folder, predicts=False)
    while source.poll():
        pass
    return source


def test_the_law_that_made_the_curves_is_found() -> None:
    found = fit([_curve(1e6, 4e7), _curve(4e6, 2e8), _curve(2e7, 1e9)])
    assert (found.size_power, found.tokens_power) == (pytest.approx(SIZE_POWER, abs=0.01), pytest.approx(TOKENS_POWER, abs=0.01))
    assert found.floor == pytest.approx(FLOOR, rel=0.01)
    larger = found.loss(1e8, np.array([1e10]))
    assert larger == pytest.approx(_true(1e8, 1e10), rel=0.01)


def test_noisy_curves_of_small_runs_foretell_a_larger_one_within_2_percent() -> None:
    found = fit([_curve(size, 40 * size, noise=0.005, seed=at) for at, size in enumerate((1e6, 3e6, 1e7, 3e7))])
    assert found.loss(1e8, np.array([4e9])) == pytest.approx(_true(1e8, 4e9), rel=0.02)


def test_no_coefficient_is_negative() -> None:
    rising = LossCurve(1e6, np.geomspace(1e6, 1e7, 20), np.linspace(2.0, 3.0, 20), np.ones(20))
    found = fit([rising])
    assert min(found.floor, found.by_size, found.by_tokens) >= 0


def test_two_sizes_say_nothing_about_a_third() -> None:
    with pytest.raises(
        ValueError, match=r"runs of one size, or of 3 sizes or more; these runs have 2: 1,000,000 parameters, 4,000,000"
    ):
        fit([_curve(1e6, 1e7), _curve(4e6, 1e7)])


def test_a_run_says_where_its_own_curve_leads(tmp_path: Path) -> None:
    source = _run(tmp_path, 4_000_000, steps=1000, of=3000)
    found = panels.panel(source, "loss")["law"]
    assert found["of"] == "its own curve" and found["step"][-1] == 3000
    assert found["end"] == pytest.approx(_true(4e6, 3000 * TOKENS), rel=0.02)
    assert abs(found["off"]) < 0.01
    source.close()


@pytest.mark.slow
def test_a_run_is_held_against_the_law_of_others(tmp_path: Path) -> None:
    small = [_run(tmp_path / str(size), size, steps=800, of=800) for size in (500_000, 1_500_000, 5_000_000)]
    larger = _run(tmp_path / "larger", 20_000_000, steps=400, of=800, above=0.05)
    larger.law = scaling_law.of_runs(small)
    found = panels.panel(larger, "loss")["law"]
    assert found["of"] == "3 other runs" and found["off"] == pytest.approx(0.05, abs=0.015)
    assert found["end"] == pytest.approx(_true(2e7, 800 * TOKENS), rel=0.02)
    for source in (*small, larger):
        source.close()


def test_a_law_of_one_size_is_not_held_against_another(tmp_path: Path) -> None:
    other, same = _run(tmp_path / "a", 500_000, steps=400, of=400), _run(tmp_path / "b", 500_000, steps=200, of=400)
    larger = _run(tmp_path / "c", 900_000, steps=200, of=400)
    same.law = larger.law = scaling_law.of_runs([other])
    assert panels.panel(same, "loss")["law"]["of"] == "1 other run"
    assert panels.panel(larger, "loss")["law"]["of"] == "its own curve"
    for source in (other, same, larger):
        source.close()


def test_a_short_run_has_no_law(tmp_path: Path) -> None:
    source = _run(tmp_path, 500_000, steps=20, of=400)
    assert panels.panel(source, "loss")["law"] is None
    with pytest.raises(ValueError, match="is too short for a scaling law: it has fewer than 50 steps"):
        scaling_law.of_runs([source])
    source.close()


def test_steps_that_were_done_again_count_once(tmp_path: Path) -> None:
    source = _run(tmp_path, 500_000, steps=300, of=600, noise=0)
    once = scaling_law.curve_of(source)
    source.close()
    log = events.EventLog(tmp_path)
    log.write(start(resumed_step=200))
    for number in range(201, 301):
        log.write(step(number, loss=float(_true(5e5, number * TOKENS))))
    log.close()
    source = Source(tmp_path, predicts=False)
    while source.poll():
        pass
    again = scaling_law.curve_of(source)
    assert once is not None and again is not None
    assert again.steps.sum() == once.steps.sum() and again.loss == pytest.approx(once.loss)
    source.close()
