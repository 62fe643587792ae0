"""Rotary position embedding (Su et al. 2021), in the half-split convention of Hugging Face's Llama weights."""

import math

import torch
from torch import Tensor

from megalith.spec.model import LinearScaling, RopeScaling, RopeSpec, YarnScaling


def frequencies(spec: RopeSpec, head_dim: int) -> Tensor:
    """The angle, in radians, by which each position rotates each channel pair: fp64 [head_dim / 2] on the CPU, with the spec's scaling."""
    plain = spec.theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim)
    match spec.scaling:
        case None:
            return plain
        case RopeScaling():
            return _stretched(plain, spec.scaling)
        case YarnScaling():
            return _interpolated(plain, spec.theta, spec.scaling)
        case LinearScaling():
            return plain / spec.scaling.factor


def _stretched(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Scale frequencies as in Llama 3.1: wavelengths beyond the original context are stretched by `factor`, short wavelengths do not
    change, and wavelengths between the two limits are interpolated."""
    turns = scaling.original_context * plain / (2 * math.pi)  # turns each pair makes within the first context
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = ((turns - scaling.low_freq_factor) / span).clamp(0, 1)
    return plain * kept + plain / scaling.factor * (1 - kept)


def _interpolated(plain: Tensor, theta: float, scaling: YarnScaling) -> Tensor:
    """YaRN (arXiv:2309.00071, section 3.2): the frequencies of channel pairs that make more than `beta_fast` turns within the original
    context do not change, and those of pairs with fewer than `beta_slow` turns are divided by `factor`. Between the two limits, the
    original and the divided frequency are mixed linearly by pair number. The limits are rounded outwards to whole pair numbers, as in the
    released code."""
    channels = 2 * len(plain)

    def pair(turns: float) -> float:
        return channels * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(pair(scaling.beta_fast)), 0), min(math.ceil(pair(scaling.beta_slow)), channels - 1)
    span = high - low or 0.001  # the same pair at both ends: a step
    slowed = ((torch.arange(len(plain), dtype=torch.float64, device="cpu") - low) / span).clamp(0, 1)
    return plain / scaling.factor * slowed + plain * (1 - slowed)


def magnitude(scaling: RopeScaling | YarnScaling | LinearScaling | None) -> float:
    """Return the factor by which YaRN multiplies the rotated channels of queries and keys: `_mscale` of `mscale`, divided by
    `_mscale` of `mscale_all_dim` (DeepSeek-V2); 1 without YaRN."""
    if not isinstance(scaling, YarnScaling):
        return 1.0
    return _mscale(scaling.factor, scaling.mscale) / _mscale(scaling.factor, scaling.mscale_all_dim)


def temperature(scaling: RopeScaling | YarnScaling | LinearScaling | None) -> float:
    """Return the factor by which YaRN multiplies attention scores: the square of `_mscale` of `mscale_all_dim` (DeepSeek-V2); else 1."""
    if not isinstance(scaling, YarnScaling):
        return 1.0
    return _mscale(scaling.factor, scaling.mscale_all_dim) ** 2


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def tables(spec: RopeSpec, head_dim: int, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of each position's angles, fp32 [..., seq, 1, head_dim / 2], which rotate queries and keys [..., seq,
    heads, head_dim].

    Angles are computed in fp32 from fp32 frequencies, as in the training of the published weights. Both tables are multiplied by YaRN's
    `magnitude`.
    """
    turn = frequencies(spec, head_dim).to(positions.device, torch.float32)
    angles = (positions.to(torch.float32).unsqueeze(-1) * turn).unsqueeze(-2)
    factor = magnitude(spec.scaling)
    if factor == 1.0:
        return angles.cos(), angles.sin()
    return angles.cos() * factor, angles.sin() * factor
