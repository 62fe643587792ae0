"""Stand-ins for attention cores, norms and other operations during a trace. On a device each replaced operation is one fused kernel, or,
before FlashAttention, a chain of small kernels.

On the meta device torch would choose its plain attention, which keeps several times as many bytes as a fused kernel.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from megalith.kernels.grouped import Sizes
from megalith.kernels.permute import Order
from megalith.models.batch import Batch
from megalith.models.moe import Experts

Note = Callable[[str, Tensor, Tensor, Tensor], None]
"""Function (phase, q, k, v) that is called where a device would run its kernel."""

NoteRecurrence = Callable[[str, Tensor, Tensor], tuple[Tensor, ...]]
"""Function (phase, x, b) that is called where a device would run the kernel of Mamba-2's core; it returns the core's temporary tensors."""


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, note: Note) -> Tensor:
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        sums = q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, sums)
        ctx.note = note
        note("F", q, k, v)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, _, _ = ctx.saved_tensors
        found = *(torch.empty_like(each) for each in (q, k, v)), None
        ctx.note("I", q, k, v)
        return found


class FusedCore(nn.Module):
    """Attention that keeps q, k, v, its output and one sum a row, like FlashAttention (Dao et al. 2022, arXiv:2205.14135)."""

    def __init__(self, note: Note) -> None:
        super().__init__()
        self.note = note

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        return _Fused.apply(q, k, v, self.note)  # pyright: ignore[reportReturnType]


class _Kept(torch.autograd.Function):
    """An element-wise kernel that reads and writes the scores, and keeps `keep` bytes a score for backward."""

    @staticmethod
    def forward(ctx, scores: Tensor, keep: int) -> Tensor:
        out = torch.clone(scores)
        kept = scores.new_empty(scores.shape, dtype=torch.uint8) if keep == 1 else out
        ctx.save_for_backward(kept)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        (kept,) = ctx.saved_tensors
        return (grad * kept).to(grad.dtype), None


class PlainCore(nn.Module):
    """Unfused attention: q kᵀ; one kernel for scale, mask and softmax; dropout; and the product with v. Scores pass through memory, and 5
    bytes of each score are kept (Korthikanti et al. 2022, arXiv:2205.05198, section 4.1: softmax 2, dropout's mask 1 and output 2)."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        groups = q.shape[2] // k.shape[2]
        k, v = (x.repeat_interleave(groups, 2) if groups > 1 else x for x in (k, v))
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))  # (batch heads) seq head_dim
        scores = torch.bmm(q, k.transpose(1, 2)) if q.shape[-1] else q
        seen = _Kept.apply(_Kept.apply(scores, 2), 1)
        out = torch.bmm(seen, v)  # pyright: ignore[reportArgumentType]
        return out.unflatten(0, (batch.tokens.shape[0], -1)).transpose(1, 2)


class _Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate: Tensor, x: Tensor, b: Tensor, c: Tensor, step: Tensor, note: NoteRecurrence) -> Tensor:
        sums = x.new_empty(x.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(gate, x, b, c, step, torch.empty_like(x), sums)  # the one like x: the state's part of y
        ctx.note = note
        note("F", x, b)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        gate, x, b, c, step, _, _ = ctx.saved_tensors
        again = [torch.empty_like(each) for each in (x, b, c)]  # of the convolution
        states = ctx.note("I", x, b)
        found = *(torch.empty_like(each) for each in (gate, x, b, c, step)), None
        del again, states
        return found


class FusedMamba(nn.Module):
    """Mamba-2 between its projections, as mamba_ssm's `mamba_split_conv1d_scan_combined` computes it: the outputs of the
    projections and of the state are kept; convolution and states are computed again in backward."""

    def __init__(self, core: nn.Module, note: NoteRecurrence) -> None:
        super().__init__()
        self.core, self.note = core, note  # the core for its weights

    def forward(self, gate: Tensor, x: Tensor, b: Tensor, c: Tensor, step: Tensor, batch: Batch) -> Tensor:
        return _Recurrence.apply(gate, x, b, c, step, self.note)  # pyright: ignore[reportReturnType]


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return x * weight  # as many bytes as the kernel moves

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, _ = ctx.saved_tensors
        return grad * x, None


def fused_norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMS norm as one kernel: it keeps its input and one number a row."""
    return _Norm.apply(x, weight)  # pyright: ignore[reportReturnType]


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, order: Order) -> Tensor:
        ctx.shape = x.shape
        return x.index_select(0, order.order[: order.rows])

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad.unflatten(0, (ctx.shape[0], -1)).sum(1), None


def fused_spread(x: Tensor, order: Order) -> Tensor:
    """`kernels.permute.permute` as one kernel in forward and one in backward."""
    return _Spread.apply(x, order)  # pyright: ignore[reportReturnType]


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, weights: Tensor, order: Order) -> Tensor:
        ctx.order, ctx.weights = order, weights
        return rows.unflatten(0, (weights.shape[0], -1)).sum(1)

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad.index_select(0, ctx.order.order[: ctx.order.rows] // ctx.order.copies), torch.empty_like(ctx.weights), None


def fused_collect(rows: Tensor, weights: Tensor, order: Order) -> Tensor:
    """`kernels.permute.unpermute` as one kernel in forward and one in backward. As in Megatron-Core, routing weights are
    applied in the experts' activation, so this kernel keeps no rows."""
    return _Collect.apply(rows, weights, order)  # pyright: ignore[reportReturnType]


class _Gated(torch.autograd.Function):
    """activation(gate) * up of rows that hold gate and up: one kernel in forward and one in backward."""

    @staticmethod
    def forward(ctx, both: Tensor) -> Tensor:
        ctx.save_for_backward(both)
        gate, up = both.chunk(2, -1)
        return gate * up  # as many bytes as the kernel moves

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        (both,) = ctx.saved_tensors
        return (both.unflatten(-1, (2, -1)) * grad.unsqueeze(-2)).flatten(-2)


class PairedExperts(nn.Module):
    """`models.moe.Experts` in Megatron-Core's layout: gate and up are one weight and one product."""

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        count, hidden, dim = experts.up.shape
        self.up = nn.Parameter(experts.up.new_empty(count, 2 * hidden, dim))
        self.down = experts.down
        self.multiply = experts.multiply

    def forward(self, rows: Tensor, sizes: Sizes) -> Tensor:
        inner = _Gated.apply(self.multiply(rows, self.up, sizes=sizes))
        return self.multiply(inner, self.down, sizes=sizes)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, turned: int) -> Tensor:
        ctx.turned = turned
        x[..., -turned:].clone()  # as many bytes as the kernel moves
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        grad[..., -ctx.turned :].clone()
        return grad, None


def fused_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`kernels.rope.rotate` as one in-place kernel in forward and one in backward."""
    return _Rotate.apply(x, 2 * cos.shape[-1])  # pyright: ignore[reportReturnType]
