"""A plan for a run with phases fits in all of them, and takes the sum of their times."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megalith.planner import plan_result
from megalith.planner.find import scorer_of, workload_of
from megalith.planner.plan_result import best_plans
from megalith.planner.request import PlanRequest, ResolvedRequest, resolve
from megalith.planner.run_file import as_run
from megalith.planner.search import Candidate, SearchResult
from megalith.spec import files
from megalith.spec.plan import Plan

RUN = """
cluster = "h100:8"
[model]
preset = "llama3.2-1b"
[data]
path = "none"
[[data.phases]]
begin = "4000 steps"
seq_len = 32768
global_batch = 16
[train]
steps = 5000
global_batch = 64
seq_len = 4096
batch_ramp = [{ begin = "1000 steps", global_batch = 128 }]
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "run.toml"
    path.write_text(RUN)
    return path


@pytest.mark.slow
def test_it_fits_in_all_phases_and_takes_the_sum_of_their_times(run: Path):
    found = best_plans(resolve(PlanRequest(path=run, offload=False)), top=2)
    assert [(one.phase.global_batch, one.phase.seq_len, one.steps) for one in found.phases] == [
        (64, 4096, 1000),
        (128, 4096, 3000),
        (16, 32768, 1000),
    ]
    assert all(one.estimate.fits for one in found.phases)
    seconds = sum(one.steps * one.estimate.time.step for one in found.phases)
    assert found.trainings[0].days == pytest.approx(seconds / 86_400)
    assert found.trainings[0].steps == 5000 and found.request.tokens == 4096 * (64_000 + 384_000) + 16_000 * 32768
    best = found.found.best
    assert best is not None and best.plan.data * best.plan.microbatch <= 16, "the least batch of all phases divides"
    assert found.to_json()["phases"][2]["memory"] > found.to_json()["phases"][1]["memory"]
    path = run.with_name("planned.toml")
    path.write_text(as_run(found))
    assert files.load(path).spec.data.phases == files.load(run).spec.data.phases


def test_a_question_about_another_batch_is_of_one_phase(run: Path):
    asked = resolve(PlanRequest(path=run, global_batch=256))
    assert asked.whole is None and asked.run.train.global_batch == 256


def test_a_plan_is_weighed_with_the_tiles_and_the_copies_that_the_search_counts(run: Path):
    given = resolve(PlanRequest(path=run))
    for tile, recover in ((4096, True), (0, False)):
        asked = given.with_values({"train.vocab_tile": tile, "fleet.recover": recover, "fleet.memory_every": 1})
        weighed = workload_of(asked, Plan(data=8))
        assert (weighed.vocab_tile, weighed.copied) == (tile, recover)


def test_where_nothing_fits_more_devices_are_judged_with_all_phases(run: Path, monkeypatch: pytest.MonkeyPatch):
    asked, plan = resolve(PlanRequest(path=run)), Plan(data=16)
    monkeypatch.setattr(plan_result, "_fits", lambda request, plan, scorer: True)
    monkeypatch.setattr(plan_result, "cheapest_remedy", lambda request, activations: "")
    valid = list[bool]()

    def find_form(request: ResolvedRequest, *, top: int) -> tuple[ResolvedRequest, SearchResult]:
        valid.append(request.is_valid(plan))
        return request, SearchResult((Candidate(plan, SimpleNamespace()),), (), 1, 0, None)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(plan_result, "find_form", find_form)
    short: Any = SimpleNamespace(total=2**40)
    assert "16 h100 would be enough" in plan_result._ways_out(asked, short, "optimizer", scorer_of(asked))
    assert valid == [True] and not asked.is_valid(plan)
