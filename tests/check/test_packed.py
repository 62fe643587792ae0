"""Inputs that bf16 keeps in 8 bits: tiles inside shards, and choices with an effect."""

import pytest

from tests.check.runs import advice, errors, found

KEPT = ("train.precision=bf16", "precision.kept=fp8", "model.preset=llama3.2-1b", "train.seq_len=4096")
EXPERTS = (*KEPT[:2], "model.preset=deepseek-tiny", "train.seq_len=128", "plan.data=2", "plan.expert_tensor=2")


def reasons(*settings: str) -> dict[str, str]:
    return {problem.key: f"{problem.reason}. {problem.way_out}" for problem in errors(*settings)}


def test_only_channels_that_are_kept_have_tiles() -> None:
    """With eight tensor ranks each has one key head of 64 channels, which no product keeps."""
    assert not errors(*KEPT, "plan.tensor=8", "plan.context=2")


def test_each_way_out_of_a_tile_on_two_ranks_is_one() -> None:
    cut = (*KEPT, "plan.tensor=2", "model.ffn=8000")
    said = reasons(*cut)["plan.tensor"]
    assert "leaves a rank 4000 of the 8000 channels that blocks.1.mlp.down keeps in fp8, not a multiple of a tile's 128" in said
    assert 'Use tensor = 1, precision.tile = 32, or precision.wide = ["*.mlp.down"].' in said
    for way_out in ("plan.tensor=1", "precision.tile=32", 'precision.wide=["*.mlp.down"]'):
        assert not errors(*cut, way_out)


def test_experts_are_cut_by_their_own_axis() -> None:
    assert "channels that blocks.1.mlp.experts keeps" in reasons(*EXPERTS)["plan.expert_tensor"]
    assert "plan.expert_tensor" not in reasons(*EXPERTS, 'precision.wide=["*.experts"]')


@pytest.mark.parametrize(
    ("settings", "key", "said"),
    [
        (["plan.tensor=2", "plan.overlap_tensor=2"], "precision.kept", "sent in pieces are kept wide"),
        (["plan.compile=true"], "precision.kept", "compiled code decides what is kept"),
        (["precision.wide_first=8", "precision.wide_last=8"], "precision.wide_first", "leaves none of the 16 blocks"),
    ],
)
def test_what_cannot_be_kept_so_is_refused(settings: list[str], key: str, said: str) -> None:
    assert said in reasons(*KEPT, *settings)[key]


def test_choices_without_an_effect_are_advised_against() -> None:
    assert "precision.kept" in advice(*KEPT, "train.precision=fp32")
    assert "precision.scale" in advice(*KEPT, "precision.scale=ocp")
    tiles = ("precision.tile=64", "precision.wide_first=0", 'precision.wide=["*.attention.*"]')
    assert not [problem for problem in found(*KEPT, *tiles) if problem.key.startswith("precision.")]
