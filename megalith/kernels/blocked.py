"""Attention in bf16 as blocks of matrix products, for processors that multiply bf16 matrices fast. torch's fused CPU kernel uses
the processor's matrix units only if it has AMX. On processors with only avx512-bf16, a plain matrix product is several times as
fast as the products inside torch's fused kernel. In this module, one product computes the scores of a few hundred queries with
all their keys. These scores stay in the cache, in fp32 as in the fused kernel. Exponentials are computed as powers of two, which
torch computes four times as fast as powers of e.

Tensors are [batch, heads, seq, channels]. k and v may have fewer heads, each shared by consecutive heads of q; v may have another number of
channels.
"""

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, library

ROWS = 256  # queries at once: under the diagonal little is wasted, and products are large
SCORES = 1 << 21  # at once: 8 MiB
LOG2E = 1 / math.log(2)


@functools.cache
def _fast_products() -> bool:
    return torch.cpu._is_avx512_bf16_supported() and not torch.cpu._is_amx_tile_supported()


def pays(q: Tensor) -> bool:
    """True if the attention in this module is the fastest for queries such as q."""
    return q.device.type == "cpu" and q.dtype == torch.bfloat16 and q.shape[2] >= ROWS and _fast_products()


@contextlib.contextmanager
def _bf16_products() -> Iterator[None]:
    """Inside this context, products of fp32 matrices convert the factors to bf16, and add up and return fp32. The conversion to
    bf16 changes no number, because all factors in this module are bf16 numbers."""
    matmul = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


class _Some(NamedTuple):
    """Some key heads of one sequence, and the query heads that use them. Each key head has `group` query heads."""

    sequence: int
    keys: slice
    queries: slice

    def of_queries(self, x: Tensor) -> Tensor:
        """[batch, heads, seq, ...] -> [kv_heads, group, seq, ...]."""
        return x[self.sequence, self.queries].unflatten(0, (self.keys.stop - self.keys.start, -1))

    def of_keys(self, x: Tensor) -> Tensor:
        """[batch, kv_heads, seq, ...] -> [kv_heads, seq, ...]."""
        return x[self.sequence, self.keys].contiguous()


