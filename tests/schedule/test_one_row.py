"""A schedule is one row of a table: check, planner, predictions and the guide know it without another edit."""

from dataclasses import replace

import pytest

from megalith.cost.constants import calibration
from megalith.cost.workload import Workload
from megalith.planner.candidates import Space, candidates
from megalith.planner.explain import neighbours
from megalith.planner.plan_result import short
from megalith.planner.search import Scorer, assumed
from megalith.prove.axes import AXES
from megalith.report import guide
from megalith.schedule import lower, problems
from megalith.schedule.action import Action, Schedule, loop
from megalith.schedule.table import SCHEDULES, Chunks, Kind, build, schedule_problems
from megalith.spec import cluster
from megalith.spec.plan import Plan
from megalith.spec.presets import presets
from tests.check.runs import advice, errors, found


def one_at_a_time(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Each microbatch runs forward and backward before the next one enters, with its weight gradients last."""
    kinds = ("F", "I", "W")
    row = [tuple(Action(kind, rank, number) for number in range(microbatches) for kind in kinds) for rank in range(ranks)]
    return Schedule("one at a time", tuple(row), ranks, microbatches, loop(ranks, 1))


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> str:
    """Add the row, and nothing else."""
    monkeypatch.setenv("MEGALITH_CACHE", "")  # the disk cache is keyed by source files, and this row is in none of them
    row = Kind(one_at_a_time, "one at a time", splits_backward=True, searched=True, in_flight=lambda ranks, microbatches: 1)
    monkeypatch.setitem(SCHEDULES, "toy", row)
    return "toy"


def test_it_is_built_and_verified(toy: str):
    assert schedule_problems(toy, ranks=2, microbatches=4, chunks=1) == []
    assert problems(lower(build(toy, ranks=2, microbatches=4), 1)) == []
    assert "'toy'" in str(schedule_problems("zb-v", ranks=2, microbatches=4, chunks=1)[0])


def test_check_knows_it_and_its_traits(toy: str):
    asked = [f"plan.schedule={toy}", "plan.pipeline=2"]
    assert errors(*asked) == [] and advice(*asked) == []
    assert advice(*asked, "plan.compile=true") == ["plan.compile"]
    (chunks,) = errors(*asked, "plan.chunks=2")
    assert (chunks.key, "needs one stage a rank" in chunks.reason) == ("plan.chunks", True)


@pytest.mark.parametrize(("traits", "key", "said"), [
    ({"needs_post_validation": True}, "plan.schedule", "up to 1 microbatches in flight"),
    ({"needs_post_validation": True, "instead": "1f1b"}, "plan.schedule", 'or schedule = "1f1b"'),
    ({"chunks": Chunks(1, 4, None)}, "plan.chunks", "Use chunks = 4 or more."),
    ({"bidirectional": True, "instead": "zb-v"}, "plan.schedule", "Use schedule = 'zb-v' and chunks = 2"),
    ({"splits_backward": False, "idle": lambda *sizes: 96.0}, "plan.pipeline", "idle for 33.3% of a step"),
])  # fmt: skip
def test_check_reads_every_trait_from_its_row(toy: str, traits: dict, key: str, said: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(SCHEDULES, toy, replace(SCHEDULES[toy], **traits))
    asked = [f"plan.schedule={toy}", "plan.pipeline=2", "train.global_batch=64"]
    asked += ["plan.pipeline=20", "model.layers=20"] if "idle" in traits else []
    assert any(problem.key == key and said in str(problem) for problem in found(*asked))


def test_activations_are_counted_by_what_is_in_flight(toy: str):
    said = {
        name: next(
            p.reason
            for p in found(f"plan.schedule={name}", "plan.pipeline=4", "train.seq_len=32768")
            if p.key == "plan.recompute"
        )
        for name in (toy, "1f1b")
    }
    sizes = {name: float(reason.split("about ")[1].split(" ")[0]) for name, reason in said.items()}
    assert sizes[toy] == pytest.approx(sizes["1f1b"] / 4, rel=0.1)


def test_two_copies_of_its_stages_are_laid_out(toy: str, monkeypatch: pytest.MonkeyPatch):
    plan = Plan(schedule=toy, pipeline=2)
    assert (plan.sides, plan.dp_size) == (1, 1)
    monkeypatch.setitem(SCHEDULES, toy, replace(SCHEDULES[toy], bidirectional=True))
    assert (plan.sides, plan.dp_size) == (2, 2)


def test_the_planner_tries_it_and_predicts_its_time(toy: str):
    model, cluster_spec = presets()["tiny"].build().build(), cluster.load("h100:8")
    ask = {"seq_len": 256, "global_batch": 32}
    space = Space(microbatches=(1,), most_chunks=1)
    assert toy in space.schedules
    plans = [plan for plan in candidates(model, cluster_spec, **ask, space=space) if plan.pipeline == 2 and plan.tensor == 1]
    own = next(plan for plan in plans if plan.schedule == toy)
    plain = own.model_copy(update={"schedule": "1f1b"})
    assert plain in plans
    scorer = Scorer(calibration())
    slow, fast = (scorer.estimate(Workload(model, plan, cluster_spec, **ask)).time for plan in (own, plain))
    assert slow.bubble > 5 * fast.bubble  # ranks wait for each other in every microbatch
    assert (plain.schedule in short(plain), toy in short(own)) == (False, True)
    assert f"1f1b -> {toy}" in dict(neighbours(Workload(model, plain, cluster_spec, **ask)))


def test_software_hides_the_exchange_of_experts_where_it_does(toy: str, monkeypatch: pytest.MonkeyPatch):
    plan = Plan(schedule=toy, pipeline=2)
    assert not assumed(plan).overlap_expert
    monkeypatch.setitem(SCHEDULES, toy, replace(SCHEDULES[toy], hides_exchange=True))
    assert assumed(plan).overlap_expert
    dense, experts = (presets()[name].build().build() for name in ("tiny", "deepseek-tiny"))
    tried = [
        {plan.schedule for plan in candidates(model, cluster.load("h100:16"), seq_len=256, global_batch=32)}
        for model in (dense, experts)
    ]
    assert [toy in names for names in tried] == [False, True]


def test_the_guide_draws_it(toy: str):
    assert "one at a time" in guide.pictures()[f"schedule-{toy}"]()


def test_combinations_are_drawn_from_every_row():
    assert list(AXES["pipeline"]) == ["1", *SCHEDULES]
