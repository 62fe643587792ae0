"""The length of a run, its warm-up and its checkpoints."""

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
