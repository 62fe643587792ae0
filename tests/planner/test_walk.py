"""A walk from a starting point to a plan: each row allows one more technique, and has the planner's numbers."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megalith.cli import app
from megalith.commands import plan as commands
from megalith.planner.plan_result import best_plans, short
from megalith.planner.request import PlanRequest, resolve
from megalith.planner.rule_of_thumb import MODELS, table, thumb
from megalith.planner.walk import ELSEWHERE, PLAIN, TECHNIQUES, Walk, _host_too_small, walk
from tests.full import FULL, only_full

QUESTION = PlanRequest(model="llama3.2-1b", cluster="a10:8", seq_len=4096, global_batch=64, tokens="20B")
WORDS = ["--model", "llama3.2-1b", "--cluster", "a10:8", "--seq-len", "4k", "--global-batch", "64"]

PAGE = Path(__file__).parents[2] / "docs/guide/planning.md"


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGALITH_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("COLUMNS", "80")
        yield


@pytest.fixture(scope="module")
def found(cache: None) -> Walk:
    return walk(resolve(QUESTION))


@pytest.mark.slow
def test_the_first_layout_that_fits_has_the_techniques_of_its_row_and_of_those_before(found: Walk):
    assert [row.technique.name for row in found.fit] == ["data parallelism", "ZeRO 1"]
    held = [row.choice.estimate for row in found.fit if row.choice is not None]
    assert [one.fits for one in held] == [False, True]
    assert held[0].memory.total > held[1].memory.total
    first = found.first
    assert first is not None and short(first.plan) == "d8 z1 m1"


@pytest.mark.slow
def test_state_is_what_all_parameters_keep(found: Walk):
    assert found.parameters == 1_235_814_400
    assert found.state == 18 * found.parameters  # bf16: 2 + 4 + 4 + 8


def test_a_microbatch_deals_the_same_batch_out(found: Walk):
    assert [one.plan.microbatch for one in found.batch] == [1, 2, 4, 8]
    assert len({short(one.plan).rpartition(" m")[0] for one in found.batch}) == 1
    memory = [one.estimate.memory.total for one in found.batch]
    assert memory == sorted(memory)


@pytest.mark.slow
def test_no_row_is_slower_than_the_one_before_and_the_last_is_the_answer(found: Walk):
    steps = [row.choice.estimate.time.step for row in found.throughput if row.choice is not None]
    assert steps == sorted(steps, reverse=True)
    best = best_plans(resolve(QUESTION), top=1).found.best
    assert best is not None and steps[-1] == best.estimate.time.step
    assert found.result is not None and found.result.found.best == best


@pytest.mark.slow
def test_a_mixture_begins_with_its_experts_dealt_out():
    rows = walk(resolve(PlanRequest(model="deepseek-tiny", cluster="h100:8", seq_len=128, global_batch=64))).fit
    assert [row.technique.name for row in rows] == [PLAIN.name, TECHNIQUES[0].name]
    assert "no layout with the whole model" in rows[0].why and rows[1].choice is not None and rows[1].choice.plan.expert > 1


@pytest.mark.slow
def test_what_fits_nowhere_is_walked_to_the_end_and_says_what_would():
    found = walk(resolve(replace(QUESTION, model="llama3.1-405b")))
    assert found.first is None and found.result is None and not found.throughput
    assert found.fit[-1].technique is ELSEWHERE
    assert "would be enough" in found.problems[0].way_out


def test_a_layout_that_fits_its_devices_but_not_their_hosts_says_so(found: Walk):
    assert found.first is not None
    here = found.first.estimate
    away = replace(here, fits=False, memory=replace(here.memory, host=200 * 2.0**30))
    assert _host_too_small(away) == "the layout fits the devices, but needs 200 GiB of host memory for each device"
    assert _host_too_small(here) == _host_too_small(replace(away, limit=1)) == ""


@pytest.mark.slow
def test_the_command_prints_the_three_stages_and_writes_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["plan", "--guide", *WORDS, "--out", "plan.toml"])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert [line for line in lines if re.match(r"\d\. ", line)] == [
        "1. Does it fit?", "2. Which batch?", "3. What makes it fast?",
    ]  # fmt: skip
    assert max(len(line.rstrip()) for line in lines) <= 80
    assert lines[-2:] == ["written: plan.toml", "next: megalith check plan.toml"]
    assert "[plan]" in Path("plan.toml").read_text()


@pytest.mark.slow
def test_json_holds_every_row():
    said = json.loads(CliRunner().invoke(app, ["plan", "--guide", *WORDS, "--json"]).stdout)
    assert said["ok"] and [row["technique"] for row in said["fit"]] == ["data parallelism", "ZeRO 1"]
    assert said["answer"]["choices"][0]["layout"] == said["throughput"][-1]["layout"]
    assert [row["microbatches"] for row in said["batch"]] == [8, 4, 2, 1]


def test_what_nobody_gave_is_asked_for_and_empty_answers_take_defaults(monkeypatch: pytest.MonkeyPatch):
    given = iter(["llama3.2-1b", "8xa100", "", "", ""])
    monkeypatch.setattr(commands.typer, "prompt", lambda *args, **kwargs: next(given))
    asked = commands._interview(PlanRequest())
    assert asked == PlanRequest(model="llama3.2-1b", cluster="8xa100", compute_optimal=True)
    filled = resolve(asked)
    assert (filled.run.train.seq_len, filled.run.train.global_batch) == (8192, 512)
    assert "--seq-len was not given" in " ".join(filled.notes) and "about 4M tokens a step" in " ".join(filled.notes)


def test_a_missing_word_is_an_error_where_nobody_can_be_asked():
    result = CliRunner().invoke(app, ["plan", "--guide", "--model", "llama3.2-1b", "--json"])
    assert result.exit_code == 2
    assert [one["key"] for one in json.loads(result.stdout)["problems"]] == ["--cluster"]


@pytest.mark.slow
def test_a_walk_leads_to_no_prefill():
    result = CliRunner().invoke(
        app, ["plan", "--guide", "--model", "llama3.2-1b", "--cluster", "h100:1", "--forward-only", "--json"]
    )
    assert [one["key"] for one in json.loads(result.stdout)["problems"]] == ["--guide"]


@only_full  # the walk of a large model takes a minute
def test_the_walk_in_the_guide_is_the_planners():
    found = walk(resolve(PlanRequest(model="70b", cluster="64xh100", compute_optimal=True)))
    shown = re.findall(r"^   \| (\w+ ?\w*):? .*\| `(.*?)`.* \| ([\d.,]+)", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    rows = [(row.technique.name, row.choice) for row in found.fit]
    assert shown == [(name, short(one.plan), f"{one.estimate.memory.total / 2**30:,.1f}") for name, one in rows if one]


@pytest.mark.slow
def test_the_rule_of_thumb_in_the_guide_is_the_planners():
    """The smallest model's row is quick. `make test-full` tests all rows."""
    shown = PAGE.read_text(encoding="utf-8")
    if FULL:
        assert table() in shown
        return
    line = next(line for line in shown.splitlines() if line.startswith(f"| {MODELS[0]} "))
    found = thumb(MODELS[0], counts=(1,))
    assert found.least is not None
    assert line.split(" | ")[2:4] == [str(found.least.devices), found.least.techniques]
