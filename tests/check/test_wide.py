"""Layers that stay wide: patterns match layers, and a layer stays narrow."""

import pytest

from tests.check.runs import errors

FP8 = ("train.precision=fp8", "model.preset=llama3.2-1b", "train.seq_len=4096")
KEPT = ("train.precision=bf16", "precision.kept=fp8", *FP8[1:])


def reasons(*settings: str) -> dict[str, str]:
    return {problem.key: f"{problem.reason}. {problem.way_out}" for problem in errors(*settings)}


@pytest.mark.parametrize("run", [FP8, KEPT], ids=["fp8", "kept in bf16"])
@pytest.mark.parametrize(
    ("pattern", "nearest"),
    [
        ("*.mlp.upp", "*.mlp.up"),
        ("mlp.down", "*.mlp.down"),
        ("blocks.16.mlp.gate", "blocks.6.mlp.gate"),
        ("head", "*.attention.q"),
    ],
)
def test_a_pattern_that_matches_no_layer_is_refused_with_the_nearest_name(
    run: tuple[str, ...], pattern: str, nearest: str
) -> None:
    said = reasons(*run, f'precision.wide=["{pattern}", "*.attention.v"]')["precision.wide"]
    assert f"matches none of the 112 layers of blocks. A pattern must match a whole name, such as {nearest};" in said
    assert not errors(*run, f'precision.wide=["{nearest}"]')


@pytest.mark.parametrize(("run", "otherwise"), [(FP8, 'train.precision = "bf16"'), (KEPT, 'precision.kept = "wide"')])
@pytest.mark.parametrize(
    "settings",
    [('precision.wide=["*"]',), ("precision.wide_first=15", "precision.wide_last=0", 'precision.wide=["blocks.15.*"]')],
)
def test_patterns_that_leave_no_layer_narrow_are_refused(run: tuple[str, ...], otherwise: str, settings: tuple[str, ...]) -> None:
    said = reasons(*run, *settings)
    assert [*said] == ["precision.wide"] and otherwise in said["precision.wide"]
    assert not errors(*run, *settings[:-1])


def test_bf16_keeps_no_input_of_attentions_output() -> None:
    others = ["*.mlp.*", "*.attention.q", "*.attention.k", "*.attention.v"]
    assert [*reasons(*KEPT, f"precision.wide={others}")] == ["precision.wide"]
    assert not errors(*FP8, f"precision.wide={others}")


GRADIENTS = ("precision.input_gradient=wide", "precision.weight_gradient=wide")


def test_a_run_without_a_narrow_product_is_refused() -> None:
    asked = (*FP8, "precision.forward=wide")
    said = reasons(*asked, *GRADIENTS)["precision.forward"]
    assert 'together with input_gradient = "wide" and weight_gradient = "wide" leaves no product in fp8' in said
    for fewer in (GRADIENTS[:1], GRADIENTS[1:], (*GRADIENTS, "precision.forward=narrow")):
        assert not errors(*asked, *fewer)


def test_experts_alone_have_two_narrow_products() -> None:
    experts = ("train.precision=fp8", "model.preset=deepseek-tiny", "train.seq_len=128", "precision.forward=wide", GRADIENTS[0])
    assert not errors(*experts)
    both = (*experts, "precision.weight_gradient=wide")
    assert "leaves no product in fp8" in reasons(*both)["precision.forward"]
    assert not errors(*both, "precision.expert_weight_gradient=narrow")
    alone = (*experts, 'precision.wide=["*.attention.*", "*.mlp.up", "*.mlp.gate", "*.mlp.down", "*.shared.*"]')
    said = 'together with input_gradient = "wide" and expert_weight_gradient = "wide" leaves no product in fp8'
    assert said in reasons(*alone)["precision.forward"]
    assert not errors(*alone, "precision.expert_weight_gradient=narrow")
    assert not errors(*alone, "precision.input_gradient=narrow")


def test_blocks_that_are_all_wide_are_said_once() -> None:
    assert [*reasons(*FP8, "precision.wide_first=16", 'precision.wide=["*"]')] == ["precision.wide_first"]
