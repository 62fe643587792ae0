"""The check of a run, as it is printed."""

import json

import pytest

from tests.commands.calling import call


def test_a_legal_run_is_described():
    result = call("check", "run.toml", "--set", "plan.data=2")
    assert result.exit_code == 0
    assert (
        "first is legal: 2 ranks (data 2 x tensor 1 x pipeline 1), 32 microbatches a step, 8,192 tokens a step" in result.stdout
    )


def test_show_prints_every_value_and_its_origin():
    shown = call("check", "run.toml", "--show", "--set", "train.steps=9").stdout
    assert "# command line" in shown
    assert "# preset tiny" in shown
    assert "[optimizer]" in shown


@pytest.mark.parametrize("setting", ["plan.tensor=3", "plan.tensr=3"])
def test_check_speaks_json(setting: str):
    result = call("check", "run.toml", "--json", "--set", setting)
    said = json.loads(result.stdout)
    assert result.exit_code == 2
    assert said["ok"] is False
    assert {"severity", "key", "value", "reason", "way_out", "source"} == set(said["problems"][0])
    assert said["problems"][0]["source"] == "command line"


def test_check_says_the_whole_run_as_json():
    said = json.loads(call("check", "run.toml", "--json").stdout)
    assert said["ok"] is True
    assert said["spec"]["train"]["steps"] == 100
    assert said["provenance"]["model.dim"] == "preset tiny"
