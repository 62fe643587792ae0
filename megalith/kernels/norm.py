"""RMSNorm. In 16-bit formats on a CPU, RMSNorm computes a few rows at a time, so that the fp32 numbers between its passes stay in
the cache."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, library

AT_ONCE = 1 << 19  # numbers: 2 MiB in fp32


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension of x [..., dim] (Zhang & Sennrich 2019), computed in fp32 at least and
    returned in the dtype of x; weight [dim] has the dtype of x or fp32. Devices with a fused kernel, and compilers, use torch's own
    implementation."""
    if x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16) and not torch.compiler.is_compiling():
        return rms_norm_cpu(x, weight, eps)[0]
    if weight.dtype != x.dtype:  # the fused kernels want one dtype
        return F.rms_norm(x.to(weight.dtype), x.shape[-1:], weight, eps).to(x.dtype)
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def _some(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same rows of each tensor, as many at a time as fit the cache; the first tensor is [..., dim]."""
    rows = max(1, AT_ONCE // tensors[0].shape[-1])
    return zip(*(x.reshape(-1, x.shape[-1]).split(rows) for x in tensors), strict=True)


@library.custom_op("megalith::rms_norm", mutates_args=())
def rms_norm_cpu(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the normalised rows, and the factor by which each row was multiplied: fp32 [..., 1]."""
    out, factor = _empty(x)
    wide_weight = weight.float()
    for some_x, some_out, some_factor in _some(x, out, factor):
        wide = some_x.float()
        torch.linalg.vector_norm(wide, dim=-1, keepdim=True, out=some_factor)
        some_factor.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        some_out.copy_(wide.mul_(some_factor).mul_(wide_weight))
    return out, factor


@library.custom_op("megalith::rms_norm_backward", mutates_args=())
def rms_norm_cpu_backward(grad: Tensor, x: Tensor, weight: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x and weight."""
    of_x, wide_weight = torch.empty_like(x, memory_format=torch.contiguous_format), weight.float()
    of_weight = torch.zeros_like(wide_weight)
    for some_x, some_grad, some_of_x, some_factor in _some(x, grad, of_x, factor):
        normal, wide = some_x.float().mul_(some_factor), some_grad.float()
        both = wide * normal
        of_weight += both.sum(0)
        along = torch.mv(both, wide_weight).div_(x.shape[-1]).unsqueeze(-1)  # the part that would only change the row's length
        some_of_x.copy_(wide.mul_(wide_weight).sub_(normal.mul_(along)).mul_(some_factor))
    return of_x, of_weight.to(weight.dtype)


def _empty(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)


@rms_norm_cpu.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _empty(x)


@rms_norm_cpu_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(weight)


def _keep(ctx, inputs: tuple[Tensor, Tensor, float], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _gradients(ctx, grad: Tensor, _: Tensor | None) -> tuple[Tensor, Tensor, None]:
    return *rms_norm_cpu_backward(grad, *ctx.saved_tensors), None


rms_norm_cpu.register_autograd(_gradients, setup_context=_keep)
