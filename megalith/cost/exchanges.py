"""What travels between ranks in the midst of a part's computation, written down instead of sent: the tensors have the shapes that the
exchange would give them."""

from math import gcd
from typing import Any

import torch
from torch import Tensor, nn

from megalith.cost.cores import Note
from megalith.cost.profile import Core, Exchanged, Layout
from megalith.cost.recorder import Recorder, Region, bytes_of
from megalith.kernels.grouped import Sizes
from megalith.models.moe import Experts, Here, Traffic
from megalith.models.router import Dealing


class _Resize(torch.autograd.Function):
    """What a collective at a boundary does to shapes: `dim` 1 becomes `forward` times as long, and back in backward."""

    @staticmethod
    def forward(ctx, x: Tensor, longer: int, recorder: Recorder, kinds: tuple[Exchanged, Exchanged], regather: bool) -> Tensor:
        ctx.recorder, ctx.kinds, ctx.shape = recorder, kinds, x.shape
        with torch._C._DisableTorchDispatch():
            length = x.shape[1] * longer if longer > 0 else x.shape[1] // -longer
            out = x.new_empty(x.shape[0], length, *x.shape[2:])
        whole = max(bytes_of(x), bytes_of(out))
        ctx.whole = whole
        recorder.exchange("tensor", kinds[0], whole)
        if regather:
            recorder.ignore(out)
            recorder.exchange("tensor", "gather", whole, "W")
        else:
            recorder.hold(out)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.recorder.exchange("tensor", ctx.kinds[1], ctx.whole)
        return grad.new_empty(ctx.shape), None, None, None, None


def split(module: nn.Module, recorder: Recorder, layout: Layout) -> None:
    """The boundary of a module whose products are split over `tensor`: gathered on entry, summed on leaving."""
    times, whole = layout.tensor, layout.sequence
    enter: tuple[Exchanged, Exchanged] = ("gather", "scatter")
    leave: tuple[Exchanged, Exchanged] = ("scatter", "gather")

    def before(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if whole:
            return _Resize.apply(args[0], times, recorder, enter, layout.regather), *args[1:]
        return _Copied.apply(args[0], recorder, False), *args[1:]

    def after(_: nn.Module, args: Any, out: Any) -> Any:
        if not isinstance(out, Tensor) or out.dim() < 3:
            return out
        return _Resize.apply(out, -times, recorder, leave, False) if whole else _Copied.apply(out, recorder, True)

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)


class _Copied(torch.autograd.Function):
    """Without sequence parallelism: the same tensor everywhere, summed on one of the two ways."""

    @staticmethod
    def forward(ctx, x: Tensor, recorder: Recorder, leaving: bool) -> Tensor:
        ctx.recorder, ctx.leaving = recorder, leaving
        if leaving:
            recorder.exchange("tensor", "sum", bytes_of(x))
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        if not ctx.leaving:
            ctx.recorder.exchange("tensor", "sum", bytes_of(grad))
        return grad, None, None


class _Dispatched(torch.autograd.Function):
    """Tokens on their way to experts of other ranks, or back: as many arrive as leave, since the router is even."""

    @staticmethod
    def forward(ctx, x: Tensor, recorder: Recorder) -> Tensor:
        ctx.recorder = recorder
        recorder.exchange("expert", "all_to_all", bytes_of(x))
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.recorder.exchange("expert", "all_to_all", bytes_of(grad))
        return grad, None


class _Shared(torch.autograd.Function):
    """Rows for experts that several ranks hold parts of: each sees the rows of all (`parts` > 1), and in the end has the sum of its own
    (`parts` < -1)."""

    @staticmethod
    def forward(ctx, rows: Tensor, parts: int, recorder: Recorder) -> Tensor:
        ctx.recorder, ctx.shape = recorder, rows.shape
        with torch._C._DisableTorchDispatch():
            out = rows.new_empty(rows.shape[0] * parts if parts > 0 else rows.shape[0] // -parts, *rows.shape[1:])
        ctx.whole = max(bytes_of(rows), bytes_of(out))
        recorder.exchange("expert_tensor", "all_to_all", ctx.whole)
        recorder.hold(out)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.recorder.exchange("expert_tensor", "all_to_all", ctx.whole)
        return grad.new_empty(ctx.shape), None, None


class Border(torch.autograd.Function):
    """From one region of a block into another; crossed the other way in backward."""

    @staticmethod
    def forward(ctx, rows: Tensor, recorder: Recorder, before: Region, after: Region) -> Tensor:
        ctx.recorder, ctx.before = recorder, before
        recorder.region = after
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.recorder.region = ctx.before
        return grad, None, None, None


class Away(Here):
    """Experts of several ranks: those of this one are traced, and what travels is written down."""

    def __init__(self, recorder: Recorder, layout: Layout) -> None:
        self.recorder, self.ranks, self.parts = recorder, layout.expert, layout.expert_tensor

    def plan(self, counts: Tensor, kept: int | None, dealing: Dealing | None) -> Traffic:
        assert dealing is not None, "a trace knows no scores: the router deals tokens out"
        rows = dealing.batch * dealing.seq * dealing.active
        each, left = divmod(rows * self.parts, dealing.experts // self.ranks)
        return Traffic(rows, Sizes([each + (expert < left) for expert in range(dealing.experts // self.ranks)]))

    def dispatch(self, rows: Tensor, traffic: Traffic) -> Tensor:
        return self._travel(Border.apply(rows, self.recorder, "router", "experts"))  # pyright: ignore[reportArgumentType]

    def combine(self, rows: Tensor, traffic: Traffic) -> Tensor:
        return Border.apply(self._travel(rows), self.recorder, "experts", "attention")  # pyright: ignore[reportReturnType]

    def run(self, experts: Experts, rows: Tensor, traffic: Traffic) -> Tensor:
        if self.parts == 1:
            return super().run(experts, rows, traffic)
        seen: Tensor = _Shared.apply(rows, self.parts, self.recorder)  # pyright: ignore[reportAssignmentType]
        out = super().run(experts, seen, traffic)
        return _Shared.apply(out, -self.parts, self.recorder)  # pyright: ignore[reportReturnType]

    def _travel(self, rows: Tensor) -> Tensor:
        return rows if self.ranks == 1 else _Dispatched.apply(rows, self.recorder)  # pyright: ignore[reportReturnType]


def core_note(recorder: Recorder, layout: Layout, window: int | None) -> Note:
    def note(phase: str, q: Tensor, k: Tensor, v: Tensor) -> None:
        keys, apart = k.shape[1] * layout.context, layout.ulysses
        copies = apart // gcd(apart, k.shape[2])  # so that each rank has heads of keys of its own
        heads, kv_heads = q.shape[2] // apart, k.shape[2] * copies // apart
        sizes = (q.shape[0], heads, kv_heads, q.shape[1] * apart, keys, q.shape[3], v.shape[3], window)
        recorder.cores.append(Core(recorder.phase, *sizes, again=phase == "F" and recorder.phase == "I"))
        recorder.kernels[recorder.phase] += 1 if phase == "F" else 3
        if layout.context > apart:
            recorder.exchange("context", "ring", copies * (bytes_of(k) + bytes_of(v)) * (1 if phase == "F" else 2))
        if apart > 1:  # queries, keys, values and output, or their gradients
            for size in (bytes_of(q), copies * bytes_of(k), copies * bytes_of(v), bytes_of(q) / q.shape[3] * v.shape[3]):
                recorder.exchange("context", "all_to_all", size)

    return note
