import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalith.data.mixture import PERIOD, Mixture

WEIGHTS = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=8)


def _counts_after_each(mixture: Mixture, domains: int, samples: int) -> np.ndarray:
    order = np.array([mixture.place(index)[0] for index in range(samples)])
    return np.cumsum(order[:, None] == np.arange(domains), axis=0)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(WEIGHTS)
def test_after_any_number_of_samples_every_domain_is_within_one_of_its_share(weights):
    samples = 5000
    counts = _counts_after_each(Mixture(weights), len(weights), samples)
    exact = np.arange(1, samples + 1)[:, None] * (np.array(weights) / sum(weights))
    rounding = samples * len(weights) / PERIOD
    assert np.abs(counts - exact).max() <= 1 - 1 / max(2 * len(weights) - 2, 2) + rounding


@pytest.mark.parametrize("weights", [(0.7, 0.3), (1, 1, 1), (5, 3, 2, 0.01), tuple(range(1, 21))])
def test_a_whole_period_and_so_any_number_keeps_to_the_rounded_shares(weights):
    mixture = Mixture(weights)
    counts = _counts_after_each(mixture, len(weights), mixture.period)
    exact = np.arange(1, mixture.period + 1)[:, None] * np.array(mixture.shares)
    assert np.abs(counts - exact).max() <= 1 - 1 / (2 * len(weights) - 2) + 1e-9
    assert np.abs(counts[-1] - exact[-1]).max() < 1e-6


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(WEIGHTS, st.integers(0, 10**15))
def test_a_sample_knows_how_many_earlier_ones_its_domain_had(weights, index):
    mixture = Mixture(weights)
    domain, earlier = mixture.place(index)
    before, after = mixture.counts(index), mixture.counts(index + 1)
    assert before[domain] == earlier
    assert (after - before).tolist() == [int(number == domain) for number in range(len(weights))]
    assert before.sum() == index


def test_every_domain_is_counted_off_without_a_gap():
    mixture, seen = Mixture([3, 1, 2.5]), [0, 0, 0]
    for index in range(10_000):
        domain, earlier = mixture.place(index)
        assert earlier == seen[domain]
        seen[domain] += 1


def test_a_domain_of_weight_0_never_comes_and_a_tiny_one_does():
    mixture = Mixture([0, 1e-12, 1])
    assert mixture.counts(PERIOD).tolist() == [0, 1, PERIOD - 1]


@pytest.mark.parametrize("weights", [[], [0.0], [-1.0, 2.0], [math.nan], [math.inf, 1.0]])
def test_weights_that_are_no_shares_are_refused(weights):
    with pytest.raises(ValueError, match="not valid shares"):
        Mixture(weights)
