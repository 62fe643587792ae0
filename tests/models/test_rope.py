"""Frequencies are the published ones, and tables follow positions."""

import math

import pytest
import torch

from megalith.models.rope import frequencies, tables
from megalith.spec.model import RopeScaling, RopeSpec
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
