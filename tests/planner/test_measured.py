"""A user's own measurements change predictions according to their reliability."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from megalith import events
from megalith.cost.estimate import estimate
from megalith.cost.predicted import workload_of
from megalith.events.log import EventLog
from megalith.planner.confidence import Confidence, confidence_of
from megalith.planner.measured import measured
from megalith.planner.plan_result import best_plans
from megalith.planner.published.rows import read
from megalith.planner.request import PlanRequest, resolve
from megalith.spec.files import SPEC_FILE
from megalith.spec.problem import SpecErrors
from tests.specs import tiny_run

WORDS: dict[str, Any] = {"model": "tiny", "cluster": "h100:4", "seq_len": 128, "global_batch": 8, "tokens": "1B"}


@pytest.fixture(autouse=True)
def _no_disk(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MEGALITH_CACHE", "")


def run_folder(path: Path, ratio: float, cluster: str = "h100:2") -> Path:
    """Write a finished run whose steps, except the first ones, took this share of their prediction."""
    spec = tiny_run(plan={"data": 2}).model_copy(update={"cluster": cluster})
    path.mkdir()
    (path / SPEC_FILE).write_text(spec.model_dump_json())
    seconds, log = ratio * estimate(workload_of(spec)).time.step, EventLog(path)
    for number in range(1, 10):
        log.write(
            events.Step(number, 3.0, 1.0, 1e-3, 64, 64 * number, 99.0 if number < 4 else seconds, 1.0, None, {}, {"peak": 2**30})
        )
    return path


def table(path: Path, ratios: list[float]) -> Path:
    """Return a user's rows in the format of the bundled file."""
    row = next(row for row in read() if row.name == "torchtitan-a100-0004")
    seconds = row.number("step_time_s") or 0.0
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(row.columns))
        writer.writeheader()
        for number, ratio in enumerate(ratios):
            changed = {"id": f"mine-{number}", "source_group": "mine", "step_time_s": seconds * ratio, "tokens_per_s_per_gpu": ""}
            writer.writerow(row.columns | changed)
    return path


def test_a_run_s_steps_after_its_first_ones_stand_beside_their_prediction(tmp_path: Path):
    (one,) = measured([run_folder(tmp_path / "run", 1.25)], "megalith")
    assert (one.name, one.kind, one.ratio) == ("run", "time.dense", pytest.approx(1.25))
    assert one.memory is not None


@pytest.mark.slow
def test_times_and_what_follows_from_them_move_and_their_interval_shrinks(tmp_path: Path):
    plain = best_plans(resolve(PlanRequest(**WORDS)), top=2)
    rows = measured([run_folder(tmp_path / str(n), 1.2) for n in range(3)], "megalith")
    moved = best_plans(resolve(PlanRequest(**WORDS)), top=2, measured=rows)
    factor = moved.confidence.factor
    assert 1.1 < factor < 1.2
    one, other = plain.found.choices[0], moved.found.choices[0]
    assert other.plan == one.plan
    assert other.estimate.time.step == pytest.approx(factor * one.estimate.time.step)
    assert moved.trainings[0].days == pytest.approx(factor * plain.trainings[0].days)
    assert moved.confidence.time.half_width < plain.confidence.time.half_width
    assert "3 measured rows of Megalith on h100" in moved.confidence.words


def test_a_row_that_is_far_off_is_named_and_not_followed(tmp_path: Path):
    rows = measured([run_folder(tmp_path / str(n), ratio) for n, ratio in enumerate((1.1, 2.6, 1.12, 1.08))], "megalith")
    found = confidence_of(resolve(PlanRequest(**WORDS)), rows)
    assert found.factor == pytest.approx(1.1, rel=0.05)
    assert "1 is ignored: its time is 2.60 times the predicted time" in found.words


def test_a_table_is_read_with_the_software_that_is_planned_for(tmp_path: Path):
    first, second = measured([table(tmp_path / "mine.csv", [1.0, 1.5])], "pytorch")
    assert second.ratio == pytest.approx(1.5 * first.ratio)
    assert first.name == "mine-0"


