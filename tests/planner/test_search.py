import pytest

from megalith.planner.candidates import Space, candidates
from megalith.planner.search import search, training
from megalith.spec import cluster as clusters
from tests.cost.models import dense, mixture

SPACE = Space(microbatches=(1, 2), policies=(("none", ("attention.core",)), ("full", ("attention.core",))), most_chunks=2)


@pytest.fixture(autouse=True)
def _no_disk(monkeypatch):
    monkeypatch.setenv("MEGALITH_CACHE", "")


@pytest.mark.parametrize("model", [dense(), mixture()], ids=["dense", "mixture"])
def test_every_candidate_uses_all_devices_and_deals_the_batch_out_evenly(model):
    cluster = clusters.load("h100:8")
    plans = list(candidates(model, cluster, seq_len=256, global_batch=16))
    assert plans
    for plan in plans:
        assert plan.ranks == 8
        assert 16 % (plan.data * plan.microbatch) == 0
        assert plan.stages <= len(model.blocks)
        assert plan.bounds(len(model.blocks))[-1][1] == len(model.blocks) + 2


def test_candidates_differ():
    plans = list(candidates(dense(), clusters.load("h100:8"), seq_len=256, global_batch=16))
    assert len(plans) == len(set(plans))


def test_choices_come_fastest_first_and_fit():
    found = search(dense(), clusters.load("h100:8"), seq_len=256, global_batch=16, space=SPACE)
    steps = [choice.estimate.time.step for choice in found.choices]
    assert steps == sorted(steps)
    assert all(choice.estimate.fits for choice in found.choices)


def test_no_pareto_choice_is_slower_and_larger_than_another():
    found = search(dense(), clusters.load("h100:8"), seq_len=256, global_batch=16, space=SPACE)
    sizes = [choice.estimate.memory.total for choice in found.pareto]
    assert sizes == sorted(sizes, reverse=True)
    assert found.pareto[0] == found.best


def test_where_nothing_fits_the_closest_is_named():
    found = search(
        dense(512),
        clusters.load("h100:1"),
        seq_len=65_536,
        global_batch=64,
        space=Space(microbatches=(64,), policies=(("none", ()),)),
    )
    assert found.choices == ()
    assert found.closest is not None
    assert not found.closest.estimate.fits


def test_a_training_costs_its_hours():
    cluster = clusters.load("h100:8")
    best = search(dense(), cluster, seq_len=256, global_batch=16, space=SPACE).best
    assert best is not None
    whole = training(best, cluster, tokens=1e9)
    assert whole.device_hours == pytest.approx(whole.days * 24 * 8)
    assert whole.dollars == pytest.approx(whole.device_hours * cluster.price_per_hour)
