"""Commands that turn text into prepared data."""

import json
from pathlib import Path

import pytest

from tests.commands.calling import call


@pytest.mark.slow
def test_text_becomes_data_that_a_run_can_use():
    """Tokenizer, data, inspection, verification and a check, in the order of a new user."""
    Path("novels.txt").write_text("\n\n".join(f"It is a truth universally acknowledged, number {n}." for n in range(400)))
    assert "trained: tok" in call("tokenizer", "train", "novels.txt", "--vocab", "300", "--out", "tok").stdout
    prepare = ["novels.txt", "--tokenizer", "tok", "--out", "data/novels", "--split", "line", "--validation", "0.1"]
    assert "training tokens" in call("data", "prepare", *prepare).stdout
    assert json.loads(call("data", "inspect", "data/novels", "--json").stdout)["domains"].keys() == {"novels"}
    assert "novels" in call("data", "inspect", "data/novels").stdout
    assert call("data", "verify", "data/novels").stdout.startswith("intact: data/novels")
    settings = ["--set", "data.path=data/novels", "--set", "train.steps=10"]
    assert call("check", "run.toml", *settings).exit_code == 0
    assert "Did you mean novels?" in call("check", "run.toml", *settings, "--set", "data.weights.novel=1").stderr


def test_a_folder_with_brackets_is_printed_as_it_is_named():
    Path("novels.txt").write_text("It is a truth universally acknowledged.")
    for folder in ("data[v2]", "data[/v2]"):
        call("data", "prepare", "novels.txt", "--tokenizer", "bytes", "--out", folder)
        assert call("data", "inspect", folder).stdout.startswith(f"{folder}: a vocabulary of 257 tokens")
