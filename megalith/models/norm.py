"""Normalisation."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) * weight over the last dimension (Zhang & Sennrich 2019), the mean in fp32."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x: Float[Tensor, "... dim"]) -> Float[Tensor, "... dim"]:
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)
