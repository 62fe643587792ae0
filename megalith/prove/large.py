"""Compares long sums on one large tensor. The models that parity trains are small, so an error that grows with a tensor's size would not
be seen in them."""

import torch

from megalith.parallel.gradients import sum_of_squares
from megalith.prove.compare import USUAL, Row

ROW, ROWS = 1 << 12, 1 << 11
"""The tensor has ROWS equal rows: 8 million elements, for whose norm a CPU's plain sum in fp32 is wrong by 1e-4."""


def norm_of_large_tensor(device: torch.device) -> Row:
    """Compare the gradient norm of a large tensor, as training computes it, with the norm in fp64."""
    row = torch.randn(ROW, generator=torch.Generator().manual_seed(0))
    exact = ROWS * float(row.double().square().sum())
    found = float(sum_of_squares([row.to(device).repeat(ROWS)]))
    gap = abs((found / exact) ** 0.5 - 1)
    return Row("gradient norm of a large tensor, relative", gap, USUAL.norm, f"{ROW * ROWS:,} elements")
