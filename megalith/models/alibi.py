"""Attention with linear biases (Press et al. 2021, arXiv:2108.12409): scores fall with the distance of two tokens."""

from math import floor, log2

import torch
from torch import Tensor, nn

from megalith.models.batch import Batch

STEP = 256  # bf16 holds each whole number up to this one
CHANNELS = 4


class Alibi(nn.Module):
    """Appends CHANNELS channels to each query and key; their products are the biases of the scores.

    A softmax does not change if all scores of a query change by the same number, so slope * j replaces slope * (j - i). Key j's position is
    split into two numbers that bf16 holds exactly (for j < 65,536), and the query's slope into two numbers as well, so four products
    add up to the bias. Thus every attention kernel, also under context parallelism, computes the biases as a part of its scores.
    """

    def __init__(self, heads: int, scale: float) -> None:
        super().__init__()
        self.heads = heads
        self.scale = scale  # of the scores, with these products among them
        self.first, self.count = 0, heads  # the heads that are here: a seam for tensor parallelism

    def forward(self, q: Tensor, k: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return q [batch, seq, heads, channels] and k [batch, seq, kv_heads, channels], each with CHANNELS channels appended."""
        positions = batch.positions
        if positions is None:
            positions = torch.arange(k.shape[1], device=k.device)
        far, near = (part.to(k.dtype) for part in (positions // STEP, positions % STEP))
        of_keys = torch.stack((far, near, far, near), dim=-1).unsqueeze(-2)
        slope = self.slopes(q.device).to(torch.promote_types(q.dtype, torch.float32)) / self.scale
        high = slope.to(q.dtype)
        low = (slope - high).to(q.dtype)
        of_queries = torch.stack((high * STEP, high, low * STEP, low), dim=-1)
        return (
            torch.cat((q, of_queries.expand(*q.shape[:-1], CHANNELS)), dim=-1),
            torch.cat((k, of_keys.expand(*k.shape[:-1], CHANNELS)), dim=-1),
        )

    def slopes(self, device: torch.device) -> Tensor:
        """Return the slopes of this rank's heads: fp64 [heads]. The slopes are a geometric sequence down to 2^-8; heads beyond the largest
        power of two get slopes between the terms of this sequence."""
        even = 1 << floor(log2(self.heads))
        first = torch.arange(1, even + 1, dtype=torch.float64, device=device) * (-8 / even)
        others = (2 * torch.arange(self.heads - even, dtype=torch.float64, device=device) + 1) * (-4 / even)
        return torch.exp2(torch.cat((first, others)))[self.first : self.first + self.count]