def _share(q: Tensor, k: Tensor) -> tuple[int, int]:
    each = q.shape[1] // k.shape[1] * min(ROWS, q.shape[2]) * k.shape[2]
    return min(k.shape[1], max(1, SCORES // each)), each


def _heads(q: Tensor, k: Tensor) -> Iterator[_Some]:
    group, (at_once, _) = q.shape[1] // k.shape[1], _share(q, k)
    for sequence in range(q.shape[0]):
        for first in range(0, k.shape[1], at_once):
            end = min(first + at_once, k.shape[1])
            yield _Some(sequence, slice(first, end), slice(first * group, end * group))


def _rows(seq: int) -> Iterator[slice]:
    for first in range(0, seq, ROWS):
        yield slice(first, min(first + ROWS, seq))


class _Scratch:
    """Memory for the scores of some queries with all their keys. All sets of queries use the same memory."""

    def __init__(self, q: Tensor, k: Tensor) -> None:
        self._memory = q.new_empty(math.prod(_share(q, k)), dtype=torch.float32)
        self._unseen = q.new_full((ROWS, ROWS), float("-inf"), dtype=torch.float32).triu_(1)

    def product(self, rows: Tensor, keys: Tensor, *, scale: float = 1.0) -> Tensor:
        """scale rows keysᵀ: [heads, rows, keys]."""
        shape = (rows.shape[0], rows.shape[1], keys.shape[1])
        out = self._memory[: math.prod(shape)].view(shape)
        with _bf16_products():
            return torch.baddbmm(out, rows, keys.mT, beta=0, alpha=scale, out=out)

    def hide_future(self, scores: Tensor, group: int) -> None:
        """Mask future keys: the last keys belong to the queries themselves, and no query sees a later key."""
        own = scores.shape[1] // group
        scores.unflatten(1, (group, own))[..., -own:].add_(self._unseen[:own, :own])


@library.custom_op("megalith::blocked_attention", mutates_args=())
def blocked_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """softmax(scale q kᵀ) v and its log-sum-exp [batch, heads, seq] in fp32; `causal` requires as many keys as queries."""
    batch, heads, seq, _ = q.shape
    out = q.new_empty(batch, seq, heads, v.shape[-1]).transpose(1, 2)
    lse = q.new_empty(batch, heads, seq, dtype=torch.float32)
    scratch = _Scratch(q, k)
    for some in _heads(q, k):
        every_q, every_out, every_lse = (some.of_queries(x) for x in (q, out, lse))
        every_k, every_v = some.of_keys(k).float(), some.of_keys(v)
        group = every_q.shape[1]
        for rows in _rows(seq):
            seen = rows.stop if causal else k.shape[2]
            scores = scratch.product(every_q[:, :, rows].flatten(1, 2).float(), every_k[:, :seen], scale=scale * LOG2E)
            if causal:
                scratch.hide_future(scores, group)
            most = scores.amax(-1, keepdim=True)
            total = scores.sub_(most).exp2_().sum(-1, keepdim=True)
            found = torch.bmm(scores.to(q.dtype), every_v[:, :seen]) / total
            every_out[:, :, rows] = found.unflatten(1, (group, -1))
            every_lse[:, :, rows] = (most / LOG2E + total.log()).view(-1, group, total.shape[1] // group)
    return out, lse


@library.custom_op("megalith::blocked_attention_backward", mutates_args=())
def blocked_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v that come from these keys. `out` and `lse` are over all keys that the queries see."""
    of_q, of_k, of_v = (torch.empty_like(x) for x in (q, k, v))
    chances_of, changes_of = _Scratch(q, k), _Scratch(q, k)
    for some in _heads(q, k):
        every_q, every_out, every_grad, every_lse, every_of_q = (some.of_queries(x) for x in (q, out, grad, lse, of_q))
        key, value = some.of_keys(k), some.of_keys(v)
        wide_key, wide_value = key.float(), value.float()
        group = every_q.shape[1]
        sum_k, sum_v = torch.zeros_like(wide_key), torch.zeros_like(wide_value)
        for rows in _rows(q.shape[2]):
            seen = rows.stop if causal else k.shape[2]
            query, of_out, given = (x[:, :, rows].flatten(1, 2) for x in (every_q, every_grad, every_out))
            total = every_lse[:, :, rows].flatten(1, 2).unsqueeze(-1) * LOG2E
            chances = chances_of.product(query.float(), wide_key[:, :seen], scale=scale * LOG2E)
            if causal:
                chances_of.hide_future(chances, group)
            chances.sub_(total).exp2_()
            wide = of_out.float()
            mean = (wide * given).sum(-1, keepdim=True)
            changes = changes_of.product(wide, wide_value[:, :seen]).sub_(mean).mul_(chances).to(q.dtype)
            sum_v[:, :seen] += torch.bmm(chances.to(q.dtype).mT, of_out)
            sum_k[:, :seen] += torch.bmm(changes.mT, query)
            every_of_q[:, :, rows] = torch.bmm(changes, key[:, :seen]).mul_(scale).unflatten(1, (group, -1))
        of_k[some.sequence, some.keys] = sum_k.mul_(scale)
        of_v[some.sequence, some.keys] = sum_v
    return of_q, of_k, of_v


@blocked_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    batch, heads, seq, _ = q.shape
    return q.new_empty(batch, seq, heads, v.shape[-1]).transpose(1, 2), q.new_empty(batch, heads, seq, dtype=torch.float32)


@blocked_attention_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep(ctx, inputs: tuple[Tensor, Tensor, Tensor, bool, float], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.set_materialize_grads(False)


def _gradients(ctx, grad: Tensor, _: Tensor | None) -> tuple[Tensor, Tensor, Tensor, None, None]:
    return *blocked_attention_backward(grad, *ctx.saved_tensors, ctx.causal, ctx.scale), None, None


blocked_attention.register_autograd(_gradients, setup_context=_keep)
