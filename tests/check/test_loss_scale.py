"""The loss scale of fp16."""

from tests.check.runs import advice, errors, is_named

FP16 = "train.precision=fp16"


def test_a_scale_is_a_power_of_two_above_its_floor() -> None:
    assert errors(FP16, "loss_scale.initial=1024", "loss_scale.floor=1024") == []
    is_named([FP16, "loss_scale.initial=1000"], "loss_scale.initial", "Use 512 or 1024.")
    is_named([FP16, "loss_scale.floor=3"], "loss_scale.floor", "is not a power of two")
    is_named([FP16, "loss_scale.initial=2", "loss_scale.floor=4"], "loss_scale.floor", "Use floor <= 2.")


def test_a_scale_without_fp16_changes_nothing() -> None:
    assert "loss_scale" in advice("train.precision=bf16", "loss_scale.initial=1024")
    assert "loss_scale" not in advice(FP16, "loss_scale.initial=1024") and "loss_scale" not in advice("train.precision=bf16")
