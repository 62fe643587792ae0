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
from megalith.planner.slowdown import by_term, slowdown
from megalith.report import plans
from megalith.spec.files import FILE, SPEC_FILE
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
