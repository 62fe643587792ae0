from itertools import pairwise

import pytest

from megalith.cost.estimate import estimate
from megalith.cost.workload import Practice
from megalith.planner.candidates import offloaded
from megalith.spec.plan import Plan
from tests.cost.models import dense, workload


@pytest.fixture(autouse=True)
def _no_disk(monkeypatch):
    monkeypatch.setenv("MEGALITH_CACHE", "")


def _optimizer(share: float, **values) -> float:
    return estimate(workload(dense(), offloaded(Plan(), share), practice=Practice(**values))).time.optimizer


def test_the_host_is_slower_the_more_it_updates():
    seconds = [_optimizer(share) for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
    steps = [more - less for less, more in pairwise(seconds)]
    assert steps == pytest.approx([steps[0]] * 4)
    assert steps[0] > seconds[0]


def test_less_state_is_updated_faster():
    assert _optimizer(1.0, moment_bytes=4) < _optimizer(1.0)
