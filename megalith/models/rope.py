"""Rotary position embedding (Su et al. 2021), in the half-split convention of Hugging Face's Llama weights."""

import math

import torch
from torch import Tensor

from megalith.spec.model import RopeScaling, RopeSpec


def frequencies(spec: RopeSpec, head_dim: int) -> Tensor:
    """Radians a position turns each channel pair by: fp64 [head_dim / 2] on the CPU, with Llama 3.1's scaling where asked."""
    plain = spec.theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim)
    return plain if spec.scaling is None else _stretched(plain, spec.scaling)


def _stretched(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1: wavelengths beyond the first context are stretched by `factor`, short ones kept, those between blended."""
    turns = scaling.original_context * plain / (2 * math.pi)  # turns each pair makes within the first context
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = ((turns - scaling.low_freq_factor) / span).clamp(0, 1)
    return plain * kept + plain / scaling.factor * (1 - kept)


def tables(spec: RopeSpec, head_dim: int, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of each position's angles: fp32 [..., seq, 1, head_dim / 2], ready to rotate [..., seq, heads, head_dim].

    Angles are formed in fp32 from fp32 frequencies, as the published weights were trained.
    """
    turn = frequencies(spec, head_dim).to(positions.device, torch.float32)
    angles = (positions.to(torch.float32).unsqueeze(-1) * turn).unsqueeze(-2)
    return angles.cos(), angles.sin()
