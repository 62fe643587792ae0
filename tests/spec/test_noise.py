import numpy as np
import pytest

from megalith.spec.noise import absent, estimate, parts
from megalith.spec.plan import Plan


def test_estimates_are_the_covariance_and_the_mean_that_gradients_are_drawn_from():
    """Gradients of sequences have a known mean and covariance. Estimates from 4,000 steps of 8 sequences in 4 parts are within four
    standard errors."""
    draw = np.random.default_rng(0)
    mean, deviations = draw.normal(size=20), draw.uniform(0.1, 3.0, size=20)
    signal, noise = float(mean @ mean), float(deviations @ deviations)
    each = mean + deviations * draw.normal(size=(4000, 4, 2, 20))  # step, part, sequence, weight
    small, large = (each.mean(2) ** 2).sum(-1).mean(1), (each.mean((1, 2)) ** 2).sum(-1)
    found = np.array([estimate(small=s, large=b, part=2, batch=8) for s, b in zip(small, large, strict=True)])
    for value, expected in zip(found.T, (signal, noise), strict=True):
        assert abs(value.mean() - expected) < 4 * value.std() / len(found) ** 0.5


def test_estimates_do_not_depend_on_the_batch_sizes():
    for part, batch in ((1, 2), (1, 64), (8, 64)):
        found = estimate(small=3.0 + 40 / part, large=3.0 + 40 / batch, part=part, batch=batch)
        assert found == pytest.approx((3.0, 40.0))


@pytest.mark.parametrize(
    ("plan", "count", "why"),
    [
        ({"data": 4}, 4, ""),
        ({"data": 4, "zero": 2}, 12, ""),
        ({"zero": 2}, 3, ""),
        ({}, 1, "plan.zero = 2"),
        ({"context": 2, "data": 2}, 1, "with plan.context > 1"),
        ({"pipeline": 2, "schedule": "dualpipe", "zero": 1}, 2, ""),
    ],
)
def test_a_plan_shows_it_or_says_why_not(plan: dict, count: int, why: str):
    spec = Plan.model_validate(plan)
    assert parts(spec, 3) == count
    assert (absent(spec, 3) == "") == (why == "") and why in absent(spec, 3)
