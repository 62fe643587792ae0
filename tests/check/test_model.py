"""Impossible sizes of a model, and sequences longer than its context."""

import re

import pytest

from tests.check.runs import HYBRID, advice, errors, is_named


@pytest.mark.parametrize(
    ("settings", "key", "said"),
    [
        (["model.heads=6"], "model.heads", "does not divide model.dim = 128. Use heads = 1, 2, 4 or 8."),
        (["model.kv_heads=3"], "model.kv_heads", "does not divide model.heads = 8"),
        (["model.head_dim=15"], "model.head_dim", "rotary"),
        (["model.heads=256", "model.kv_heads=256"], "model.heads", "does not divide model.dim"),
        (
            ["model.heads=64", "model.dim=32", "sites.each=[{}, { plan = { data = 2 } }]"],
            "model.heads",
            "does not divide model.dim",
        ),
    ],
)
def test_an_illegal_value_is_named_with_its_reason_and_a_way_out(settings: list[str], key: str, said: str):
    is_named(settings, key, said)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (["train.seq_len=512"], "train.seq_len"),
        (["model.preset=deepseek-tiny", "model.balanced=true"], "model.balanced"),
    ],
)
def test_what_is_valid_but_unwise_is_advice(settings: list[str], key: str):
    assert errors(*settings) == []
    assert key in advice(*settings)


def test_learned_positions_end_and_rotary_ones_only_advise():
    assert [p.key for p in errors("model.preset=gpt2", "train.seq_len=2048")] == ["train.seq_len"]
    assert errors("model.preset=llama2-7b", "train.seq_len=8192", "plan.zero=0") == []
    assert "train.seq_len" in advice("model.preset=llama2-7b", "train.seq_len=8192")


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (("model.head_dim=1",), "model.head_dim"),
        (("model.rotated=0.001",), "model.rotated"),
        (("model.head_dim=96", "model.rotated=0.33"), "model.rotated"),
        (("model.head_dim=2",), "model.rotated"),
    ],
)
def test_a_share_of_rotated_channels_is_named_with_a_valid_way_out(settings: tuple[str, ...], key: str):
    run = ("model.preset=nemotron4-15b", *settings)
    (problem,) = (p for p in errors(*run) if p.key.startswith("model."))
    (number,) = re.findall(r"[\d.]*\d", problem.way_out)
    assert problem.key == key and key not in [p.key for p in errors(*run, f"{key}={number}")]


def test_heads_that_do_not_rotate_may_be_odd():
    assert errors("model.preset=gpt2", "model.dim=36", "model.heads=12") == []
    assert [p.key for p in errors("model.preset=gemma2-2b", "model.head_dim=15")] == ["model.head_dim"]


def test_heads_of_mamba_come_in_even_groups():
    assert [p.key for p in errors(*HYBRID, "model.mamba_groups=3")] == ["model.mamba_groups"]
