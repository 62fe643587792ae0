"""A run's step compared with its prediction, term by term."""

import json
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest

from megalith import events
from megalith.commands.report import report
from megalith.cost.estimate import estimate
from megalith.cost.predicted import workload_of
from megalith.events.log import EventLog
from megalith.planner.measured import measured
from megalith.planner.slowdown import by_term, slowdown
from megalith.report import plans
from megalith.spec.files import FILE, SPEC_FILE
from megalith.spec.phases import Phases, during
from megalith.spec.run import RunSpec
from megalith.watch.predict import ask
from tests.specs import tiny_run

RUN = tiny_run(plan={"data": 2, "pipeline": 2}, train={"seq_len": 256, "global_batch": 16}).model_copy(
    update={"cluster": "h100:4"}
)


@pytest.fixture(autouse=True)
def _no_disk(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MEGALITH_CACHE", "")


def folder(path: Path, **factors: float) -> Path:
    """Write a run whose steps took the predicted time, except for some terms."""
    path.mkdir()
    (path / SPEC_FILE).write_text(RUN.model_dump_json())
    (path / FILE).touch()
    here = {name: value * factors.get(name, 1.0) for name, value in by_term(estimate(workload_of(RUN)).time).items()}
    kinds = {"forward": here["compute"] / 3, "backward": here["compute"] * 2 / 3} | {
        name: here[name] for name in ("communication", "bubble", "optimizer", "other")
    }
    log = EventLog(path)
    for number in range(1, 8):
        log.write(events.Step(number, 3.0, 1.0, 1e-3, 64, 64 * number, sum(kinds.values()), 1.0, None, kinds, {"peak": 2**30}))
    return path


def test_the_term_that_was_made_slower_is_to_blame(tmp_path: Path):
    for name in ("compute", "bubble", "other"):
        found = slowdown(folder(tmp_path / name, **{name: 50.0}))
        assert found.to_blame is not None and found.to_blame.name == name
        assert name in plans.slower(found)
        assert found.to_blame.over == pytest.approx(49 * found.to_blame.predicted)


def test_a_run_that_takes_what_was_predicted_has_nothing_to_blame(tmp_path: Path):
    found = slowdown(folder(tmp_path / "run"))
    assert found.to_blame is None
    assert found.measured == pytest.approx(found.predicted)
    assert "No term" in plans.slower(found)


def started(run: RunSpec, resumed: int) -> events.RunStarted:
    return events.RunStarted(run.model_dump(mode="json"), "H100", run.ranks, resumed, {}, None, "", 1.0, "", 1)


def step(number: int, seconds: float) -> events.Step:
    return events.Step(number, 3.0, 1.0, 1e-3, 64, 64 * number, seconds, 1.0, None, {"forward": seconds}, {"peak": 2**30})


def test_steps_with_an_earlier_plan_are_not_compared(tmp_path: Path):
    """100 steps of 10 s, then 30 steps of 5 s with another plan, the first of them slow, and a last start after the 125th."""
    before = RUN.model_copy(update={"plan": RUN.plan.model_copy(update={"data": 1})})
    (tmp_path / SPEC_FILE).write_text(RUN.model_dump_json())
    log = EventLog(tmp_path)
    for run, first, last, seconds in ((before, 1, 100, 10.0), (RUN, 101, 130, 5.0), (RUN, 126, 130, 5.0)):
        log.write(started(run, first - 1))
        for number in range(first, last + 1):
            log.write(step(number, 99.0 if 100 < number < 104 else seconds))
    found = slowdown(tmp_path, tried=False)
    assert found.measured == 5.0
    assert found.predicted == pytest.approx(estimate(workload_of(RUN)).time.step)


def test_steps_on_fewer_devices_are_compared_with_the_plan_that_they_had(tmp_path: Path):
    fewer = RUN.model_copy(update={"plan": RUN.plan.model_copy(update={"data": 1})})
    run = folder(tmp_path / "run")
    log = EventLog(run)
    log.write(started(fewer, 7))
    for number in range(8, 13):
        log.write(step(number, 5.0))
    assert slowdown(run, tried=False).predicted == pytest.approx(estimate(workload_of(fewer)).time.step)


def test_a_phase_is_compared_with_the_prediction_of_its_own_batch(tmp_path: Path):
    points = ({"begin": 16 * 10, "global_batch": 32}, {"begin": 16 * 10 + 32 * 10, "weights": {"a": 1.0}})
    spec = RUN.model_copy(update={"data": RUN.data.model_validate({"path": "unused", "phases": points})})
    (tmp_path / SPEC_FILE).write_text(spec.model_dump_json())
    one, two = (estimate(workload_of(during(spec, phase))).time.step for phase in Phases.of(spec).all[:2])
    assert two > 1.2 * one
    log, firsts = EventLog(tmp_path), {1: (0, 16), 11: (1, 32), 21: (2, 32)}
    for number in range(1, 24):
        if number in firsts:
            log.write(events.PhaseBegan(number, 0, firsts[number][0], 256, firsts[number][1], {}))
        log.write(step(number, one if number < 11 else two))
    found = slowdown(tmp_path, tried=False)
    assert found.measured / found.predicted == pytest.approx(1.0)
    assert measured([tmp_path], "megalith")[0].ratio == pytest.approx(1.0)


def test_what_is_to_be_tried_gains_most_first_and_takes_from_what_was_slow(tmp_path: Path):
    found = slowdown(folder(tmp_path / "run", bubble=100.0))
    gains = [one.gain for one in found.tries]
    assert gains and gains == sorted(gains, reverse=True)
    assert "pipeline 2 -> 1" in {one.change for one in found.tries}
    assert all(one.gain > 0 for one in found.tries)


def test_a_folder_that_is_no_run_or_names_no_cluster_is_refused(tmp_path: Path):
    with pytest.raises(OSError):
        slowdown(tmp_path)
    (tmp_path / SPEC_FILE).write_text(RUN.model_copy(update={"cluster": "local"}).model_dump_json())
    with pytest.raises(ValueError, match="needs a named cluster"):
        slowdown(tmp_path)


def test_the_page_of_a_run_shows_each_term_beside_its_prediction(tmp_path: Path):
    """Nothing about a prediction is recorded in a run, so this holds for runs of earlier versions too."""
    run = folder(tmp_path / "run", bubble=50.0)
    text = report(run).read_text()
    found = slowdown(run, tried=False)
    assert "Predicted and measured" in text
    assert escape(plans.slower(found)) in text
    for one in found.terms:
        assert f"<tr><td>{one.name}</td>" in text
    assert found.tries == ()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"cluster": "local"}, "a prediction needs a named cluster"),
        ({"plan": {"tenser": 2}}, "another version of Megalith wrote the run's spec.json: this version refuses plan.tenser"),
    ],
)
def test_the_page_of_a_run_says_why_nothing_is_predicted(tmp_path: Path, change: dict[str, Any], said: str):
    run = folder(tmp_path / "run")
    (run / SPEC_FILE).write_text(json.dumps(json.loads(RUN.model_dump_json()) | change))
    assert f"Nothing is predicted: {said}" in unescape(report(run).read_text())
    if "plan" in change:  # the live page has the same reason
        assert said in ask(run)["why"]
