"""Normalisation."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from megalith.kernels.norm import rms_norm
from megalith.models.own import own_part
from megalith.spec.model import NormSpec


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) * weight over the last dimension (Zhang & Sennrich 2019), the mean in fp32.

    With `offset` the factor is 1 + weight, in fp32: bf16 would round factors near 1 to 1 (Gemma).
    """

    def __init__(self, dim: int, eps: float, offset: bool = False) -> None:
        super().__init__()
        self.eps = eps
        self.offset = offset
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x: Float[Tensor, "... dim"]) -> Float[Tensor, "... dim"]:
        if self.offset:
            return rms_norm(x, 1 + self.weight.float(), self.eps)
        return rms_norm(x, self.weight, self.eps)


class LayerNorm(nn.Module):
    """(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias over the last dimension (Ba et al. 2016). The bias is optional.

    With `offset` the factor is 1 + weight, and all is computed in fp32: bf16 would round factors near 1 to 1 (Nemotron-4).
    """

    bias: nn.Parameter | None

    def __init__(self, dim: int, eps: float, bias: bool = False, offset: bool = False) -> None:
        super().__init__()
        self.eps = eps
        self.offset = offset
        self.weight = nn.Parameter(torch.empty(dim))
        self.register_parameter("bias", nn.Parameter(torch.empty(dim)) if bias else None)

    def forward(self, x: Float[Tensor, "... dim"]) -> Float[Tensor, "... dim"]:
        if self.offset:
            bias = None if self.bias is None else self.bias.float()
            return F.layer_norm(x.float(), x.shape[-1:], 1 + self.weight.float(), bias, self.eps).to(x.dtype)
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)


def norm(dim: int, spec: NormSpec) -> nn.Module:
    """The module that normalises `dim` channels as `spec` says."""
    if spec.own:
        return own_part(spec.own, dim, spec)
    if spec.kind == "layer":
        return LayerNorm(dim, spec.eps, spec.bias, spec.offset)
    return RMSNorm(dim, spec.eps, spec.offset)
