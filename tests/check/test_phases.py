"""Rules check every phase of a run, and a phase that has begun cannot change."""

import pytest

from megalith.check import check, check_resume
from megalith.spec.run import RunSpec
from tests.check.runs import errors, spec
from tests.prepared import hollow_data

RAMP = "train.batch_ramp=[{ begin = 400, global_batch = 12 }, { begin = 800, global_batch = 16 }]"


def test_the_batch_of_every_phase_divides():
    assert errors("train.global_batch=8", "plan.data=4", RAMP) == []
    (found,) = errors("train.global_batch=8", "plan.data=8", RAMP)
    assert (found.key, found.value) == ("train.batch_ramp[0].global_batch", 12)
    assert found.reason.startswith("from sample 400 on is not a multiple of plan.data 8")


def test_the_sequences_of_every_phase_fit_the_plan():
    run = ("plan.context=2", "train.seq_len=64", "train.global_batch=8")
    (found,) = errors(*run, "data.phases=[{ begin = 80, seq_len = 66 }]")
    assert (found.key, found.value) == ("data.phases[0].seq_len", 66)


def test_the_sequences_of_every_phase_are_whole_tiles():
    run = ("train.precision=nvfp4", "train.seq_len=64")
    assert errors(*run, "data.phases=[{ begin = 80, seq_len = 48 }]") == []
    (found,) = errors(*run, "data.phases=[{ begin = 80, seq_len = 40 }]")
    assert (found.key, found.value) == ("data.phases[0].seq_len", 40) and "of a tile's 16 tokens" in found.reason


def test_the_sequences_of_every_phase_fit_the_plan_of_every_site():
    run = ("sites.each=[{ share = 1 }, { plan = { context = 2 }, share = 1 }]", "train.seq_len=32")
    assert errors(*run, "data.phases=[{ begin = 80, seq_len = 36 }]") == []
    (found,) = errors(*run, "data.phases=[{ begin = 80, seq_len = 34 }]")
    assert (found.key, found.value) == ("data.phases[0].seq_len", 34) and found.reason.endswith("in sites.each.1.plan")


@pytest.mark.parametrize(
    ("batch", "ramp", "way_out"),
    [
        (4, 8, "Use release = false."),
        (8, 16, "Use release = false."),
        (8, 4, "Use release = false."),
        (8, 8, "Use plan.microbatch = 8, or release = false."),
    ],
)
def test_released_gradients_need_one_microbatch_in_every_phase(batch: int, ramp: int, way_out: str):
    """A microbatch that is the batch of one phase does not divide that of another, or is only a part of it."""
    run = ["plan.state.optimizer=disk", "plan.state.release=true", "train.precision=bf16", "plan.microbatch=4"]
    run += [f"train.global_batch={batch}", f"train.batch_ramp=[{{ begin = 400, global_batch = {ramp} }}]"]
    found = errors(*run)
    assert {problem.way_out for problem in found if problem.key == "plan.state.release"} == {way_out}
    change = way_out.partition("Use ")[2].rstrip(".").partition(", or")[0].replace(" = ", "=")
    assert errors(*run, change if change.startswith("plan") else f"plan.state.{change}") == []


def test_the_fallback_takes_the_batch_of_every_phase():
    run = ("plan.data=4", "fleet.nodes=4", "train.global_batch=12", "fleet.fallback.data=3")
    assert errors(*run) == []
    (found,) = errors(*run, "train.batch_ramp=[{ begin = 120, global_batch = 16 }]")
    assert found.key == "train.batch_ramp[0].global_batch" and found.reason.endswith("in fleet.fallback")


def test_domains_of_every_phase_are_weighed(tmp_path):
    hollow_data(tmp_path / "data", "austen", "code")
    weights = "data.phases=[{ begin = 80, weights = { nosuch = 1.0 } }]"
    found = [p for p in check(spec("train.global_batch=8", f"data.path={tmp_path / 'data'}", weights)) if p.severity == "error"]
    assert {p.key.partition(".weights")[0] for p in found} == {"data.phases[0]"}
    assert any(
        p.key == "data.phases[0].weights.nosuch" and "from sample 80 on the data has no such domain" in p.reason for p in found
    )


def _with(*phases: dict, ramp: tuple[dict, ...] = ()) -> RunSpec:
    base = spec("train.global_batch=8").model_dump()
    base["data"]["phases"], base["train"]["batch_ramp"] = phases, ramp
    return RunSpec.model_validate(base)


@pytest.mark.parametrize("ramp", [True, False])
def test_a_phase_that_has_begun_stays_and_later_ones_may_come(ramp):
    def run(*points: dict) -> RunSpec:
        return _with(ramp=points) if ramp else _with(*points)

    one, two, key = (
        {"begin": 80, "global_batch": 16},
        {"begin": 400, "global_batch": 8},
        "train.batch_ramp" if ramp else "data.phases",
    )
    before = run(one)
    assert check_resume(before, run(one, two), samples=400) == []
    assert check_resume(before, run(), samples=80) == [], "it has not begun"
    assert check_resume(run(one, two), run(one, two | {"begin": 800}), samples=400) == []
    (early,) = check_resume(before, run(one, two), samples=416)
    assert early.key == f"{key}[1]" and "no phase began at this sample: 416 samples are consumed" in early.reason
    (gone,) = check_resume(before, run(), samples=96)
    assert "a phase of 16 sequences" in gone.reason and "can no longer change" in gone.reason
    (other,) = check_resume(before, run(one | {"global_batch": 32}), samples=96)
    assert other.key == f"{key}[0]" and "or later may be added" in other.way_out
    assert check_resume(before, run(one, two)), "not without knowing how far it is"
