"""Presets equal the published models: their modules have the published numbers of parameters."""

import pytest
import torch

from megalith.models.stage import Stage
from megalith.spec.families.gemma2 import Gemma2
from megalith.spec.families.llama import Llama
from megalith.spec.model import AttentionSpec, ModelSpec
from megalith.spec.presets import presets

EXACT = {  # totals of the released checkpoints
    "llama1-7b": 6_738_415_616,
    "llama1-13b": 13_015_864_320,
    "llama1-33b": 32_528_943_616,
    "llama1-65b": 65_285_660_672,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "deepseek-llm-7b": 6_910_365_696,
    "deepseek-llm-67b": 67_425_001_472,
}
PRINTED = {  # in the precision of the papers
    "bloom-560m": "559e6",
    "bloom-1b7": "1.72e9",
    "bloom-7b1": "7.07e9",
    "bloom-176b": "176.2e9",
    "nemotron4-15b": "15.6e9",
    "nemotron4-340b": "341e9",
    "gpt3-125m": "125e6",
    "gpt3-760m": "760e6",
    "gpt3-1.3b": "1.3e9",
    "gpt3-2.7b": "2.7e9",
    "gpt3-6.7b": "6.7e9",
    "gpt3-13b": "13.0e9",
    "gpt3-175b": "175.0e9",
    "palm-8b": "8.63e9",
    "palm-62b": "62.50e9",
    "palm-540b": "540.35e9",
    "dense-2t": "2.000e12",
    "mixtral-8x7b": "46.7e9",
    "mixtral-8x22b": "141e9",
    "qwen3-30b-a3b": "30.5e9",
    "qwen3-235b-a22b": "235e9",
    "nemotron3-nano-30b-a3b": "31.6e9",
    "grok-1": "314e9",
    "deepseek-v2-lite": "15.7e9",
    "deepseek-v2": "236e9",
    "switch-base-128": "7e9",
    "switch-large-128": "26e9",
    "switch-xxl-128": "395e9",
    "switch-c-2048": "1571e9",
}
OTHER = {
    "gpt3-350m": (350e6, 0.02),  # 355.9e6: the paper rounds down
    "kimi-k2": (1.04e12, 0.015),  # 1.026e12: the paper's own sizes give less than it prints
    "deepseek-v3": (671e9 + 14e9, 0.01),  # the 14e9 for multi-token prediction include an embedding and a head that it shares
}


def parameters(model: ModelSpec) -> int:
    """Count every parameter once, from the modules. Equal blocks are built once."""
    ends = [0, len(model.blocks) + 1]
    alike = {block: 1 + number for number, block in reversed([*enumerate(model.blocks)])}
    with torch.device("meta"):
        found = {n: p.numel() for part in ends for n, p in Stage(model, part, part + 1).parameters_by_name().items()}
        blocks = {b: sum(p.numel() for p in Stage(model, part, part + 1).parameters()) for b, part in alike.items()}
    return sum(found.values()) + sum(blocks[block] for block in model.blocks)


def last_digit(printed: str) -> float:
    """Return the value of one unit in the last printed digit."""
    digits, power = printed.split("e")
    return 10.0 ** (int(power) - len(digits.partition(".")[2]))


@pytest.mark.parametrize("name", EXACT)
def test_a_preset_has_the_parameters_of_the_released_checkpoint(name: str):
    assert parameters(presets()[name].build().build()) == EXACT[name]


@pytest.mark.parametrize("name", PRINTED)
def test_a_preset_has_the_printed_number_of_parameters(name: str):
    """Numbers agree within 1 %, or within the printed precision."""
    found, published = parameters(presets()[name].build().build()), float(PRINTED[name])
    assert abs(found - published) <= max(0.01 * published, last_digit(PRINTED[name]) / 2)


@pytest.mark.parametrize("name", OTHER)
def test_a_preset_has_about_the_number_of_parameters_its_name_says(name: str):
    published, tolerance = OTHER[name]
    assert abs(parameters(presets()[name].build().build()) / published - 1) <= tolerance


def test_every_published_preset_is_checked_against_its_publication():
    own = {name for name, preset in presets().items() if "of our own" in preset.source} - set(PRINTED)
    between = {f"switch-base-{experts}" for experts in (8, 16, 32, 64, 256)}  # released models without published sizes
    assert set(presets()) - own - between == EXACT.keys() | PRINTED.keys() | OTHER.keys()


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("tiny", 0.5e6, 1.5e6),
        ("quickstart", 5e6, 10e6),
        ("small-110m", 100e6, 120e6),
        ("llama-1b", 0.9e9, 1.2e9),
        ("dense-2t", 1.98e12, 2.02e12),
    ],
)
def test_our_own_sizes_are_what_their_names_say(name: str, least: float, most: float):
    assert least < parameters(presets()[name].build().build()) < most


def test_every_preset_names_its_source_its_family_and_itself():
    for name, preset in presets().items():
        assert preset.source
        assert (preset.build().name, preset.build().family) == (name, preset.values["family"])


def test_llama_3_1_stretches_its_rotary_positions_and_llama_3_does_not():
    plain, stretched = presets()["llama3-8b"].build(), presets()["llama3.1-405b"].build()
    assert isinstance(plain, Llama)
    assert isinstance(stretched, Llama)
    assert plain.rope_scaling is None
    assert stretched.rope_scaling is not None
    assert (stretched.rope_scaling.factor, stretched.context) == (8.0, 131072)


def test_heads_of_every_llama_and_gpt_2_make_up_its_width():
    for preset in presets().values():
        attention = preset.build().build().blocks[0].attention
        if preset.group == "gpt2" or preset.values["family"] == "llama":
            assert isinstance(attention, AttentionSpec)
            assert attention.heads * attention.head_dim == preset.build().dim


def test_gemma_2_scales_its_scores_by_what_the_paper_says():
    """The scale uses dim / heads for the 27B, and the heads' own width for the others."""
    for name, scalar in (("gemma2-2b", 256), ("gemma2-9b", 256), ("gemma2-27b", 4608 / 32)):
        model = presets()[name].build()
        assert isinstance(model, Gemma2)
        attention = model.build().blocks[0].attention
        assert isinstance(attention, AttentionSpec)
        assert attention.scale == pytest.approx(scalar**-0.5)
