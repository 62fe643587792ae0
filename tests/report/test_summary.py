"""The summary of a run in numbers."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megalith.events import EventLog, Merge
from megalith.report import tables
from megalith.report.history import history
from megalith.report.summary import of_folder
from tests.commands.calling import call
from tests.report.run_folder import STEPS, TOKENS, spec, start, step, write_run


def test_numbers_are_those_of_the_events(tmp_path: Path) -> None:
    write_run(tmp_path)
    found, run = of_folder(tmp_path), history(tmp_path)
    last = run.steps[-10:]
    assert (found.step, found.steps, found.ranks, found.parameters) == (run.steps[-1].step, STEPS, 4, 7_400_000)
    assert found.loss == sum(step.loss for step in last) / 10 and found.loss_steps == 10
    assert found.tokens == run.steps[-1].step * TOKENS
    assert found.validation_loss == run.validations[-1].loss and found.validation_step == run.validations[-1].step
    assert found.checkpoint_step == run.checkpoints[-1].step
    assert found.plan is not None and (found.plan["data"], found.plan["zero"]) == (2, 3)
    assert found.repeated_steps == len(run.repeated)


def test_a_folder_without_events_has_no_numbers(tmp_path: Path) -> None:
    found = of_folder(tmp_path)
    assert (found.state, found.step, found.loss, found.mfu, found.incidents) == ("not started", 0, None, None, ())


def test_report_prints_them_as_json_and_as_a_table(tmp_path: Path) -> None:
    write_run(tmp_path)
    (tmp_path / "run.toml").write_text('name = "first"\n')
    result = call("report", str(tmp_path), "--json")
    told, found = json.loads(result.stdout), of_folder(tmp_path)
    assert told["ok"] and told["loss"] == found.loss and told["tokens_per_second"] == found.tokens_per_second
    assert told["validation_domains"] == found.validation_domains
    shown = call("report", str(tmp_path)).stdout
    assert f"{found.loss:.4f} (mean of the last 10)" in shown
    assert f"at step {found.validation_step}" in shown
    assert tables.summary(tmp_path)


def test_merges_are_added_up(tmp_path: Path) -> None:
    write_run(tmp_path)
    assert of_folder(tmp_path).merges is None
    log = EventLog(tmp_path)
    (tmp_path / "run.toml").write_text('name = "first"\n')
    for after in (5, 9):
        numbers = {"losses": [3.0, None], "bytes_sent": 1 << 20, "bytes_received": 1 << 20, "norm": 1.0, "spread": 0.5}
        log.write(Merge(step=after, sent=after - 1, fragment=0, sites=1, count=2, waited=0.25, seconds=0.5, **numbers))
    log.close()
    found = of_folder(tmp_path)
    assert found.merges is not None and (found.merges.count, found.merges.sites) == (2, 2), "all, though one of them was away"
    assert found.merges.bytes_sent == 2 << 20 and found.merges.waited == 0.5
    assert found.merges.used == 1 - 0.5 / (1.0 + found.seconds_in_steps + found.repeated_seconds)
    assert "2 over 2 sites: the first site sent 2 MiB and waited 500 ms" in " ".join(call("report", str(tmp_path)).stdout.split())


@pytest.mark.parametrize("method", ["merge", "data-parallel"])
def test_waits_for_gradients_are_within_steps(method: str, tmp_path: Path) -> None:
    """Each step takes 0.5 s. Waits for weights come after the step, waits for gradients are a part of it."""
    log = EventLog(tmp_path)
    log.write(replace(start(), spec=spec() | {"sites": {"method": method}}))
    for number in range(1, 5):
        numbers = {"losses": [3.0, None], "bytes_sent": 1, "bytes_received": 1, "norm": 1.0, "spread": 0.5}
        log.write(Merge(step=number, sent=number, fragment=0, sites=2, waited=0.25, seconds=0.5, **numbers))
        log.write(step(number))
    log.close()
    merges = of_folder(tmp_path).merges
    assert merges is not None and merges.used == 1 - 0.25 / (0.5 if method == "data-parallel" else 1.0)
