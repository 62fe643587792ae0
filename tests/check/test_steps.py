"""The length of a run, its warm-up and its checkpoints."""

import re

import pytest

from tests.check.runs import advice, errors, found, is_named


@pytest.mark.parametrize(
    ("settings", "key", "said"),
    [
        (["optimizer.warmup=101"], "optimizer.warmup", "Use warmup <= 100"),
        (["optimizer.schedule=wsd", "optimizer.decay=0.95"], "optimizer.decay", "Use decay <= 0.9,"),
    ],
)
def test_an_illegal_value_is_named_with_its_reason_and_a_way_out(settings: list[str], key: str, said: str):
    is_named(settings, key, said)


@pytest.mark.parametrize(
    ("steps", "warmup", "decay"), [(10_000, 1233, 0.95), (10_000, 1233, 9000), (100, 99, 5.0), (100, 99, 1.5), (10, 0, 1.4)]
)
def test_the_suggested_decay_is_valid(steps: int, warmup: int, decay: float):
    run = ["optimizer.schedule=wsd", f"train.steps={steps}", f"optimizer.warmup={warmup}"]
    (problem,) = errors(*run, f"optimizer.decay={decay}")
    asked = re.findall(r"[\d.]*\d", problem.way_out)[0]
    assert errors(*run, f"optimizer.decay={asked}") == [] and float(asked) != 1


def test_a_decay_that_the_schedule_does_not_have_is_let_be():
    assert errors("optimizer.schedule=cosine", "optimizer.decay=2.5") == []
    (problem,) = errors("optimizer.schedule=wsd", "optimizer.decay=2.5")
    assert problem.way_out == "Use 2, or a share of the updates up to 1."


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (["train.steps=1000"], "checkpoint.every"),
    ],
)
def test_what_is_valid_but_unwise_is_advice(settings: list[str], key: str):
    assert errors(*settings) == []
    assert key in advice(*settings)


@pytest.mark.parametrize(
    "settings",
    [
        ["optimizer.schedule=wsd", "optimizer.decay=0.9"],
        ["optimizer.warmup=100%"],
        ["train.steps=10", "optimizer.warmup=2%"],
    ],
)
def test_what_is_valid_and_wise_is_let_be(settings: list[str]):
    assert found(*settings) == []
