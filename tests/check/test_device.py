"""Clusters, devices and links."""

import pytest

from tests.check.runs import advice, errors, found, is_named


@pytest.mark.parametrize(
    ("settings", "key", "said"),
    [
        (["cluster=h10"], "cluster", "Did you mean 'h100'?"),
        (["cluster=cpu", "train.device=cuda"], "train.device", "contradicts"),
    ],
)
def test_an_illegal_value_is_named_with_its_reason_and_a_way_out(settings: list[str], key: str, said: str):
    is_named(settings, key, said)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (["cluster=h100:64", "plan.tensor=16", "model.heads=16", "model.kv_heads=16"], "plan.tensor"),
        (["cluster=h100", "model.preset=switch-base-16", "plan.data=16", "plan.expert=16"], "plan.expert"),
        (["cluster=v100-32gb"], "train.precision"),
    ],
)
def test_what_is_valid_but_unwise_is_advice(settings: list[str], key: str):
    assert errors(*settings) == []
    assert key in advice(*settings)


@pytest.mark.parametrize(
    "settings",
    [
        ["plan.tensor=4", "cluster=h100"],
    ],
)
def test_what_is_valid_and_wise_is_let_be(settings: list[str]):
    assert found(*settings) == []
