import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megalith.cli import app
from megalith.planner.price import REMEDIES, prices
from megalith.planner.request import PlanRequest, ResolvedRequest, resolve
from megalith.spec.plan import Plan
from tests.prepared import hollow_data

RUN = """
name = "mine"
cluster = "h100:16"
model.preset = "llama-1b"
plan = { data = 1, tensor = 16, zero = 0 }
data.path = "data"
train = { steps = 1000, global_batch = 16, seq_len = 2048 }
optimizer.warmup = 10
"""


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGALITH_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("COLUMNS", "100")
        yield


@pytest.fixture(scope="module")
def asked(cache) -> ResolvedRequest:
    return resolve(PlanRequest(model="llama-1b", cluster="h100:16", seq_len=2048, global_batch=16, tokens="1B"))


def price_of(asked: ResolvedRequest, plan: Plan, key: str):
    (found,) = [one for one in prices(asked, plan) if one.problem.key == key]
    return found


def test_tensor_parallelism_across_nodes_costs_time_and_money(asked: ResolvedRequest):
    found = price_of(asked, Plan(tensor=16), "plan.tensor")
    assert found.instead is not None
    assert found.instead.tensor == 8
    assert found.seconds > 0
    assert found.verdict == "costs"
    price = asked.cluster.price_per_hour
    assert price is not None
    assert found.dollars == pytest.approx(found.seconds * asked.run.train.steps * 16 * price / 3600)


def test_an_unsharded_optimizer_costs_memory_and_the_time_to_update_it_all(asked: ResolvedRequest):
    found = price_of(asked, Plan(data=16, zero=0), "plan.zero")
    assert found.instead == Plan(data=16, zero=1)
    assert found.memory == pytest.approx(12 * 1.14e9 * 15 / 16, rel=0.05)  # master weights and moments
    assert found.seconds > 0


def test_few_microbatches_cost_a_bubble(asked: ResolvedRequest):
    found = price_of(asked, Plan(data=2, pipeline=8), "plan.pipeline")
    assert found.share > 0.05


def test_experts_over_the_network_are_put_beside_experts_inside_a_node(cache):
    asked = resolve(PlanRequest(model="switch-base-16", cluster="h100:16", seq_len=512, global_batch=64))
    found = price_of(asked, Plan(data=16, expert=16), "plan.expert")
    assert found.instead == Plan(data=16, expert=8)
    assert found.memory < 0  # with fewer ranks, each holds more experts


def test_a_plan_that_keeps_the_rules_has_nothing_to_pay(asked: ResolvedRequest):
    assert prices(asked, Plan(data=16)) == ()
    assert set(REMEDIES) == {"plan.tensor", "plan.pipeline", "plan.zero", "plan.recompute", "plan.expert"}


def test_check_prints_prices(tmp_path: Path):
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    hollow_data(tmp_path / "data", "text")
    words = ["check", str(path), "--price", "--set", f"data.path={tmp_path / 'data'}"]
    printed = CliRunner().invoke(app, words)
    assert printed.exit_code == 0, printed.output
    assert "plan.tensor = 16" in printed.stdout
    said = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert [one["problem"]["key"] for one in said["prices"]] == ["plan.tensor"]
    assert said["prices"][0]["layout"] == "t8 d2 z0 m1"
    assert CliRunner().invoke(app, [*words, "--set", "cluster=local"]).exit_code == 2
