"""The random Hadamard transform of a tile's rows, which spreads outliers before rows are rounded to few bits."""

import torch
from torch import Tensor

from megalith.kernels.draws import signs


def rotated(x: Tensor, size: int) -> Tensor:
    """Return fp32 x [rows, columns] with each `size` rows, a power of two, replaced by their random Hadamard transform: the
    orthogonal matrix H D, where D has fixed random signs (NVIDIA 2025, arXiv:2509.25149, section 4.2). The transform spreads an
    outlier over the rows, and (H D a)ᵀ (H D b) = aᵀ b.

    Sums have a fixed order, so equal rows give equal bits on every machine.
    """
    groups = x.float().unflatten(0, (-1, size)) * signs("hadamard", size).to(x.device)[:, None]
    half = 1
    while half < size:
        pairs = groups.unflatten(1, (-1, 2, half))
        one, other = pairs[:, :, 0], pairs[:, :, 1]
        groups = torch.stack((one + other, one - other), 2).flatten(1, 3)
        half *= 2
    return groups.mul_(size**-0.5).flatten(0, 1)
