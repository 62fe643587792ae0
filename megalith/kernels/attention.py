"""Attention from a kernel that also returns the log-sum-exp. A query's keys may therefore be processed in parts, from any rank
and in any order.

Softmax over a union of key sets is the mean of the softmaxes over each set, weighted by the sets' sums of exponentials (online softmax,
Milakov and Gimelshein 2018, arXiv:1805.02867; ring attention, Liu et al. 2023, arXiv:2310.01889). The backward of FlashAttention (Dao et
al. 2022, arXiv:2205.14135) needs only the final output and log-sum-exp, so the gradients of each part can be computed exactly without the
others.

Tensors are [batch, heads, seq, channels]. k and v may have fewer heads, each shared by consecutive heads of q; v may have another number of
channels.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megalith.kernels.blocked import blocked_attention, blocked_attention_backward, pays
from megalith.kernels.mask import MaskBlock, MaskRows

ROWS = 128  # queries at once where no fused kernel helps: full-speed products, and scores of ROWS x seq at most
aten = torch.ops.aten


@dataclass(frozen=True)
class Kernel:
    """A kernel for softmax(scale q kᵀ) v over some of the keys. `causal` requires as many keys as queries.

    `forward(q, k, v, causal, scale)` returns the output and its log-sum-exp [batch, heads, seq] in fp32 (fp64 for fp64).
    `backward(grad, q, k, v, out, lse, causal, scale)` returns the gradients of q, k and v that come from these keys. Backward's
    `out` and `lse` must be those over *all* keys that the queries see.
    """

    forward: Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor]]
    backward: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool, float],
        tuple[Tensor, Tensor, Tensor],
    ]


def kernel_for(q: Tensor, v: Tensor, softcap: float | None = None) -> Kernel:
    """Return the fastest kernel for such tensors: the device's fused one if it supports them (none supports soft caps, and on CUDA none
    supports fp32 or wide heads), else a plain one. Some CPUs use `blocked` for bf16."""
    if softcap is not None:
        return chunked(softcap)
    if pays(q):
        return blocked
    if q.device.type != "cuda":
        return wide_cpu if q.dtype == torch.float16 else flash_cpu
    return flash_cuda if flash_takes(q, v) else chunked()


def flash_takes(q: Tensor, v: Tensor) -> bool:
    """True if FlashAttention on CUDA supports such tensors."""
    narrow = q.device.type == "cuda" and q.dtype in (torch.float16, torch.bfloat16) and max(q.shape[-1], v.shape[-1]) <= 256
    return narrow and _has_flash(q.device)


@lru_cache(maxsize=16)
def _has_flash(device: torch.device) -> bool:
    """True for Ampere and later; a V100 has no FlashAttention. Without a GPU (while an operation is only traced) the result is
    True."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= (8, 0)


# --- parts added up ---


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which parts are added up: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


class Running(NamedTuple):
    """Output and log-sum-exp over the keys processed so far, in the dtype in which parts are added up."""

    out: Tensor
    lse: Tensor

    @classmethod
    def start(cls, q: Tensor, v: Tensor) -> "Running":
        """Return the values for no keys: the output 0, and the log-sum-exp minus infinity."""
        batch, heads, seq, _ = q.shape
        dtype = work_dtype(q.dtype)
        return cls(
            q.new_zeros(batch, seq, heads, v.shape[-1], dtype=dtype).transpose(1, 2),  # as the core gives it: no copy there
            q.new_full((batch, heads, seq), float("-inf"), dtype=dtype),
        )

    def add(self, out: Tensor, lse: Tensor) -> None:
        """Merge the output and log-sum-exp over other keys into these, in place."""
        total = torch.logaddexp(self.lse, lse)
        self.out.mul_((self.lse - total).exp_().unsqueeze(-1))
        self.out.add_(out * (lse - total).exp_().unsqueeze(-1))
        self.lse.copy_(total)


def zeros_for(x: Tensor) -> Tensor:
    """Return a buffer for the sum of the gradients of x [batch, heads, seq, channels]."""
    batch, heads, seq, channels = x.shape
    return x.new_zeros(batch, seq, heads, channels, dtype=work_dtype(x.dtype)).transpose(1, 2)


def add_forward(
    running: Running, q: Tensor, k: Tensor, v: Tensor, *, rows: tuple[MaskRows, ...], kernel: Kernel, scale: float
) -> None:
    """Merge the attention over the pairs of queries and keys in `rows` into `running`."""
    for queries, keys, pair in _parts(rows):
        some_q, some_k, some_v = (_turn(x, pair) for x in (q[queries], k[keys], v[keys]))
        out, lse = kernel.forward(some_q, some_k, some_v, pair.sees != "all", scale)
        Running(running.out[queries], running.lse[queries]).add(_turn(out, pair), _turn(lse, pair, dim=-1))


