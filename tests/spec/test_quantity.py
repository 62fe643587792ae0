from pathlib import Path

import pytest

from megalith.spec import files
from megalith.spec.quantity import Thousand, whole

RUN = """
model.preset = "tiny"
data.path = "data"
train = {{ steps = {steps}, global_batch = {batch}, seq_len = {length} }}
"""


@pytest.mark.parametrize(
    ("text", "base", "number"),
    [("8k", 1024, 8192), ("1M", 1024, 2**20), ("10k", 1000, 10_000), ("1e5", 1000, 100_000), ("16Ki", 1000, 16384)],
)
def test_whole_numbers_may_have_letters(text: str, base: int, number: int) -> None:
    assert whole(text, Thousand(base)) == number


@pytest.mark.parametrize("text", ["8", "8.0", "1.5", "0.0001k", "x", "-1k", ""])
def test_what_has_no_letter_or_is_not_whole_is_none(text: str) -> None:
    assert whole(text, Thousand(1024)) is None


def read(tmp_path: Path, *overrides: str, **values: str) -> files.Reading:
    path = tmp_path / "run.toml"
    path.write_text(RUN.format(**{"steps": "100", "batch": "16", "length": "64"} | values))
    return files.read(path, overrides=overrides)


def test_a_run_file_and_a_setting_take_what_plan_takes(tmp_path: Path) -> None:
    train = read(tmp_path, steps='"10k"', batch='"1k"', length='"2k"').whole().spec.train
    assert (train.steps, train.global_batch, train.seq_len) == (10_000, 1024, 2048)
    assert read(tmp_path, "train.seq_len=8k").whole().spec.train.seq_len == 8192


def test_text_without_a_letter_is_no_number(tmp_path: Path) -> None:
    (problem,) = read(tmp_path, length='"64"').problems
    assert (problem.key, problem.way_out) == ("train.seq_len", "Write a whole number without quotes, such as 8.")


@pytest.mark.parametrize("steps", ["1e400", "1e400 tokens", "1e300T", "2.5 steps", "0.5 tokens"])
def test_amounts_that_are_not_whole_or_not_finite_are_refused(tmp_path: Path, steps: str) -> None:
    (problem,) = read(tmp_path, steps=f'"{steps}"').problems
    assert (problem.key, problem.value) == ("train.steps", steps)


@pytest.mark.parametrize(("steps", "number"), [("1.005K steps", 1005), ("2.5K steps", 2500), ("1.1M samples", 68750)])
def test_a_fraction_of_a_power_is_whole(tmp_path: Path, steps: str, number: int) -> None:
    assert read(tmp_path, steps=f'"{steps}"').whole().spec.train.steps == number


def test_no_way_out_is_to_correct_it(tmp_path: Path) -> None:
    wrong = [
        "plan.layers=[1.5]",
        "data.weights.x=much",
        "train.seed=-1",
        "optimizer.warmup=soon",
        "optimizer.beta1=2",
        "log=3",
        "name=1",
    ]
    problems = read(tmp_path, *wrong).problems
    assert len(problems) == len(wrong)
    assert not [each for each in problems if "Correct it" in each.way_out or "another value" in each.way_out]