def test_everything_that_cannot_be_used_is_said_at_once(tmp_path: Path):
    local = tmp_path / "local"
    local.mkdir()
    (local / SPEC_FILE).write_text(tiny_run(plan={"data": 1}).model_dump_json())
    bad = tmp_path / "bad.csv"
    bad.write_text("id,model_spec,n_gpus\nx," + json.dumps({}).replace('"', '""') + ",2\n")
    with pytest.raises(SpecErrors) as caught:
        measured([local, bad, tmp_path / "none"], "megalith")
    assert [problem.value for problem in caught.value.problems] == [str(local), str(bad), str(tmp_path / "none")]
    assert "needs a named cluster" in caught.value.problems[0].reason and "gives no sizes" in caught.value.problems[1].reason


def test_without_rows_nothing_is_moved():
    found = confidence_of(resolve(PlanRequest(**WORDS)))
    assert found.factor == 1.0
    assert "so the interval is as wide as for any unmeasured software" in found.words
    elsewhere: dict[str, Any] = {"cluster": "mi300x:4"}
    far = confidence_of(resolve(PlanRequest(**(WORDS | elsewhere))))
    assert far.time.half_width > found.time.half_width and "a device like mi300x" in far.words


def _of_shape(model: str, cluster: str, seq_len: int) -> Confidence:
    return confidence_of(resolve(PlanRequest(model=model, cluster=cluster, seq_len=seq_len, global_batch=32_768)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "cluster", "seq_len", "words"),
    [
        ("llama3.1-8b", "h100:16384", 8192, "as many devices as 16,384 (the most in a measured row: 6,144)"),
        ("deepseek-v3", "h100:1024", 32_768, "as many tokens a sequence as 32,768 (the most in a measured row: 8,192)"),
        ("deepseek-tiny", "h100:64", 4096, "so few parameters as "),
    ],
)
def test_sizes_outside_of_the_measured_ones_widen_the_interval(model: str, cluster: str, seq_len: int, words: str):
    """Each doubling widens it further; within the measured sizes all intervals are equal."""
    inside = _of_shape("mixtral-8x7b" if "deepseek" in model else "llama3.1-8b", "h100:64", 8192)
    found = _of_shape(model, cluster, seq_len)
    assert found.time.half_width > 1.1 * inside.time.half_width
    assert words in found.words and "no measured row" not in inside.words
    name, _, count = cluster.partition(":")
    if "devices" in words:
        assert _of_shape(model, f"{name}:{2 * int(count)}", seq_len).time.half_width > found.time.half_width
        assert _of_shape(model, f"{name}:4096", seq_len).time == inside.time


@pytest.mark.slow
def test_memory_is_less_certain_for_larger_models_than_measured_ones():
    small, large = (_of_shape(model, "h100:4096", 8192).memory for model in ("llama3.1-70b", "llama3.1-405b"))
    assert large.half_width > 1.2 * small.half_width


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"cluster": "a100-80gb:4"}, "1 measured row of a dense model by Megalith on h100: no effect on times"),
        ({"software": "megatron-te"}, "1 measured row of a dense model by Megalith on h100: no effect on times"),
        ({"model": "deepseek-tiny"}, "1 measured row of a dense model by Megalith on h100: no effect on times"),
    ],
)
def test_rows_of_another_stack_move_no_time_and_the_answer_says_so(tmp_path: Path, asked: dict[str, Any], said: str):
    rows = measured([run_folder(tmp_path / "run", 1.3)], "megalith")
    request = resolve(PlanRequest(**(WORDS | asked)))
    found, plain = confidence_of(request, rows), confidence_of(request)
    assert (found.factor, found.time) == (plain.factor, plain.time)
    assert said in found.words and "--measured gives no row of such a model by" in found.words
    assert (found.memory != plain.memory) == ("software" not in asked)


def test_the_order_of_rows_does_not_matter(tmp_path: Path):
    rows = measured([run_folder(tmp_path / str(n), ratio) for n, ratio in enumerate((1.1, 2.6, 1.12, 1.08))], "megalith")
    request = resolve(PlanRequest(**WORDS))
    assert confidence_of(request, rows[::-1]).time == pytest.approx(confidence_of(request, rows).time)


def test_runs_as_long_as_predicted_leave_times_nearly_alone(tmp_path: Path):
    """With more rows predictions come nearer to them, whatever the common bias of all stacks."""
    rows = measured([run_folder(tmp_path / str(n), 1.0) for n in range(6)], "megalith")
    request = resolve(PlanRequest(**WORDS))
    off = [abs(confidence_of(request, rows[:number]).factor - 1) for number in (1, 3, 6)]
    assert off[0] > off[1] > off[2]
    assert off[2] < 0.01
