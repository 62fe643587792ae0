"""Presets are the published models: their sizes add up to the published parameter counts."""

import pytest

from megalith.spec.model import ModelSpec
from megalith.spec.presets import presets

PUBLISHED = {  # from the papers and model cards, in the digits they print, or exact where a checkpoint's total is known
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
}


def parameters(model: ModelSpec) -> int:
    """Every weight, from the sizes alone."""
    dim, total = model.dim, model.embedding.vocab * model.dim
    for block in model.blocks:
        attention = block.attention
        queries_and_output = 2 * dim * attention.heads * attention.head_dim
        keys_and_values = 2 * dim * attention.kv_heads * attention.head_dim
        total += queries_and_output + keys_and_values + 3 * dim * block.mlp.hidden + 2 * dim
    return total + dim + (0 if model.head.tied else model.head.vocab * dim)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_published_number_of_parameters(name: str):
    assert parameters(presets()[name].build().build()) == PUBLISHED[name]


def test_every_published_family_is_checked_against_its_publication():
    assert {name for name, preset in presets().items() if preset.family != "small"} == set(PUBLISHED)


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [("tiny", 0.5e6, 1.5e6), ("quickstart", 5e6, 10e6), ("small-110m", 100e6, 120e6), ("llama-1b", 0.9e9, 1.2e9)],
)
def test_our_own_sizes_are_what_their_names_say(name: str, least: float, most: float):
    assert least < parameters(presets()[name].build().build()) < most


def test_every_preset_names_its_source_and_carries_its_own_name():
    for name, preset in presets().items():
        assert preset.source
        assert preset.build().name == name


def test_llama_3_1_stretches_its_rotary_positions_and_llama_3_does_not():
    assert presets()["llama3-8b"].build().rope_scaling is None
    stretched = presets()["llama3.1-405b"].build()
    assert stretched.rope_scaling is not None
    assert (stretched.rope_scaling.factor, stretched.context) == (8.0, 131072)


def test_heads_of_every_preset_make_up_its_width():
    for preset in presets().values():
        attention = preset.build().build().blocks[0].attention
        assert attention.heads * attention.head_dim == preset.build().dim
