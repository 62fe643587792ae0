"""Rules about narrow layers and products: patterns match layers, something stays narrow, and products may have formats of their own."""

import pytest

from tests.check.runs import advice, errors

MODEL = ("model.preset=llama3.2-1b", "train.seq_len=4096")
FP8 = ("train.precision=fp8", *MODEL)
KEPT = ("train.precision=bf16", "precision.kept=fp8", *MODEL)
FOUR_THEN_EIGHT = ("train.precision=nvfp4", "precision.input_gradient=mxfp8", "precision.weight_gradient=mxfp8", *MODEL)


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


def test_each_product_may_have_a_format_of_its_own() -> None:
    assert not errors(*FOUR_THEN_EIGHT)
    assert not errors("train.precision=fp8", "precision.forward=wide", "precision.input_gradient=wide", *MODEL)
    assert not errors("train.precision=fp8", "precision.forward=fp8", "precision.kept=fp8", *MODEL), "its own name means narrow"


@pytest.mark.parametrize(
    ("setting", "way_out"),
    [
        ("precision.granularity=row", 'granularity = "tile"'),
        ("precision.multiply=codes", 'multiply = "wide"'),
        ("precision.dispatch=fp8", 'dispatch = "wide"'),
        ("precision.combine_gradients=fp8", 'combine_gradients = "wide"'),
        ("precision.kept=fp8", 'kept = "wide"'),
        ("precision.gather=fp8", 'gather = "wide"'),
    ],
)
def test_a_setting_for_all_numbers_of_a_layer_needs_one_format(setting: str, way_out: str) -> None:
    key, cause = setting.partition("=")[0], 'precision.forward = "mxfp4" in fp8: it needs all products in one format'
    problems = errors("train.precision=fp8", "precision.forward=mxfp4", *MODEL, setting)
    (said,) = (one for one in problems if one.key == key and cause in one.reason)
    assert said.way_out == f'Use {way_out}, or forward = "narrow".'


def test_each_way_out_of_several_formats_is_one() -> None:
    asked = ("train.precision=fp8", "precision.kept=fp8", *MODEL)
    mixed = ("precision.forward=mxfp8", "precision.weight_gradient=mxfp8")
    (said,) = errors(*asked, *mixed)
    assert said.way_out == 'Use kept = "wide", or forward = "narrow" and weight_gradient = "narrow".'
    assert not errors(*asked)
    assert not errors("train.precision=fp8", *mixed, *MODEL)


def test_a_history_needs_one_format_too() -> None:
    asked = ("train.precision=fp8", "precision.granularity=tensor", "precision.history=4", *MODEL)
    assert not errors(*asked)
    assert reasons(*asked, "precision.input_gradient=mxfp8").keys() == {"precision.granularity", "precision.history"}


def test_shards_hold_whole_tiles_of_every_format() -> None:
    """With eight tensor ranks each has one key head of 64 channels: whole tiles of 16 and 32, not of 128."""
    assert "plan.tensor" not in reasons(*FOUR_THEN_EIGHT, "plan.tensor=8")
    said = reasons(*FOUR_THEN_EIGHT, "precision.input_gradient=fp8", "plan.tensor=8")["plan.tensor"]
    assert "not a multiple of a tile's 128" in said
    assert "plan.tensor" not in reasons(*FOUR_THEN_EIGHT, "precision.weight_gradient=fp8", "plan.tensor=8"), (
        "its tiles are of tokens"
    )
    said = reasons(*FOUR_THEN_EIGHT, "precision.weight_gradient=fp8", "train.seq_len=4160")["train.seq_len"]
    assert "not a multiple of a tile's 128 tokens" in said


def test_rules_of_a_format_hold_for_each_product_in_it() -> None:
    """Scales of MXFP8 are powers of two, tensors in NVFP4 have one scale, and gradients in 4 bits are drawn."""
    scales = ("train.precision=fp8", "precision.scale=fp32", *MODEL)
    assert not errors(*scales)
    assert (
        "products in mxfp8, whose scales are powers of two"
        in reasons(*scales, "precision.weight_gradient=mxfp8")["precision.scale"]
    )
    pieces = ("train.precision=fp8", "plan.tensor=2", "plan.overlap_tensor=2", *MODEL)
    assert not errors(*pieces)
    assert "products in nvfp4" in reasons(*pieces, "precision.forward=nvfp4")["plan.overlap_tensor"]
    assert "stochastic rounding" in reasons(*pieces, "precision.weight_gradient=mxfp4")["plan.overlap_tensor"]
    turned = ("train.precision=fp8", "precision.tile=48", "train.seq_len=4800", "model.context=4800", *MODEL[:1])
    assert "precision.tile" not in reasons(*turned)
    assert "needs a power of two" in reasons(*turned, "precision.weight_gradient=mxfp4")["precision.tile"]


def test_a_choice_counts_for_the_formats_that_products_have() -> None:
    assert "precision.gradients" in advice("train.precision=nvfp4", "precision.gradients=e5m2", *MODEL)
    assert "precision.gradients" not in advice(*FOUR_THEN_EIGHT, "precision.gradients=e5m2")
