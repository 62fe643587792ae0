"""Frequencies equal the published ones, and tables follow positions."""

import math

import pytest
import torch

from megalith.models.rope import frequencies, magnitude, tables, temperature
from megalith.spec.model import RopeScaling, RopeSpec, YarnScaling
from tests.models.plain import llama
from tests.models.twin import config_of

LLAMA_3_1 = RopeSpec(theta=500_000.0, scaling=RopeScaling())


def test_channel_pairs_turn_by_powers_of_theta():
    found = frequencies(RopeSpec(theta=10_000.0), 8)
    torch.testing.assert_close(found, torch.tensor([1.0, 0.1, 0.01, 0.001], dtype=torch.float64))


def test_llama_3_1_frequencies_are_those_of_transformers():
    utils = pytest.importorskip("transformers.modeling_rope_utils", reason="transformers is not installed")
    spec = llama(dim=4096, heads=32, head_dim=128, context=131_072, rope_theta=500_000.0, rope_scaling=RopeScaling())
    expected, factor = utils.ROPE_INIT_FUNCTIONS["llama3"](config_of(spec), torch.device("cpu"))
    assert factor == 1.0
    torch.testing.assert_close(frequencies(LLAMA_3_1, 128).float(), expected, rtol=1e-6, atol=0)


def test_scaling_keeps_fast_turns_and_slows_the_slowest_by_its_factor():
    plain, scaled = frequencies(RopeSpec(theta=500_000.0), 128), frequencies(LLAMA_3_1, 128)
    wavelength = 2 * math.pi / plain
    fast, slow = wavelength < 8192 / 4.0, wavelength > 8192 / 1.0
    assert torch.equal(scaled[fast], plain[fast])
    torch.testing.assert_close(scaled[slow], plain[slow] / 8)
    between = ~fast & ~slow
    assert between.any() and (scaled[between] < plain[between]).all() and (scaled[between] > plain[between] / 8).all()
    assert (scaled.diff() < 0).all()


def test_tables_are_fp32_and_shaped_to_rotate_heads():
    cos, sin = tables(RopeSpec(), 8, torch.arange(10).reshape(2, 5))
    assert cos.shape == sin.shape == (2, 5, 1, 4)
    assert cos.dtype == sin.dtype == torch.float32
    torch.testing.assert_close(cos**2 + sin**2, torch.ones_like(cos))


def test_positions_that_restart_repeat_their_rows():
    cos, _ = tables(RopeSpec(), 8, torch.tensor([0, 1, 2, 0, 1]))
    assert torch.equal(cos[:2], cos[3:])


YARNS = {
    "deepseek-v2": (10_000.0, 64, YarnScaling(factor=40.0, original_context=4096, mscale=0.707, mscale_all_dim=0.707)),
    "deepseek-v3": (10_000.0, 64, YarnScaling(factor=40.0, original_context=4096, mscale=1.0, mscale_all_dim=1.0)),
    "kimi-k2": (50_000.0, 64, YarnScaling(factor=32.0, original_context=4096, beta_fast=1.0, mscale=1.0, mscale_all_dim=1.0)),
    "temperature in the tables": (10_000.0, 128, YarnScaling(factor=4.0, original_context=512)),
    "two temperatures": (10_000.0, 32, YarnScaling(factor=16.0, original_context=2048, mscale=0.9, mscale_all_dim=0.4)),
}


@pytest.mark.parametrize(("theta", "channels", "scaling"), YARNS.values(), ids=YARNS)
def test_yarn_frequencies_and_temperatures_are_those_of_transformers(theta, channels, scaling):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_apply_mscale

    settings = scaling.model_dump(exclude={"kind", "original_context"})
    settings |= {"rope_type": "yarn", "rope_theta": theta, "original_max_position_embeddings": scaling.original_context}
    context = int(scaling.factor * scaling.original_context)
    config = transformers.DeepseekV3Config(qk_rope_head_dim=channels, rope_parameters=settings, max_position_embeddings=context)
    expected, factor = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    spec = RopeSpec(theta=theta, scaling=scaling)
    torch.testing.assert_close(frequencies(spec, channels).float(), expected, rtol=1e-6, atol=0)
    assert magnitude(scaling) == pytest.approx(factor)
    assert temperature(scaling) == pytest.approx(yarn_apply_mscale(config.rope_parameters, 1.0))
    cos, sin = tables(spec, channels, torch.arange(300))
    torch.testing.assert_close(cos**2 + sin**2, torch.full_like(cos, factor**2))


def test_only_yarn_changes_temperatures():
    assert magnitude(None) == temperature(None) == magnitude(RopeScaling()) == temperature(RopeScaling()) == 1.0
