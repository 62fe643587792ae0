"""The product a b of matrices: in bf16 also for processors without bf16 instructions, and in fp16 for every processor.

Without native instructions, torch's products in bf16 and in fp16 take many times as long as fp32 products (benchmarks/parts.py).
In bf16 without such instructions, and in fp16, the factors are converted to fp32, which is exact, and the product is rounded once,
as native instructions would do (in fp16, this is the definition on a CPU). Counters of operations see only one product and its result.
`defined_product` is the definition of products in narrow formats.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, library, nn

_LIBRARY = library.Library("megalith", "FRAGMENT")
_LIBRARY.define("mm(Tensor a, Tensor b, Tensor? bias=None) -> Tensor")
_LIBRARY.define("mm.out(Tensor a, Tensor b, *, Tensor(c!) out) -> Tensor(c!)")
_LIBRARY.define("mm.partial(Tensor a, Tensor b, int tile) -> Tensor")
_LIBRARY.impl("mm", lambda a, b, bias=None: _sums(a, b, bias).to(a.dtype), "CPU")
_LIBRARY.impl("mm.partial", lambda a, b, tile: _partial_sums(a, b, tile), "CPU")
_LIBRARY.impl("mm.out", lambda a, b, *, out: out.copy_(a.float() @ b.float()), "CPU")


def _sums(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    sums = a.float() @ b.float()
    return sums if bias is None else sums.add_(bias.float())


PARTIAL = 128
"""How many numbers of the inner dim give one partial sum in products of narrow formats (DeepSeek-V3, arXiv:2412.19437, section 3.3.2)"""


def _partial_sums(a: Tensor, b: Tensor, tile: int) -> Tensor:
    total = a[:, :tile] @ b[:tile]
    part = torch.empty_like(total)
    for first in range(tile, a.shape[1], tile):
        total.add_(torch.mm(a[:, first : first + tile], b[first : first + tile], out=part))
    return total


def sum_in_fp32() -> None:
    """Make GPUs add up products in bf16 and fp16 in fp32 to the end. By default torch lets them split a sum, and round each part to 16 bits
    before the parts are added up."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


@functools.cache
def native() -> bool:
    """True if this machine's processor multiplies bf16 numbers."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()) if torch.backends.mkldnn.is_available() else False


def widened(a: Tensor) -> bool:
    """True if products of `a` are computed in fp32: on a CPU in fp16, and in bf16 without native instructions; but not for fake tensors,
    and not under torch.compile, which picks its own kernels."""
    return a.dtype in (torch.bfloat16, torch.float16) and _ours(a) and (a.dtype == torch.float16 or not native())


def _ours(a: Tensor) -> bool:
    return a.device.type == "cpu" and type(a) in (Tensor, nn.Parameter) and not torch.compiler.is_compiling()


def product(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Multiply a [..., k] by b [k, n] -> [..., n], without an autograd graph. If `out` is given, it must have the result's shape,
    and the result is written to it."""
    if not widened(a):
        return a @ b if out is None else torch.mm(a, b, out=out)
    if out is not None:
        return torch.ops.megalith.mm.out(a, b, out=out)
    return torch.ops.megalith.mm(a.reshape(-1, a.shape[-1]), b).view(*a.shape[:-1], b.shape[-1])


def defined_product(a: Tensor, b: Tensor, tile: int = PARTIAL) -> Tensor:
    """Multiply fp32 a [..., k] by b [k, n] -> [..., n] by the definition of products in narrow formats: each `tile` numbers of the inner
    dim give one partial sum in fp32, and partial sums are added up in fp32, in order. Only a CPU keeps this order; elsewhere the device
    chooses an order of fp32 sums."""
    if not _ours(a):
        return a @ b
    return torch.ops.megalith.mm.partial(a.flatten(0, -2), b, tile).view(*a.shape[:-1], b.shape[-1])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b, rounded once: x [..., in], weight [out, in], bias [out] -> [..., out]."""
    if not widened(x):
        return F.linear(x, weight, bias)
    return torch.ops.megalith.mm(x.reshape(-1, x.shape[-1]), weight.T, bias).view(*x.shape[:-1], len(weight))
