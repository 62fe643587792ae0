"""Summary of a run in numbers."""

import json
from pathlib import Path

from megalith.report import tables
from megalith.report.history import history
from megalith.report.summary import of_folder
from tests.commands.calling import call
from tests.report.run_folder import STEPS, TOKENS, write_run


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