def add_backward(
    sums: tuple[Tensor, Tensor, Tensor],
    saved: tuple[Tensor, ...],
    *,
    rows: tuple[MaskRows, ...],
    kernel: Kernel,
    scale: float,
) -> None:
    """Add the gradients that come from the pairs of queries and keys in `rows` to `sums` (of q, k and v). `saved` is the output's
    gradient, then q, k, v, out and lse."""
    grad, q, k, v, out, lse = saved
    of_q, of_k, of_v = sums
    for queries, keys, pair in _parts(rows):
        of_out, some_q, some_out = (_turn(x[queries], pair) for x in (grad, q, out))
        some_k, some_v = (_turn(x[keys], pair) for x in (k, v))
        some_lse = _turn(lse[queries], pair, dim=-1)
        grads = kernel.backward(of_out, some_q, some_k, some_v, some_out, some_lse, pair.sees != "all", scale)
        for total, where, part in zip((of_q, of_k, of_v), (queries, keys, keys), grads, strict=True):
            total[where].add_(_turn(part, pair))


Where = tuple[slice, slice, slice]


def _parts(rows: tuple[MaskRows, ...]) -> Iterator[tuple[Where, Where, MaskBlock]]:
    """Yield, for each block of pairs, the indices of [batch, heads, seq, ...] tensors of queries and of keys."""
    for first, end, pairs in rows:
        for pair in pairs:
            some, every = slice(first, end), slice(None)
            yield (
                (some, every, slice(pair.query, pair.query + pair.queries)),
                (some, every, slice(pair.key, pair.key + pair.keys)),
                pair,
            )


def _turn(x: Tensor, pair: MaskBlock, dim: int = -2) -> Tensor:
    """Reverse a tensor whose block sees the "future". In reverse order the block sees the "past", the only triangle that kernels
    compute."""
    return x.flip(dim) if pair.sees == "future" else x


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, rows: tuple[MaskRows, ...], kernel: Kernel, scale: float) -> Tensor:
        running = Running.start(q, v)
        add_forward(running, q, k, v, rows=rows, kernel=kernel, scale=scale)
        out = running.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, running.lse)
        ctx.how = {"rows": rows, "kernel": kernel, "scale": scale}
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, out, lse = ctx.saved_tensors
        sums = (zeros_for(q), zeros_for(k), zeros_for(v))
        add_backward(sums, (grad, q, k, v, out, lse), **ctx.how)
        return *(total.to(x.dtype) for total, x in zip(sums, (q, k, v), strict=True)), None, None, None


def attention(q: Tensor, k: Tensor, v: Tensor, *, rows: tuple[MaskRows, ...], kernel: Kernel, scale: float) -> Tensor:
    """Return softmax(scale q kᵀ) v over the pairs of queries and keys in `rows`. The cost is proportional to the number of pairs;
    no tensor larger than the inputs is kept. Every query must see a key."""
    return _Attention.apply(q, k, v, rows, kernel, scale)  # pyright: ignore[reportReturnType]


# --- kernels ---


def _padded(x: Tensor, channels: int) -> Tensor:
    return x if x.shape[-1] == channels else F.pad(x, (0, channels - x.shape[-1]))


def _width(q: Tensor, v: Tensor, multiple: int) -> int:
    return -(-max(q.shape[-1], v.shape[-1]) // multiple) * multiple


def _equal_channels(kernel: Kernel, multiple: int) -> Kernel:
    """Return a kernel that pads q, k and v with zeros to the same number of channels, a multiple of `multiple`. Zeros change no score."""

    def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        wide_q, wide_k, wide_v = (_padded(x, _width(q, v, multiple)) for x in (q, k, v))
        out, lse = kernel.forward(wide_q, wide_k, wide_v, causal, scale)
        return out[..., : v.shape[-1]], lse

    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide_grad, wide_q, wide_k, wide_v, wide_out = (_padded(x, _width(q, v, multiple)) for x in (grad, q, k, v, out))
        of_q, of_k, of_v = kernel.backward(wide_grad, wide_q, wide_k, wide_v, wide_out, lse, causal, scale)
        return of_q[..., : q.shape[-1]], of_k[..., : q.shape[-1]], of_v[..., : v.shape[-1]]

    return Kernel(forward, backward)


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)


def _cpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, causal, scale=scale)


def _in_fp32(kernel: Kernel) -> Kernel:
    """Return a kernel with inputs and results in fp32, so that parts are added up in fp32 and rounded once at the end."""

    def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        return kernel.forward(q.float(), k.float(), v.float(), causal, scale)

    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        return kernel.backward(grad.float(), q.float(), k.float(), v.float(), out.float(), lse, causal, scale)

    return Kernel(forward, backward)


def _cuda_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[:2]


def _cuda_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.zeros(2, dtype=torch.uint64, device=q.device)  # read only with dropout
    return aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal, random, random, scale=scale
    )


