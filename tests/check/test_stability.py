"""Rules about responses to spikes, and the loss scale of fp16."""

import pytest

from tests.check.runs import advice, errors, found, is_named


@pytest.mark.parametrize(
    ("settings", "key", "said"),
    [
        (['stability.answers=["rewind", "skip"]'], "stability.answers", "Use ['skip', 'rewind']"),
        (['stability.answers=["skip", "skip"]'], "stability.answers", "Use ['skip']"),
        (['stability.answers=["skip"]', "stability.watch=false"], "stability.answers", "Use stability.watch = true"),
        (['stability.answers=["rewind"]', "fleet.recover=false"], "stability.answers", "set checkpoint.every"),
        (['stability.answers=["rewind"]', "plan.state.optimizer=disk"], "stability.answers", "Set checkpoint.every"),
    ],
)
def test_an_illegal_value_is_named_with_its_reason_and_a_way_out(settings: list[str], key: str, said: str) -> None:
    is_named(settings, key, said)


def test_rewinding_to_checkpoints_alone_is_advised_against() -> None:
    settings = ['stability.answers=["rewind"]', "fleet.memory_every=0", "checkpoint.every=5"]
    assert errors(*settings) == []
    assert "stability.answers" in advice(*settings)


def test_a_ladder_with_copies_is_let_be() -> None:
    assert found('stability.answers=["skip", "rewind", "lower", "stop"]') == []


FP16 = "train.precision=fp16"


def test_a_scale_is_a_power_of_two_above_its_floor() -> None:
    assert errors(FP16, "loss_scale.initial=1024", "loss_scale.floor=1024") == []
    is_named([FP16, "loss_scale.initial=1000"], "loss_scale.initial", "Use 512 or 1024.")
    is_named([FP16, "loss_scale.floor=3"], "loss_scale.floor", "is not a power of two")
    is_named([FP16, "loss_scale.initial=2", "loss_scale.floor=4"], "loss_scale.floor", "Use floor <= 2.")


def test_a_scale_without_fp16_changes_nothing() -> None:
    assert "loss_scale" in advice("train.precision=bf16", "loss_scale.initial=1024")
    assert "loss_scale" not in advice(FP16, "loss_scale.initial=1024") and "loss_scale" not in advice("train.precision=bf16")
