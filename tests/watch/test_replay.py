"""Our replay of published traces gives the same slowdowns as their authors found."""

import warnings
from pathlib import Path

import numpy as np
import pytest

from benchmarks.stragglers import TRACES, kept, replayed
from megalith.watch.replay import medians

FOLDER = Path(__file__).parent / "traces"
"""Seconds of the computations in three traces of Lin et al. 2025 (arXiv:2505.05713; github.com/ByteDance-Seed/StragglerAnalysis,
Apache-2.0), and the published slowdowns, written by `benchmarks/stragglers.py --keep`."""


@pytest.mark.slow
@pytest.mark.parametrize("trace", TRACES)
def test_the_slowdown_of_each_stage_and_data_rank_is_the_published_one_within_2_percent(trace: str) -> None:
    seconds, published = kept(FOLDER, trace)
    found = dict(replayed(seconds))
    assert found.keys() == published.keys() and len(found) > 6
    assert found == pytest.approx(published, rel=0.02)


@pytest.mark.parametrize("rows", [1, 2, 5, 20])
def test_medians_of_columns_are_those_of_numpy(rows: int) -> None:
    random = np.random.default_rng(rows)
    values = random.standard_normal((rows, 300))
    values[random.random(values.shape) < 0.3] = np.nan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a column without numbers
        np.testing.assert_array_equal(medians(values), np.nanmedian(values, axis=0))
