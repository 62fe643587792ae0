"""`megalith init` writes a run file with the keys that matter, and `megalith models` lists presets."""

import json
import tomllib
from pathlib import Path

import pytest

from megalith.commands.init import KEYS, InitRequest, init, text
from megalith.commands.models import models
from megalith.commands.quickstart import recipe, steps
from megalith.planner import plan_result, request
from megalith.spec import files
from megalith.spec.presets import meant, presets
from tests.commands.calling import call


def test_a_run_for_this_machine_is_valid_and_has_twenty_keys_with_their_meaning(tmp_path: Path):
    result = call("init", "mine.toml", "--model", "tiny", "--data", "data", "--steps", "2k")
    assert result.exit_code == 0, result.output
    written = Path("mine.toml").read_text()
    held = [line.partition(" = ")[0] for line in written.splitlines() if " = " in line and not line.startswith("#")]
    assert len(held) == len(KEYS) == 21
    spec = files.load("mine.toml").spec
    assert (spec.model.name, spec.data.path, spec.train.steps) == ("tiny", "data", 2000)
    assert "# number of data-parallel ranks" in written
    assert call("check", "mine.toml").exit_code == 0


@pytest.mark.slow
def test_a_run_for_a_cluster_has_the_planners_layout():
    spec = init(InitRequest("tiny", cluster="h100:4", global_batch=16))
    question = request.resolve(request.PlanRequest(model="tiny", cluster="h100:4", global_batch=16, offload=False, out=True))
    best = plan_result.best_plans(question, top=1).found.best
    assert best is not None and spec.plan == best.plan and spec.plan.ranks == 4
    Path("cluster.toml").write_text(text(spec))
    assert files.load("cluster.toml").spec == spec
    assert tomllib.loads(text(spec))["model"] == {"preset": "tiny"}


@pytest.mark.parametrize("name", ["tiny", "gpt2", "mixtral-8x7b", "deepseek-tiny", "gemma2-2b"])
def test_what_is_written_is_read_back_as_it_was(name: str):
    model = next(iter([name] if name in presets() else meant(name)))
    spec = init(InitRequest(model))
    Path("back.toml").write_text(text(spec))
    assert files.load("back.toml").spec == spec


def test_a_model_that_has_no_name_is_an_error_and_a_file_that_is_there_is_kept():
    assert "--model is needed" in " ".join(call("init", "x.toml").stderr.replace("│", " ").split())
    assert "no preset has this name" in call("init", "x.toml", "--model", "zebra").stderr
    before = Path("run.toml").read_text()
    assert call("init", "--model", "tiny").exit_code == 1
    assert Path("run.toml").read_text() == before


def test_models_are_listed_with_their_sizes():
    rows = {row.name: row for row in models()}
    assert set(rows) == set(presets())
    assert rows["llama3-8b"].parameters == 8_030_261_248 == rows["llama3-8b"].active
    assert rows["deepseek-v3"].active < rows["deepseek-v3"].parameters / 10
    assert [row.name for row in models("llama 405b")] == ["llama3.1-405b"]
    told = json.loads(call("models", "8b", "--json").stdout)
    assert {"llama3-8b", "llama3.1-8b"} <= {row["name"] for row in told["models"]}
    assert call("models", "zebra").exit_code == 1


def test_a_model_is_a_line_of_a_terminal(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = call("models").stdout.splitlines()
    assert len(lines) == len(presets()) + 2
    assert max(map(len, lines[:-1])) <= 80


def test_a_first_run_is_the_commands_that_it_prints():
    found = steps(recipe(), Path("runs/q"), ["train.steps=3"])
    assert [line[0] for line in found] == ["tokenizer", "data", "train", "generate", "report"]
    assert found[2][-2:] == ["--set", "train.steps=3"]
    assert files.load(recipe()).spec.data.path == found[1][found[1].index("--out") + 1]