FLASH_WIDTH = 8  # channels are a multiple of that on CUDA
flash_cpu = _equal_channels(Kernel(_cpu_forward, _cpu_backward), 1)
wide_cpu = _in_fp32(flash_cpu)  # for fp16, where torch's own takes eight times as long
blocked = Kernel(blocked_attention, blocked_attention_backward)
flash_cuda = _equal_channels(Kernel(_cuda_forward, _cuda_backward), FLASH_WIDTH)


def flash(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention on CUDA with gradients, for tensors that `flash_takes` accepts. FlashAttention is called explicitly,
    because on an H100 torch would choose cuDNN's kernel. cuDNN's kernel is faster for long rows, but needs a setup for each new
    length, and its backward gave gradients of 1e35 for a document of 6 tokens (torch 2.11, cuDNN 9.19)."""
    wide = (_padded(x, _width(q, v, FLASH_WIDTH)) for x in (q, k, v))
    return aten._scaled_dot_product_flash_attention(*wide, 0.0, True, False, scale=scale)[0][..., : v.shape[-1]]


def flash_packed(q: Tensor, k: Tensor, v: Tensor, segments: tuple[tuple[int, ...], ...], scale: float) -> Tensor:
    """Compute causal attention on CUDA separately inside each segment of each row, in one call."""
    longest, ends = max(map(max, segments)), _ends(segments, q.device)
    wide = (_padded(x, _width(q, v, FLASH_WIDTH)).transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    out = aten._flash_attention_forward(*wide, ends, ends, longest, longest, 0.0, True, False, scale=scale)[0]
    return out[..., : v.shape[-1]].unflatten(0, (q.shape[0], q.shape[2])).transpose(1, 2)


@lru_cache(maxsize=16)  # every layer asks the same
def _ends(segments: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """Return 0 and the end of each segment (cu_seqlens), over all rows one after the other."""
    return torch.tensor([0, *accumulate(chain.from_iterable(segments))], dtype=torch.int32).to(device, non_blocking=True)


@lru_cache(maxsize=64)
def chunked(softcap: float | None = None, rows: int = ROWS) -> Kernel:
    """Return a plain kernel in fp32, which computes `rows` queries at a time, and the scores again in backward. This kernel is
    used when no fused one supports the tensors.

    Scores s become `softcap` tanh(s / softcap) (Gemma 2, Riviere et al. 2024, arXiv:2408.00118, section 2).
    """

    def scores(q: Tensor, k: Tensor, part: slice, causal: bool, scale: float) -> Tensor:
        """Return the capped scores of some queries, with -inf for keys that a query does not see: [batch, kv_heads, group, rows,
        keys]."""
        heads = k.shape[1]
        some = q[:, :, part].unflatten(1, (heads, -1)).to(work_dtype(q.dtype))
        found = some @ k[:, :, None].to(some.dtype).mT * scale
        if softcap is not None:
            found = softcap * (found / softcap).tanh()
        if causal:
            here = torch.arange(part.start, part.stop, device=q.device)
            found = found.masked_fill(torch.arange(k.shape[2], device=q.device) > here[:, None], float("-inf"))
        return found

    def parts(q: Tensor, k: Tensor, causal: bool) -> Iterator[tuple[slice, slice]]:
        """Yield sets of queries, each with all keys that any query of the set sees."""
        for first in range(0, q.shape[2], rows):
            end = min(first + rows, q.shape[2])
            yield slice(first, end), slice(0, end if causal else k.shape[2])

    def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        outs, sums = [], []
        for part, keys in parts(q, k, causal):
            found = scores(q, k[:, :, keys], part, causal, scale)
            total = found.logsumexp(-1, keepdim=True)
            out = (found - total).exp_() @ v[:, :, None, keys].to(found.dtype)
            outs.append(out.flatten(1, 2).to(q.dtype))
            sums.append(total.squeeze(-1).flatten(1, 2))
        return torch.cat(outs, dim=2), torch.cat(sums, dim=2)

    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype, heads = work_dtype(q.dtype), k.shape[1]
        of_q, of_k, of_v = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q, k, v))
        for part, keys in parts(q, k, causal):
            some, of_out, given, total = (x[:, :, part].unflatten(1, (heads, -1)).to(dtype) for x in (q, grad, out, lse))
            found = scores(q, k[:, :, keys], part, causal, scale)
            chances = (found - total.unsqueeze(-1)).exp()
            of_chances = of_out @ v[:, :, None, keys].to(dtype).mT
            of_scores = chances * (of_chances - (of_out * given).sum(-1, keepdim=True)) * scale
            if softcap is not None:
                of_scores = of_scores * (1 - (found.clamp(min=-softcap) / softcap).square())  # -inf where unseen: chances are 0
            of_q[:, :, part] = (of_scores @ k[:, :, None, keys].to(dtype)).flatten(1, 2)
            of_k[:, :, keys] += (of_scores.mT @ some).sum(2)
            of_v[:, :, keys] += (chances.mT @ of_out).sum(2)
        return of_q, of_k, of_v

    return Kernel(forward, backward)
